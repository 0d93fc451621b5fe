"""Run a workload through an engine of this process and its ranks, without TorchServe."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from pathlib import Path

from ts_pippy_handler import launch
from ts_pippy_handler.bench import Report, Served, summarise, with_ranks
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import ConfigError, InvalidRequestError, PipelineError
from ts_pippy_handler.request import SamplingParams, TokenEvent
from ts_pippy_handler.workload import Advance, Workload, WorkloadRequest, progress_of

_POLL_S = 0.2


def run(
    config: ServingConfig,
    num_stages: int,
    workload: Workload,
    options: launch.SpawnOptions,
    *,
    concurrency: int | None = None,
    outputs: Path | None = None,
) -> Report:
    """Start the ranks, run every request, stop the ranks.

    Args:
        config: Of the model.
        num_stages: Number of stages, one rank each.
        workload: The requests.
        options: Output of the other ranks.
        concurrency: Most requests at a time; None submits all at once.
        outputs: Where to write ``{id: new token ids}``, to compare with another run's.

    Raises:
        PippyError: If the model cannot be loaded, a request does not fit it, or the pipeline fails.
    """
    if outputs is not None:
        _write(outputs, "")  # a wrong path is better known now than after the run
    started = time.monotonic()
    engine = launch.start_spawned(_with_room(config, workload), num_stages, options)
    load_s = time.monotonic() - started
    try:
        _check(engine, workload)
        with progress_of(workload) as advance:
            engine.stats(reset=True)
            started = time.monotonic()
            served = _serve(engine, workload, concurrency or len(workload.requests), advance)
            wall_s = time.monotonic() - started
            ranks = engine.stats()
    finally:
        engine.close()
    if outputs is not None:
        pairs = zip(workload.requests, served, strict=True)
        _write(outputs, json.dumps({str(request.id): each.token_ids for request, each in pairs}) + "\n")
    report = summarise(workload, served, wall_s=wall_s, concurrency=concurrency, load_s=load_s)
    return with_ranks(report, ranks)


def _with_room(config: ServingConfig, workload: Workload) -> ServingConfig:
    """Let all requests wait at once: what a server would refuse is not what is measured."""
    room = max(config.pippy.max_waiting_requests, len(workload.requests))
    return config.model_copy(update={"pippy": config.pippy.model_copy(update={"max_waiting_requests": room})})


def _check(engine: Engine, workload: Workload) -> None:
    for index, request in enumerate(workload.requests):
        try:
            engine.check(_prompt(request), _params(request))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{workload.name(index)}: {error}") from error


def _serve(engine: Engine, workload: Workload, concurrency: int, advance: Advance) -> list[Served]:
    """Keep ``concurrency`` requests running until all have finished."""
    finished: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    served: list[Served] = []
    num_finished = num_shown = 0
    while num_finished < len(workload.requests):
        with engine.paused():  # so that requests submitted together start together
            while len(served) < min(num_finished + concurrency, len(workload.requests)):
                request = workload.requests[len(served)]
                served.append(Served(started_s=time.monotonic(), num_prompt=len(_prompt(request)), token_ids=[]))
                engine.submit(_prompt(request), _params(request), _recorder(served[-1], finished))
        try:
            event = finished.get(timeout=_POLL_S)
            num_finished += 1
            if event.error is not None:
                raise event.error
        except queue.Empty:
            if not engine.is_running:
                raise engine.failure or PipelineError("the engine stopped") from None
        num_arrived = sum(len(each.arrivals_s) for each in served)
        advance(num_arrived - num_shown)
        num_shown = num_arrived
    for each in served:
        each.num_output = len(each.arrivals_s)
    return served


def _recorder(served: Served, finished: queue.SimpleQueue[TokenEvent]) -> Callable[[TokenEvent], None]:
    assert served.token_ids is not None
    arrivals_s, token_ids = served.arrivals_s, served.token_ids

    def record(event: TokenEvent) -> None:
        if event.token_id is not None:
            arrivals_s.append(time.monotonic())
            token_ids.append(event.token_id)
        if event.finish_reason is not None:
            finished.put(event)

    return record


def _prompt(request: WorkloadRequest) -> list[int]:
    assert request.prompt_token_ids is not None, "read_workload was not told that token ids are needed"
    return request.prompt_token_ids


def _params(request: WorkloadRequest) -> SamplingParams:
    return SamplingParams(max_new_tokens=request.max_tokens, ignore_eos=True)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--save-outputs {file}: {error.strerror or error}") from error
