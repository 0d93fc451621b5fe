"""The nouns everybody shares: what a request asks for, what a batch holds, what a step answers.

Plain data that also crosses between ranks (msgpack, never pickle). Knows no tensors, no text, no HTTP.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ts_pippy_handler.errors import InvalidRequestError


class FinishReason(enum.StrEnum):
    """Why a request ended; every accepted request ends with exactly one."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The number of new tokens that was asked for, or the end of the model's window."""
    ABORT = "abort"
    """Cancelled by the client."""
    ERROR = "error"
    """The pipeline failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How new tokens are chosen and when to stop."""

    max_new_tokens: int
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one; 0 for all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and of the new text become less likely, as in transformers."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token of the new text."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token each time the new text has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits: pairs of a token id and a number; -100 all but bans a token, 100 all but forces it."""
    seed: int = 0
    """Decides the random draws: the same seed gives the same tokens, alone or in any batch."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, as end-of-sequence tokens do, also where those are ignored."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    min_tokens: int = 0
    """Until there are this many new tokens, none that would end the text is chosen; stop strings still end it."""
    logprobs: int | None = None
    """How many of the most likely tokens to report beside each chosen one; None reports nothing.

    What is reported is the logarithm of the model's own probability: no penalty, bias, temperature or filter counts.
    """
    only_logits: bool = False
    """Generate nothing: run the prompt and return the logits of all its tokens."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely the model held a new token to be, and which ones it held to be most likely."""

    logprob: float
    """Of the chosen token."""
    top: list[tuple[int, float]]
    """Ids and log-probabilities, most likely first; the chosen token is among them if it is likely enough."""


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "at least 0"),
    "top_k": (lambda value: value >= 0 and value == int(value), "a whole number, at least 0 (which counts all)"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "at least 0 and at most 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "above 0"),
    "seed": (lambda value: 0 <= value < 2**64 and value == int(value), "a whole number, at least 0 and below 2**64"),
}


def check_sampling(params: SamplingParams) -> None:
    """Refuse values that no rank could sample with.

    Raises:
        InvalidRequestError: Naming the value and what is allowed.
    """
    for name, (is_allowed, allowed) in _RANGES.items():
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_allowed(value):
            raise InvalidRequestError(f"{name}: must be {allowed}, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """One step of one request: a new token, the end, or both."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    """Of ``token_id``, when the request asks for it."""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    """What went wrong, when ``finish_reason`` is ``ERROR``."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of a batch that belong to one request.

    The request's cache, in token order, lies in ``runs``: pairs ``(first_slot, num_slots)`` of cache slots.
    ::

        logical position   0 ........ num_cached ........ num_cached + num_tokens
                           [ written earlier  |  written by this batch ]
    """

    num_tokens: int
    num_cached: int
    runs: list[tuple[int, int]]

    @property
    def context_len(self) -> int:
        """Tokens that the last row of the segment attends to, itself included."""
        return self.num_cached + self.num_tokens


class Processing(msgspec.Struct, frozen=True, array_like=True):
    """What few requests ask for: changed logits, and how likely the tokens were. See :class:`SamplingParams`.

    The last stage keeps nothing between batches, so this carries the tokens that the penalties look at.
    """

    prompt: list[int]
    """Tokens of the prompt, for the repetition penalty; empty without one."""
    generated: list[int]
    """New tokens so far, for any penalty; empty without one."""
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    suppressed: list[int]
    """Tokens that must not be chosen now."""
    logprobs: int | None


class SampledRow(msgspec.Struct, frozen=True, array_like=True):
    """A batch row whose next token is sampled, and how."""

    row: int
    position: int
    """Number of tokens before the sampled one; with ``seed`` it decides the draw."""
    temperature: float
    top_k: int
    top_p: float
    seed: int
    processing: Processing | None = None
    """None for most rows, which costs one byte on the wire."""

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report beside the chosen one; None when nothing is to be reported."""
        return None if self.processing is None else self.processing.logprobs


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What every stage is told of one pass: one packed row of tokens of any requests, without padding.

    ``token_ids`` has one entry per row; ``segments`` cover the rows in order; ``sampled`` names the rows whose
    logits are wanted.
    """

    number: int
    token_ids: list[int]
    segments: list[Segment]
    sampled: list[SampledRow]
    return_logits: bool = False
    """Whether rank 0 also wants the logits of the sampled rows."""

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return len(self.token_ids)
