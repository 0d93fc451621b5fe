"""Stand-ins for what is slow or far away: a model of integers, an engine without a thread, TorchServe's context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ts_pippy_handler import meter
from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.meter import RankStats
from ts_pippy_handler.request import Batch, FinishReason, SamplingParams, TokenEvent, TokenLogprobs

VOCAB = 97
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """Return a token that changes with every token before it, and with their order."""
    state = 1
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return state % VOCAB


def continuation(
    prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = (EOS,)
) -> tuple[list[int], FinishReason]:
    """Continue one prompt alone: what any mixture of batches must give too."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        new = tokens[len(prompt) :]
        if new[-1] in params.stop_token_ids or (new[-1] in eos and not params.ignore_eos):
            return new, FinishReason.STOP
        if len(new) == params.max_new_tokens:
            return new, FinishReason.LENGTH


class SlotModel:
    """Remembers tokens at cache slots, as the stages remember keys and values, and knows a context only from there."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def run(self, batch: Batch) -> list[int]:
        """Write the batch's tokens to their slots and return the next token of every sampled row."""
        contexts: list[tuple[list[int], int]] = []
        written: set[int] = set()
        start = 0
        for segment in batch.segments:
            slots = [slot for first, count in segment.runs for slot in range(first, first + count)]
            own = slots[segment.num_cached : segment.context_len]
            assert len(own) == segment.num_tokens, "the runs are too short for the segment"
            assert not written & set(own), "two rows of one batch share a slot"
            written |= set(own)
            for offset, slot in enumerate(own):
                self.slots[slot] = batch.token_ids[start + offset]
                contexts.append((slots, segment.num_cached + offset + 1))
            start += segment.num_tokens
        assert start == batch.num_tokens, "the segments do not cover the rows"
        answers = []
        for row in batch.sampled:
            slots, length = contexts[row.row]
            assert batch.return_logits or row.position == length
            answers.append(next_token([self.slots[slot] for slot in slots[:length]]))
        return answers


class FakeEngine:
    """Answers at once or when told to, on the caller's thread."""

    def __init__(self, *, max_len: int = 64, answer_at_once: bool = True, fail_at: int | None = None) -> None:
        self.max_len = max_len
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.aborted: list[int] = []
        self.timeouts: list[float | None] = []
        self.refusal: PippyError | None = None
        self._answer_at_once = answer_at_once
        self._fail_at = fail_at
        self._pending: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def check_room(self, num_requests: int) -> None:
        if self.refusal is not None:
            raise self.refusal

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_event: Callable[[TokenEvent], None],
        *,
        timeout_s: float | None = None,
    ) -> int:
        number = len(self.submitted)
        self.timeouts.append(timeout_s)
        if self._fail_at == number:
            raise PippyError(f"request {number} cannot start")
        self.submitted.append((list(prompt_token_ids), params))
        new, reason = continuation(prompt_token_ids, params, eos=())

        def answer() -> None:
            for index, token in enumerate(new):
                if number in self.aborted:
                    on_event(TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))
                    return
                wanted = params.logprobs
                logprobs = None if wanted is None else TokenLogprobs(-float(index), [(token, -0.5)] * wanted)
                end = reason if index + 1 == len(new) else None
                on_event(TokenEvent(token_id=token, finish_reason=end, logprobs=logprobs))

        self._pending.append(answer)
        return number

    def answer_oldest(self) -> None:
        """Finish the request that was submitted first."""
        self._pending.pop(0)()

    def answer_all(self) -> None:
        """Finish every request."""
        while self._pending:
            self.answer_oldest()

    def abort(self, number: int) -> None:
        self.aborted.append(number)

    def stats(self, *, reset: bool = False) -> list[RankStats]:
        """Return what this process counts, as rank 0."""
        return [RankStats(rank=0, **meter.read(reset))]


class FakeContext:
    """TorchServe's context, as far as handlers use it."""

    def __init__(self, config: dict[str, Any], request_ids: Sequence[str] = (), model_dir: str | None = None) -> None:
        self.model_yaml_config = config
        self.manifest: dict[str, Any] = {"model": {"modelName": "fake"}}
        self.system_properties: dict[str, Any] = {"model_dir": model_dir, "gpu_id": None}
        self.request_ids = dict(enumerate(request_ids))
        self.statuses: dict[int, tuple[int, str]] = {}
        self.content_types: dict[int, str] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.request_headers: dict[int, dict[str, str]] = {}
        self.stopping_criteria: object = "untouched"
        self.is_grpc = False

    def get_all_request_header(self, index: int) -> dict[str, str]:
        own = self.request_headers.get(index, {})
        return {"data": {"content-type": ""}} if self.is_grpc else {"explain": "False", **own}  # type: ignore[dict-item]

    def get_request_header(self, index: int, name: str) -> str | None:
        return self.request_headers.get(index, {}).get(name)

    def get_response_status(self, index: int) -> tuple[int | None, str | None]:
        return self.statuses.get(index, (200, None))

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.statuses[idx] = (code, phrase)

    def set_response_content_type(self, index: int, value: str) -> None:
        self.content_types[index] = value

    def set_response_header(self, index: int, name: str, value: str) -> None:
        self.headers.setdefault(index, {})[name] = value
