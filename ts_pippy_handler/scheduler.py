"""Decide what runs next: waiting and running requests in, batches of integers out. No torch, no text, no network.

Continuous batching over a pipeline: while the batches in flight have not come back, their requests rest and others
form the next batch, so that every stage has work. A request's tokens are its prompt and what was generated so far::

    tokens        [ prompt ............................ | generated ... ]
    num_scheduled [ sent through the stages |  still to send           ]

A step sends the unsent tokens, the prompt in chunks where the token budget asks for it; when the last one was sent
its logits give the next token. When the cache is full, the youngest request gives its blocks back and starts over.
Requests that begin with the same blocks of tokens share them, once a batch has carried them to the stages.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ts_pippy_handler.errors import InvalidRequestError, OverloadedError, PippyError
from ts_pippy_handler.kv_cache import BlockAllocator
from ts_pippy_handler.prefix_cache import extend_names
from ts_pippy_handler.request import Batch, FinishReason, SamplingParams, Segment, TokenEvent, TokenLogprobs
from ts_pippy_handler.request_state import RequestState, Step

_NO_NUMBERS = (
    "the model computed NaN or infinity for this text, so there is no next token: most often float16 is too narrow for "
    "the model (try bfloat16 or float32), or its weights are damaged"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the scheduler."""

    max_len: int
    """Tokens of a request, prompt and new ones together."""
    max_batch_tokens: int
    max_running: int
    max_waiting: int
    num_in_flight: int
    """Batches that may be under way at the same time."""

    @property
    def max_unfinished(self) -> int:
        """Requests that may run or wait."""
        return self.max_running + self.max_waiting


