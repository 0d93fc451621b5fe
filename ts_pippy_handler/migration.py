"""What upstream's handlers call and transformers 5 no longer has, so that a migrating handler only changes imports.

Every stand-in warns and says what to write instead; none of them changes a call that transformers accepts. Knows
transformers only. Source of the calls: TorchServe ``examples/large_models/Huggingface_pippy/pippy_handler.py``.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch


def with_encode_plus(tokenizer: Any) -> Any:
    """Give a tokenizer the ``encode_plus(..., pad_to_max_length=True)`` that transformers 5 removed."""
    if tokenizer is not None and not hasattr(tokenizer, "encode_plus"):
        tokenizer.encode_plus = functools.partial(_encode_plus, tokenizer)
    return tokenizer


def _encode_plus(tokenizer: Any, text: str, *, pad_to_max_length: bool = False, **arguments: Any) -> Any:
    warnings.warn(
        "tokenizer.encode_plus is gone from transformers; call tokenizer(text, padding='max_length', ...)",
        DeprecationWarning,
        stacklevel=2,
    )
    if pad_to_max_length:
        arguments.setdefault("padding", "max_length")
    return tokenizer(text, **arguments)


def accept_meta_from_pretrained() -> None:
    """Let ``AutoModelForCausalLM.from_pretrained`` work under ``torch.device("meta")`` again, in this process.

    transformers 5 raises there, since it could not load weights; upstream's handlers want none at that point.
    """
    from transformers import AutoModelForCausalLM  # transformers takes a second to import

    original = AutoModelForCausalLM.from_pretrained
    if getattr(original, "accepts_meta", False):
        return

    @functools.wraps(original)
    def from_pretrained(name: str, *arguments: Any, **options: Any) -> Any:
        if torch.get_default_device().type != "meta":
            return original(name, *arguments, **options)
        return _without_weights(name, **options)

    from_pretrained.accepts_meta = True  # type: ignore[attr-defined]
    AutoModelForCausalLM.from_pretrained = from_pretrained


def _without_weights(name: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    warnings.warn(
        "from_pretrained under torch.device('meta') is refused by transformers 5; use from_config, "
        "or pass None for the model to get_pipeline_driver",
        DeprecationWarning,
        stacklevel=3,
    )
    dtype = options.pop("dtype", None) or options.pop("torch_dtype", None)
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
