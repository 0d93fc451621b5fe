"""Rank 0: requests in, tokens out. One thread schedules, runs the first stage and collects what the last one sampled.

    submit ─▶ scheduler ─▶ dispatch: announce the batch, run stage 0, send on ─▶ … ─▶ collect ─▶ commit ─▶ events

As many batches are under way as there are stages, so each stage works on one while the others work on theirs. Events
are delivered by callback on the engine's thread. Knows no text, no HTTP, no TorchServe.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ts_pippy_handler import meter
from ts_pippy_handler.errors import InvalidRequestError, OverloadedError, PipelineError, PippyError, one_line
from ts_pippy_handler.loading import LoadedRank
from ts_pippy_handler.meter import METER, RankStats
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent, check_sampling
from ts_pippy_handler.request_state import Step
from ts_pippy_handler.sampling import logprobs_of, sample
from ts_pippy_handler.scheduler import Scheduler

logger = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]
Revive = Callable[[PipelineError], LoadedRank]


class _SchedulingError(PipelineError):
    """Any of the requests may be the cause, waiting ones included."""


class Engine:
    """Serves requests over a loaded pipeline.

    Args:
        loaded: Rank 0 of the pipeline.
        scheduler: Decides what runs next.
        revive: Brings a broken pipeline back, or raises; by default a broken pipeline stays broken.
        on_death: Called once, on the engine's thread, when the pipeline is broken for good and before requests hear
            of it.
    """

    def __init__(
        self,
        loaded: LoadedRank,
        scheduler: Scheduler,
        revive: Revive | None = None,
        on_death: Callable[[PipelineError], None] = lambda error: None,
    ) -> None:
        self.loaded = loaded
        self.scheduler = scheduler
        self._revive = revive
        self._on_death = on_death
        self._wake = threading.Condition()
        self._incoming: deque[Callable[[], None]] = deque()
        self._callbacks: dict[int, OnEvent] = {}
        self._logits: dict[int, list[torch.Tensor]] = {}
        self._numbers = itertools.count()
        self._deadlines: list[tuple[float, int]] = []
        self._in_flight: deque[tuple[Step, torch.Tensor | None]] = deque()
        self._survived: dict[int, int] = {}
        self._lost: PipelineError | None = None
        self._closing = False
        self._refusal: PippyError | None = None
        self.failure: PipelineError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are served; False once closed or broken for good."""
        return self._thread.is_alive()

    @property
    def max_len(self) -> int:
        """Tokens of a request, prompt and new ones together."""
        return self.loaded.max_len

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a text."""
        return sorted(self.scheduler.eos_token_ids)

    @property
    def num_unfinished(self) -> int:
        """Requests that have been accepted and have not had their last event."""
        return len(self._callbacks)

    def refuse_new(self, reason: PippyError) -> None:
        """Accept nothing from now on: requests are refused with ``reason``. Those accepted already go on."""
        with self._wake:
            self._refusal = reason

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what :meth:`submit` would refuse of this request, without accepting it.

        Raises:
            InvalidRequestError: If it could never finish, or names tokens the model does not have.
            OverloadedError: If too many requests wait.
        """
        check_sampling(params)
        self._check_ids("", prompt_token_ids)
        self._check_ids("logit_bias: ", [token_id for token_id, _ in params.logit_bias])
        self._check_ids("stop_token_ids: ", params.stop_token_ids)
        if params.min_tokens and len(self.scheduler.ends(params)) >= self.loaded.vocab_size:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but every token of the vocabulary ends the text; "
                "name fewer stop_token_ids"
            )
        self.scheduler.check(len(prompt_token_ids), params, num_unfinished=len(self._callbacks))

    def check_room(self, num_requests: int) -> None:
        """Refuse so many requests at once, of which some would be refused one by one.

        Raises:
            InvalidRequestError: If they could never be accepted together.
            OverloadedError: If they can not be now.
            PippyError: What :meth:`refuse_new` was given.
        """
        if self._refusal is not None:
            raise self._refusal
        capacity = self.scheduler.limits.max_unfinished
        if num_requests > capacity:
            raise InvalidRequestError(f"{num_requests} texts were asked for at once; at most {capacity} are possible")
        if len(self._callbacks) + num_requests > capacity:
            raise OverloadedError(
                f"{num_requests} texts were asked for, and {len(self._callbacks)} of at most {capacity} are under way; "
                "try again later"
            )

    def _check_ids(self, where: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not isinstance(token_id, int):
                raise InvalidRequestError(f"{where}token ids must be whole numbers, got {token_id!r}")
            if not 0 <= token_id < self.loaded.vocab_size:
                raise InvalidRequestError(
                    f"{where}token id {token_id} is not in the vocabulary, "
                    f"which has ids 0 to {self.loaded.vocab_size - 1}"
                )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the engine from taking over new requests for a moment."""
        with self._wake:
            yield

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_event: OnEvent,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Accept a request; its events arrive through ``on_event``, the last one with a finish reason.

        Args:
            prompt_token_ids: What to continue.
            params: How.
            on_event: Called on the engine's thread.
            timeout_s: Seconds after which the request is aborted, wherever it is.

        Returns:
            The request's number, for :meth:`abort`.

        Raises:
            InvalidRequestError: If it could never finish, or names tokens the model does not have.
            OverloadedError: If too many requests wait.
            PipelineError: If the pipeline is broken for good.
            PippyError: What :meth:`refuse_new` was given.
        """
        with self._wake:
            if self.failure is not None:
                raise self.failure
            if self._refusal is not None:
                raise self._refusal
            if self._closing:
                raise PipelineError("the model is being unloaded")
            self.check(prompt_token_ids, params)
            number = next(self._numbers)
            if timeout_s is not None:
                heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, number))
            self._callbacks[number] = on_event
            self._incoming.append(lambda: self._add(number, prompt_token_ids, params))
            self._wake.notify()
        return number

    def abort(self, number: int) -> None:
        """End a request early; its last event says ``abort``. Nothing happens if it has finished."""
        with self._wake:
            self._incoming.append(lambda: self._abort(number))
            self._wake.notify()

    def abort_all(self) -> int:
        """End every request early, as :meth:`abort` does; return how many there are."""
        with self._wake:
            numbers = list(self._callbacks)
            self._incoming.extend(functools.partial(self._abort, number) for number in numbers)
            self._wake.notify()
        return len(numbers)

    def report_lost(self, error: PipelineError) -> None:
        """Say that a rank is gone; an idle engine would only notice with the next request."""
        with self._wake:
            self._lost = error
            self._wake.notify()

    def take_logits(self, number: int) -> torch.Tensor:
        """Return and forget the logits [T, V] (float32, CPU) of a finished ``only_logits`` request."""
        return torch.cat(self._logits.pop(number))

    def stats(self, *, reset: bool = False) -> list[RankStats]:
        """Return what every rank has spent its time on, in the order of the ranks; from any thread, at any time.

        A rank that spawn mode has started anew counts from there.

        Args:
            reset: Whether the next call counts from here. All readers share the counters.

        Raises:
            PipelineError: If a rank does not answer within seconds.
        """
        answers = self.loaded.group.ask(meter.read, reset)
        return [RankStats(rank=rank, **answer) for rank, answer in enumerate(answers)]

    def health(self) -> dict[str, Any]:
        """Return whether requests are served, with every rank and what is used of the limits; from any thread.

        A rank that does not answer within two seconds counts as lost.
        """
        ranks = [
            {
                "rank": rank,
                "stage": rank,
                **(found or {"pid": None, "device": None}),
                "state": "ready" if found else "lost",
            }
            for rank, found in enumerate(self.loaded.group.roll_call())
        ]
        serves = self.is_running and self.failure is None and self._refusal is None and not self._closing
        allocator = self.scheduler.allocator
        return {
            "ready": serves and all(rank["state"] == "ready" for rank in ranks),
            "stages": len(ranks),
            "ranks": ranks,
            "requests": {"running": self.scheduler.num_running, "waiting": self.scheduler.num_waiting},
            "kv_blocks": {
                "used": allocator.num_used,
                "free": allocator.num_free,
                "total": allocator.num_blocks,
            },
        }

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what runs, stop the other ranks and leave the group."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        self.loaded.group.leave(is_broken=self.failure is not None or self._thread.is_alive())

    def _run(self) -> None:
        while self.failure is None and not self._closing:
            try:
                self._step()
            except PipelineError as error:
                self._recover(error)
            except Exception as error:
                logger.exception("engine step failed")
                self._recover(PipelineError(f"rank 0, stage 0: {type(error).__name__}: {one_line(error)}"))
        self._end()

    def _step(self) -> None:
        self._accept(wait=not self._in_flight)
        has_room = len(self._in_flight) < self.scheduler.limits.num_in_flight
        step = self._schedule() if has_room else None
        if step is not None:
            self._in_flight.append((step, self._dispatch(step)))
        elif self._in_flight:
            self._collect()

    def _schedule(self) -> Step | None:
        try:
            return self.scheduler.schedule()
        except Exception as error:
            logger.exception("scheduling failed")
            raise _SchedulingError(f"rank 0 could not schedule: {type(error).__name__}: {one_line(error)}") from error

    def _accept(self, wait: bool) -> None:
        """Take over what other threads asked for; sleep when there is nothing to do at all."""
        with self._wake:
            while wait and not (self._incoming or self._closing or self._lost or self._has_work()):
                self._wake.wait()
                METER.skip()
            late = self._take_late()
            if self._lost is not None:
                raise self._lost
            incoming, self._incoming = self._incoming, deque()
        for action in incoming:
            action()
        for number in late:
            self._abort(number)

    def _add(self, number: int, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        try:
            self.scheduler.add(number, prompt_token_ids, params)
        except Exception as error:
            logger.exception("request %d could not be accepted", number)
            self._deliver(number, _failed(PipelineError(f"the request could not be accepted: {one_line(error)}")))

    def _take_late(self) -> list[int]:
        """Return the requests whose time is over; finished ones among them do no harm."""
        late = []
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            late.append(heapq.heappop(self._deadlines)[1])
        return late

    def _has_work(self) -> bool:
        return bool(self.scheduler.num_running or self.scheduler.num_waiting)

    def _dispatch(self, step: Step) -> torch.Tensor | None:
        """Start a batch; with a single stage, return its logits at once."""
        stage, transport = self.loaded.stage, self.loaded.transport
        METER.spent("bookkeeping")
        with self.loaded.pulse.step():
            if transport is not None:
                transport.send_batch(step.batch)
                METER.spent("send")
            outputs = stage.run(step.batch, {})
            METER.ran(step.batch.num_tokens)
            METER.spent("compute")
            if transport is None:
                return outputs[stage.graph.outputs[0]]
            transport.send_values(stage.graph.sends, outputs)
            METER.spent("send")
        return None

    def _collect(self) -> None:
        """Wait for the oldest batch and tell its requests."""
        step, own_logits = self._in_flight[0]
        batch = step.batch
        METER.spent("bookkeeping")
        if own_logits is not None:
            token_ids, logits = sample(own_logits, batch.sampled), own_logits
            logprobs = logprobs_of(own_logits, batch.sampled, token_ids)
            METER.spent("compute")
        else:
            assert self.loaded.transport is not None
            with self.loaded.pulse.expecting():
                token_ids, logprobs, received = self.loaded.transport.receive_result(batch, self.loaded.vocab_size)
            logits = received if received is not None else torch.empty(0)
            METER.spent("wait")
        self._in_flight.popleft()
        if batch.return_logits:
            self._keep_logits(step, logits)
        for number, event in self.scheduler.commit(step, token_ids, logprobs):
            self._deliver(number, event)
        METER.spent("bookkeeping")

    def _keep_logits(self, step: Step, logits: torch.Tensor) -> None:
        start = 0
        for (sequence, num_rows), segment in zip(step.sampled, step.batch.segments, strict=True):
            if segment.num_cached == 0:  # from the beginning, perhaps again after an eviction
                self._logits[sequence.number] = []
            self._logits[sequence.number].append(logits[start : start + num_rows].to("cpu", torch.float32).clone())
            start += num_rows

    def _deliver(self, number: int, event: TokenEvent) -> None:
        callback = self._callbacks[number]
        if event.finish_reason is not None:
            self.scheduler.finish(number)
            del self._callbacks[number]
            self._survived.pop(number, None)
        try:
            callback(event)
        except Exception:
            logger.exception("the consumer of request %d failed", number)
            self._abort(number)

    def _abort(self, number: int) -> None:
        if number in self._callbacks:
            self._deliver(number, TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))

    def _recover(self, error: PipelineError) -> None:
        """Bring the pipeline back and compute running requests anew from their tokens, or end everything.

        A request that was running in two failures ends with an error: it may be what causes them. So does one that
        waited while scheduling failed twice.
        """
        self._in_flight.clear()
        self._lost = None
        for number in list(self._callbacks):  # other threads add to it
            self._logits.pop(number, None)  # they will be computed again
        logger.error("pipeline failed: %s", error)
        running = self.scheduler.restart()
        for number in list(self._callbacks) if isinstance(error, _SchedulingError) else running:
            self._survived[number] = self._survived.get(number, 0) + 1
            if self._survived[number] > 1:
                self._deliver(number, _failed(error))
        try:
            if self._revive is None or self._closing:
                raise error
            self.loaded = self._revive(error)
        except Exception as final:  # noqa: BLE001 - bringing ranks up can fail in any way; requests must hear of it
            self.failure = final if isinstance(final, PipelineError) else PipelineError(str(final))
        METER.skip()

    def _end(self) -> None:
        """Stop the other ranks and give every request its last event."""
        with self._wake:
            self._closing = True
            self._incoming.clear()
        if self.failure is not None:
            self._on_death(self.failure)
        error = self.failure or PipelineError("the model is being unloaded")
        for number in list(self._callbacks):
            self._deliver(number, _failed(error))
        if self.failure is not None:
            return
        try:
            if self.loaded.transport is not None:
                self.loaded.transport.send_batch(None)
        except PipelineError as gone:
            logger.info("while stopping: %s", gone)


def _failed(error: PipelineError) -> TokenEvent:
    return TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error)
