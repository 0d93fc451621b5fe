"""What a checkpoint's files say of generation: tokens that end, fill or never appear, and defaults of sampling.

generation_config.json is read as it stands: transformers' own class fills in what the file does not say (``top_k`` of
50). What it asks for and we do not do is refused, since the tokens would be others than transformers'. Knows no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ts_pippy_handler.config import Float, Int
from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.json_files import read_object
from ts_pippy_handler.validation import describe_errors, show

_FILE = "generation_config.json"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "stop_strings": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
"""Settings that change which tokens transformers generates and that are not supported, with the values, besides null,
that change nothing."""

# -1 is how some say that there is none.
TokenId = Annotated[Int, Field(ge=-1, lt=2**63)]


class GenerationDefaults(BaseModel):
    """The settings that are honoured; None where the files say nothing."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    eos_token_id: TokenId | list[TokenId] | None = Field(None, description="a token id or a list of them")
    pad_token_id: TokenId | None = None
    suppress_tokens: list[TokenId] | None = Field(None, description="a list of token ids")
    """Never generated."""
    temperature: Float | None = Field(None, ge=0, allow_inf_nan=False)
    top_k: Int | None = Field(None, ge=-1)
    top_p: Float | None = Field(None, gt=0, le=1)
    min_p: Float | None = Field(None, ge=0, le=1)
    repetition_penalty: Float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a text; a model may have several."""
        given = self.eos_token_id
        return _real(given if isinstance(given, list) else [] if given is None else [given])

    @property
    def pad(self) -> int | None:
        """Id that fills rows; many models have none."""
        return next(iter(_real([] if self.pad_token_id is None else [self.pad_token_id])), None)

    @property
    def suppressed(self) -> list[int]:
        """Ids that are never generated."""
        return _real(self.suppress_tokens or [])

    @property
    def num_likeliest(self) -> int | None:
        """``top_k``, with 0 for all."""
        return 0 if self.top_k == -1 else self.top_k


def read_defaults(model_path: str) -> GenerationDefaults:
    """Read what the files in a checkpoint's directory say.

    Args:
        model_path: Directory of the checkpoint. Without generation_config.json there are no defaults; the ids that it
            does not name are those of config.json.

    Raises:
        CheckpointError: If a file cannot be read, or asks for what is not supported.
    """
    directory = Path(model_path)
    written = _read(directory / _FILE)
    for key, values in _NEUTRAL.items():
        value = written.get(key)
        if value is not None and value not in values:
            raise CheckpointError(
                f"{directory / _FILE}: {key}: {show(value)} is not supported, and transformers would generate other "
                "tokens with it; take the key out of the file to serve the model without"
            )
    ids = {key: value for key, value in _read(directory / "config.json").items() if key in _IDS and value is not None}
    given = {key: value for key, value in written.items() if key in GenerationDefaults.model_fields}
    fields = ids | {key: value for key, value in given.items() if value is not None}
    try:
        return GenerationDefaults.model_validate(fields)
    except ValidationError as error:
        wrong = {str(item["loc"][0]) for item in error.errors()}
        file = directory / (_FILE if wrong & set(given) else "config.json")
        raise CheckpointError(f"{file}: {describe_errors(error, GenerationDefaults, fields)}") from None


_IDS = ("eos_token_id", "pad_token_id")


def _read(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _real(token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id >= 0]