class Scheduler:
    """Owns every request from :meth:`add` to its finishing event.

    Args:
        allocator: The cache, of which the scheduler is the only user.
        limits: What bounds it.
        eos_token_ids: Ids that end a text.
        suppressed: Ids that are never generated.
        prefix_caching: Whether requests share cached tokens that they have in common.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        limits: Limits,
        eos_token_ids: Collection[int] = (),
        *,
        suppressed: Collection[int] = (),
        prefix_caching: bool = True,
    ) -> None:
        self.allocator = allocator
        self.limits = limits
        self.eos_token_ids = frozenset(eos_token_ids)
        self._suppressed = frozenset(suppressed)
        self._waiting: deque[RequestState] = deque()
        self._running: dict[int, RequestState] = {}
        self._num_batches = 0
        self._num_in_flight = 0
        self._prefix_caching = prefix_caching
        self.num_prefix_hits = 0
        """Prompt tokens that were found in the cache instead of computed, since the start."""
        self.num_prompt_computed = 0
        """Prompt tokens that were computed, again after evictions too, since the start."""
        self.num_evictions = 0
        """Times a request had to give its cache back, since the start."""

    @property
    def num_running(self) -> int:
        """Requests that hold cache."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or had to give their cache back."""
        return len(self._waiting)

    def check(self, num_prompt: int, params: SamplingParams, num_unfinished: int | None = None) -> None:
        """Refuse a request that could never finish.

        Args:
            num_prompt: Tokens of its prompt.
            params: What it asks for.
            num_unfinished: Requests accepted so far that have not ended; by default those added here.

        Raises:
            InvalidRequestError: Naming what was asked for and what is possible.
            OverloadedError: If too many requests wait already.
        """
        room = min(self.limits.max_len, self.allocator.num_blocks * self.allocator.block_size)
        if num_prompt < 1:
            raise InvalidRequestError("the prompt is empty: it has no tokens, at least one is needed")
        if params.only_logits:
            if num_prompt > room:
                raise InvalidRequestError(f"the prompt has {num_prompt} tokens; at most {room} fit")
        elif num_prompt + 1 > room:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens; at most {room - 1} fit, "
                f"so that one new token stays within the limit of {room}"
            )
        elif num_prompt + params.max_new_tokens > room:
            raise InvalidRequestError(
                f"max_new_tokens (max_tokens) is {params.max_new_tokens}, but with a prompt of {num_prompt} tokens "
                f"at most {room - num_prompt} are possible (limit of {room} in all)"
            )
        if params.min_tokens > params.max_new_tokens:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but at most {params.max_new_tokens} new tokens are generated"
            )
        unfinished = self.num_running + self.num_waiting if num_unfinished is None else num_unfinished
        if unfinished >= self.limits.max_unfinished:
            raise OverloadedError(f"{unfinished - self.num_running} requests are waiting already, try again later")

    def add(self, number: int, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Accept a request that passed :meth:`check`."""
        self._waiting.append(RequestState(number, params, len(prompt_token_ids), list(prompt_token_ids)))

    def abort(self, number: int) -> bool:
        """Forget a request and free its cache at once; False if it is unknown or has finished.

        Batches in flight may still write its slots, harmlessly: every stage works in order, so a later owner writes
        after them.
        """
        sequence = self._running.pop(number, None)
        if sequence is None:
            sequence = next((waiting for waiting in self._waiting if waiting.number == number), None)
            if sequence is None:
                return False
            self._waiting.remove(sequence)
        self.allocator.free(number)
        return True

    def restart(self) -> list[int]:
        """Take the cache of every running request, whose contents are lost; they run again from their tokens.

        Returns:
            The numbers of the requests that were running.
        """
        self._num_in_flight = 0  # what was under way will not be committed
        numbers = sorted(self._running, reverse=True)
        for number in numbers:
            sequence = self._running[number]
            sequence.is_awaited = False
            self._evict(sequence)
        self.allocator.forget_contents()
        for waiting in self._waiting:  # evicted earlier, with a result under way that will not come
            waiting.is_awaited = False
        return numbers

    def schedule(self) -> Step | None:
        """Return the next batch, or None when every request rests or there are none."""
        self._admit()
        step = Step(Batch(self._num_batches, [], [], []))
        rows = self._rows_per_batch()
        fills_pipeline = self._num_in_flight + 1 >= self.limits.num_in_flight
        ready = sorted(
            (s for s in self._running.values() if s.num_unscheduled and not s.is_awaited), key=lambda s: s.last_batch
        )
        for_prompts = self._prompt_budget(ready)
        appended: list[tuple[RequestState, int]] = []
        for sequence in ready:
            budget = self.limits.max_batch_tokens - step.batch.num_tokens
            if budget < 1 or not self._mixes(step.batch, sequence):
                break
            is_prompt = sequence.num_unscheduled > 1
            # A prompt need not wait for a batch with a free row once no other batch could start before this one ends.
            if len(step.batch.segments) >= rows and not (is_prompt and fills_pipeline):
                continue
            budget = min(budget, for_prompts) if is_prompt else budget
            if sequence.number in self._running and budget:  # it may have been evicted for one before it
                num_tokens = self._append(step, sequence, budget)
                appended.append((sequence, num_tokens))
                for_prompts -= num_tokens if is_prompt else 0
        if not step.batch.segments:
            return None
        self._num_batches += 1
        self._num_in_flight += 1
        # Only now: no request of this batch may read what the batch itself writes.
        for sequence, num_tokens in appended:
            self._register(sequence, num_tokens)
        return step

    def commit(
        self, step: Step, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] = ()
    ) -> list[tuple[int, TokenEvent]]:
        """Take the last stage's answer to a batch and return what happened, by request number.

        Args:
            step: What was scheduled.
            token_ids: One for each sampled row; a negative one if the model computed no numbers.
            logprobs: One for each sampled row, or none at all when no row asks for them.
        """
        self._num_in_flight -= 1
        events = []
        row = 0
        for sequence, num_rows in step.sampled:
            row += num_rows
            sequence.is_awaited = False
            if self._is_known(sequence):
                own = logprobs[row - 1] if logprobs else None
                events.append((sequence.number, self._advance(sequence, token_ids[row - 1], own)))
        return events

    def ends(self, params: SamplingParams) -> set[int]:
        """Return the tokens that end a request."""
        return {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}

    def _forbidden(self, sequence: RequestState) -> Collection[int]:
        """Return the tokens that must not be chosen now."""
        is_too_early = sequence.num_generated < sequence.params.min_tokens
        return self._suppressed | self.ends(sequence.params) if is_too_early else self._suppressed

    def finish(self, number: int) -> None:
        """Release a request whose last event was delivered."""
        self.abort(number)

    def check_integrity(self) -> None:
        """Check that cache blocks belong to running requests or are free.

        Raises:
            PippyError: If a block is lost.
        """
        self.allocator.check_integrity()

    def _is_known(self, sequence: RequestState) -> bool:
        return self._running.get(sequence.number) is sequence or sequence in self._waiting

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.max_running:
            sequence = self._waiting[0]
            if sequence.is_awaited or not self._share(sequence):
                return
            sequence.last_batch = self._num_batches - 1  # those that rested longer go first, however many come
            self._running[sequence.number] = self._waiting.popleft()

    def _share(self, sequence: RequestState) -> bool:
        """Give a request cache for all its tokens, counting as scheduled those that are there; False without room."""
        params = sequence.params
        num_expected = sequence.num_prompt + (0 if params.only_logits else params.max_new_tokens)
        num_blocks = self.allocator.admit(
            sequence.number, len(sequence.tokens), self._sharable(sequence), num_expected=num_expected
        )
        if num_blocks is None:
            return False
        sequence.num_scheduled = sequence.num_shared = num_blocks * self.allocator.block_size
        return True

    def _sharable(self, sequence: RequestState) -> list[bytes]:
        """Return the names of the blocks that the request could share: all but what holds its last token.

        The last token is computed in any case, for its logits; where logits of all tokens are wanted, all are.
        """
        if not self._prefix_caching or sequence.params.only_logits:
            return []
        num_blocks = (len(sequence.tokens) - 1) // self.allocator.block_size
        extend_names(sequence.block_names, sequence.tokens, self.allocator.block_size, num_blocks)
        return sequence.block_names[:num_blocks]

    def _begin(self, sequence: RequestState) -> None:
        """Before a request's first batch, share what became known since it was admitted, and count."""
        names = self._sharable(sequence)
        if self.allocator.count_known(names) * self.allocator.block_size > sequence.num_shared:
            self.allocator.free(sequence.number)
            has_room = self._share(sequence)
            assert has_room, "the same request with fewer blocks of its own"
        self.num_prefix_hits += min(sequence.num_shared, sequence.num_prompt)

    def _register(self, sequence: RequestState, num_tokens: int) -> None:
        """Let others share the blocks that the last ``num_tokens`` scheduled tokens made full."""
        size = self.allocator.block_size
        num_full = sequence.num_scheduled // size
        if self._prefix_caching and num_full > (sequence.num_scheduled - num_tokens) // size:
            extend_names(sequence.block_names, sequence.tokens, size, num_full)
            self.allocator.register(sequence.number, sequence.block_names[:num_full])

    def _rows_per_batch(self) -> int:
        """Spread the requests over the batches in flight: as few and large batches as keep every stage busy."""
        active = min(len(self._running) + len(self._waiting), self.limits.max_running)
        return -(-active // self.limits.num_in_flight)

    def _prompt_budget(self, ready: Sequence[RequestState]) -> int:
        """Return how many tokens of a batch prompts may take: what decoding leaves, but at least half of it."""
        num_decoding = sum(sequence.num_unscheduled == 1 for sequence in ready)
        most = self.limits.max_batch_tokens
        return max(most - num_decoding, -(-most // 2))

    @staticmethod
    def _mixes(batch: Batch, sequence: RequestState) -> bool:
        """Whether the request may join: logits are returned for all rows of a batch or for none."""
        return not batch.segments or batch.return_logits == sequence.params.only_logits

    def _append(self, step: Step, sequence: RequestState, budget: int) -> int:
        """Put the request's next tokens into the batch; return how many."""
        batch = step.batch
        if sequence.num_scheduled == sequence.num_shared:
            self._begin(sequence)
        start = sequence.num_scheduled
        num_tokens = min(budget, sequence.num_unscheduled)
        if not self._reserve(sequence, start + num_tokens, batch.number):
            return 0
        batch.token_ids.extend(sequence.tokens[start : start + num_tokens])
        batch.segments.append(Segment(num_tokens, start, self.allocator.slots(sequence.number)))
        sequence.num_scheduled += num_tokens
        sequence.last_batch = batch.number
        self.num_prompt_computed += max(min(sequence.num_scheduled, sequence.num_prompt) - start, 0)
        only_logits = sequence.params.only_logits
        if only_logits:
            step.batch = Batch(batch.number, batch.token_ids, batch.segments, batch.sampled, return_logits=True)
        if sequence.num_unscheduled == 0 or only_logits:
            first = batch.num_tokens - (num_tokens if only_logits else 1)
            batch.sampled.extend(sequence.sampled_rows(range(first, batch.num_tokens), self._forbidden(sequence)))
            step.sampled.append((sequence, batch.num_tokens - first))
            sequence.is_awaited = True
        return num_tokens

    def _reserve(self, sequence: RequestState, num_tokens: int, batch_number: int) -> bool:
        """Make sure the cache holds ``num_tokens`` of the request, evicting younger requests if it must.

        Requests that are in the batch already keep their cache: two owners must not write a slot in one pass. For
        them an older request waits, with its cache, and comes first in the next batch; so the oldest goes on always.
        """
        while not self.allocator.allocate(sequence.number, num_tokens):
            youngest = max(self._running.values(), key=lambda other: (other.last_batch != batch_number, other.number))
            if youngest is not sequence or max(self._running) == sequence.number:
                self._evict(youngest)
            if youngest is sequence:
                return False
        return True

    def _evict(self, sequence: RequestState) -> None:
        """Take a request's cache away; it waits before all younger ones and is computed again from its tokens."""
        del self._running[sequence.number]
        self.num_evictions += 1
        self.allocator.free(sequence.number)
        sequence.num_scheduled = sequence.num_shared = 0
        self._waiting.insert(bisect.bisect(self._waiting, sequence.number, key=lambda other: other.number), sequence)

    def _advance(self, sequence: RequestState, token_id: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        params = sequence.params
        if params.only_logits:
            done = sequence.num_unscheduled == 0
            return TokenEvent(token_id=None, finish_reason=FinishReason.LENGTH if done else None)
        if token_id < 0:
            return TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=PippyError(_NO_NUMBERS))
        sequence.tokens.append(token_id)
        reason = None
        if token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
            reason = FinishReason.STOP
        elif sequence.num_generated >= params.max_new_tokens:
            reason = FinishReason.LENGTH
        return TokenEvent(token_id=token_id, finish_reason=reason, logprobs=logprobs)
