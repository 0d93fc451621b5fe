"""A checkpoint's config.json: what it says, and one readable line when it cannot be so.

Mistakes are named with file, field and value before anything is built from them. Knows nothing of weights or of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ts_pippy_handler.config import written_config
from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.validation import show

WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
"""Under which names a config sets the model's window."""
_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads"),
    *("hidden_size", "n_embd", "d_model", "vocab_size"),
)
_OBJECTS = ("quantization_config", "rope_parameters", "rope_scaling")
_MAX_LAYERS = 10_000
"""Far more than any model has; building so many would take all memory before anything could be said."""


def check_written(model_path: str) -> None:
    """Check what can be told from the file alone, in no time.

    Raises:
        CheckpointError: Naming file, field and value.
    """
    written = written_config(model_path)
    for key, value in written.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        wanted = None
        if key in _COUNTS and is_number and value < 1:
            wanted = "must be at least 1"
        elif key in _COUNTS[:3] and is_number and value > _MAX_LAYERS:
            wanted = f"must be at most {_MAX_LAYERS}"
        elif key in WINDOW_KEYS and is_number and value == 0:  # some say -1 for a model without a window
            wanted = "must be the number of tokens a text may have, at least 1"
        elif key in _OBJECTS and not isinstance(value, dict | None):
            wanted = "must be a JSON object"
        elif key in ("dtype", "torch_dtype") and not isinstance(value, str | dict | None):
            wanted = "must be the name of a dtype, such as 'bfloat16'"
        if wanted is not None:
            raise CheckpointError(f"{model_path}/config.json: {key}: {wanted}, got {show(value)}")


def read_config(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """Read a checkpoint's config.json as transformers does.

    Raises:
        CheckpointError: If it is missing or wrong.
    """
    from transformers import AutoConfig  # transformers takes a second to import

    if not (Path(model_path) / "config.json").is_file():
        raise CheckpointError(f"{model_path}: no config.json there, so it is not a Hugging Face checkpoint directory")
    check_written(model_path)
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{model_path}/config.json: {reason(error, written_config(model_path))}") from error


def reason(error: BaseException, written: Mapping[str, Any]) -> str:
    """Say in one line what an error of transformers finds wrong with a config, with the field where it can be told."""
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        return one_line(error.__cause__)  # names the field; what is around it only says that it is a mistake
    text = one_line(error)
    # A value that the text quotes: "module 'torch' has no attribute 'float33'" is about dtype.
    named = [f"{key}: {value!r}" for key, value in _texts(written) if f"'{value}'" in text]
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return ": ".join([*named[:1], kind + text])


def _texts(written: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in written.items():
        if isinstance(value, str) and value:
            yield f"{prefix}{key}", value
        elif isinstance(value, dict):
            yield from _texts(value, f"{prefix}{key}.")
