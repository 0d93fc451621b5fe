"""A request while the scheduler has it, and a batch whose tokens it brings. No torch, no text, no network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ts_pippy_handler.request import Batch, Processing, SampledRow, SamplingParams

_PROCESSED = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "logprobs",
)
"""What a request asks for by a :class:`Processing` on its rows, where it differs from the default."""


@dataclass(eq=False, slots=True)
class RequestState:
    """A request inside the scheduler."""

    number: int
    params: SamplingParams
    num_prompt: int
    tokens: list[int]
    num_scheduled: int = 0
    is_awaited: bool = False
    """Whether a batch in flight will bring its next token."""
    last_batch: int = -1
    """The batch that carried it last, or the newest one when it was admitted; the least comes first."""
    num_shared: int = 0
    """Tokens found in the cache when it was admitted."""
    block_names: list[bytes] = field(default_factory=list)
    """Names of its full blocks, as far as they were needed (see :mod:`~ts_pippy_handler.prefix_cache`)."""
    is_processed: bool = field(init=False)
    """Whether it asks for more than temperature, top_k and top_p."""

    def __post_init__(self) -> None:
        plain, params = SamplingParams(max_new_tokens=self.params.max_new_tokens), self.params
        self.is_processed = not params.only_logits and any(
            getattr(params, name) != getattr(plain, name) for name in _PROCESSED
        )

    @property
    def num_generated(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that no batch has carried yet."""
        return len(self.tokens) - self.num_scheduled

    def sampled_rows(self, rows: range, forbidden: Collection[int]) -> list[SampledRow]:
        """Return how the next token, none of ``forbidden``, is chosen from each of ``rows`` of a batch."""
        params = self.params
        is_processed = self.is_processed or (forbidden and not params.only_logits)
        processing = self._processing(forbidden) if is_processed else None
        choice = (params.temperature, params.top_k, params.top_p, params.seed, processing)
        return [SampledRow(row, len(self.tokens), *choice) for row in rows]

    def _processing(self, forbidden: Collection[int]) -> Processing:
        params = self.params
        repeats = params.repetition_penalty != 1
        counts = bool(params.presence_penalty or params.frequency_penalty)
        return Processing(
            prompt=self.tokens[: self.num_prompt] if repeats else [],
            generated=self.tokens[self.num_prompt :] if repeats or counts else [],
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            suppressed=sorted(forbidden),
            logprobs=params.logprobs,
        )


@dataclass(slots=True)
class Step:
    """A batch and who gets what of its result."""

    batch: Batch
    sampled: list[tuple[RequestState, int]] = field(default_factory=list)
    """Requests with sampled rows, in order, and how many rows each has."""
