"""Start an engine: alone, with ranks of its own (spawn), or among the ranks torchrun started.

Brings together the ranks, the loaded stage, the scheduler and what happens when a rank dies: in spawn mode the ranks
are started anew and requests go on, under torchrun the process ends and TorchServe restarts the group. Ready means
that one token went through all stages. Knows no text and no TorchServe.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

from ts_pippy_handler import loading, lost_ranks, process, ranks, tracer, worker
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import LoadError, PipelineError, RankLostError
from ts_pippy_handler.generation_defaults import read_defaults
from ts_pippy_handler.kv_cache import BlockAllocator
from ts_pippy_handler.loading import LoadedRank
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent
from ts_pippy_handler.scheduler import Limits, Scheduler

logger = logging.getLogger(__name__)

_generations = itertools.count()  # of this process: RPC remembers the names of every group that it ever had
_MAX_REVIVALS = 5
_REVIVAL_WINDOW_S = 300.0
_CHILD_POLL_S = 0.2
_LAST_WORDS_S = 0.5


@dataclass(frozen=True, kw_only=True)
class SpawnOptions:
    """What the caller of spawn mode chooses."""

    stdout: IO[Any] | int | None = None
    """Where the other ranks print; None for where this process does."""
    show_progress: bool = False
    log_level: str = "INFO"
    ends_process: bool = False
    """Whether this process ends when ranks cannot be kept alive, for a server to start it anew."""


def start_spawned(
    config: ServingConfig,
    num_stages: int,
    options: SpawnOptions | None = None,
    tracing: tracer.Tracing | None = None,
) -> Engine:
    """Serve with this process as rank 0 and ``num_stages - 1`` children.

    Args:
        config: The checked configuration.
        num_stages: Number of stages, one rank each.
        options: Output of the children, and what becomes of this process.
        tracing: The model, if its tracing has begun already; closed here.

    Raises:
        LoadError: If the configuration is wrong or a rank fails to load.
    """
    options = options or SpawnOptions()
    process.share_memory_arena()
    loading.check_early(config, num_stages)
    return _Spawner(config, num_stages, options).start(tracing or tracer.Tracing(config, num_stages))


def start_joined(config: ServingConfig, group: ranks.Group) -> Engine | None:
    """Serve among ranks that have joined already: an engine on rank 0, a stage thread (and None) on the others.

    Raises:
        LoadError: On every rank, if any of them fails to load.
    """
    loaded = loading.load(group, config)
    if group.place.rank:
        lost_ranks.watch(loaded, config.pippy)
        worker.start_thread(loaded)
        return None
    engine = Engine(loaded, make_scheduler(loaded, config), on_death=_end_process)
    lost_ranks.watch(loaded, config.pippy)
    _warm_up(engine, config)
    return engine


def make_scheduler(loaded: LoadedRank, config: ServingConfig) -> Scheduler:
    """Build the scheduler of a loaded pipeline."""
    pippy = config.pippy
    limits = Limits(
        max_len=loaded.max_len,
        max_batch_tokens=pippy.batch_tokens(on_cpu=loaded.stage.device.type == "cpu"),
        max_running=pippy.max_running_requests,
        max_waiting=pippy.max_waiting_requests,
        num_in_flight=pippy.batches_in_flight(loaded.group.place.world_size),
    )
    allocator = BlockAllocator(loaded.num_slots // pippy.block_size, pippy.block_size)
    defaults = read_defaults(config.handler.model_path)
    return Scheduler(
        allocator,
        limits,
        defaults.eos_token_ids,
        suppressed=[token_id for token_id in defaults.suppressed if token_id < loaded.vocab_size],
        prefix_caching=pippy.prefix_caching,
    )


class _Spawner:
    """Starts the children, watches them, and starts them anew when one is lost."""

    def __init__(self, config: ServingConfig, num_stages: int, options: SpawnOptions) -> None:
        self._config = config
        self._num_stages = num_stages
        self._options = options
        self._revivals: list[float] = []
        self._engine: Engine | None = None

    def start(self, tracing: tracer.Tracing) -> Engine:
        loaded, scheduler = self._load(tracing)
        on_death = _end_soon if self._options.ends_process else _log_death
        engine = Engine(loaded, scheduler, revive=self._revive, on_death=on_death)
        self._engine = engine
        threading.Thread(target=self._watch, name="child-watch", daemon=True).start()
        try:
            lost_ranks.watch(loaded, self._config.pippy, lost_ranks.end_child_of(engine))
            _warm_up(engine, self._config)
        except BaseException:
            engine.close()
            raise
        return engine

    def _load(self, tracing: tracer.Tracing) -> tuple[LoadedRank, Scheduler]:
        with contextlib.closing(tracing):
            tracing.check()  # before there are ranks; the trace itself goes on while they start
            group = self._spawn()
            try:
                progress = self._options.show_progress
                loaded = loading.load(group, self._config, traced=tracing, show_progress=progress)
                return loaded, make_scheduler(loaded, self._config)
            except BaseException:
                group.leave(is_broken=True)
                raise

    def _spawn(self, kv_cache_tokens: int | None = None) -> ranks.Group:
        settings = self._config.model_dump(exclude_none=True)
        if kv_cache_tokens is not None:  # as many as rank 0 has, whatever memory is free by now
            settings["pippy"]["kv_cache_tokens"] = kv_cache_tokens
        options = self._options
        job = json.dumps({"config": settings, "show_progress": options.show_progress, "log_level": options.log_level})
        return ranks.spawn_peers(self._num_stages, self._config.pippy, job, options.stdout, next(_generations))

    def _revive(self, error: PipelineError) -> LoadedRank:
        assert self._engine is not None
        old = self._engine.loaded
        now = time.monotonic()
        self._revivals = [then for then in self._revivals if now - then < _REVIVAL_WINDOW_S] + [now]
        reason = ranks.lost(old.group, error)
        if len(self._revivals) > _MAX_REVIVALS or self._num_stages == 1:
            raise reason
        logger.error("starting the ranks anew, because of: %s", reason)
        old.group.leave(is_broken=True)
        group = self._spawn(old.num_slots)
        try:
            loaded = loading.rejoin(old, group, self._config)
            lost_ranks.watch(loaded, self._config.pippy, lost_ranks.end_child_of(self._engine))
            return loaded
        except LoadError:
            group.leave(is_broken=True)
            raise

    def _watch(self) -> None:
        """Report a child that ended while the engine is idle; a busy engine sees its connection close."""
        engine = self._engine
        reported: ranks.Group | None = None
        while engine is not None and engine.is_running:
            group = engine.loaded.group
            dead = [child for child in list(group.peers) if child.poll() is not None]
            if dead and group is not reported:
                reported = group
                engine.report_lost(PipelineError(f"a rank ended with status {dead[0].returncode}"))
            time.sleep(_CHILD_POLL_S)


def _warm_up(engine: Engine, config: ServingConfig) -> None:
    """Send one token through all stages.

    Raises:
        LoadError: If it does not come back.
    """
    events: queue.Queue[TokenEvent] = queue.Queue()
    engine.submit([0], SamplingParams(max_new_tokens=1, ignore_eos=True), events.put)
    timeout_s = config.pippy.step_timeout * (engine.loaded.group.place.world_size + 1)
    try:
        event = events.get(timeout=timeout_s)
    except queue.Empty:
        raise LoadError(f"the first pass did not come back within {timeout_s:g} s") from None
    if event.finish_reason is not FinishReason.LENGTH:
        raise LoadError(f"the first pass failed: {event.error}")


def _log_death(error: PipelineError) -> None:
    logger.error("the pipeline is broken for good: %s", error)


def _end_soon(error: PipelineError) -> None:
    """Let pending answers out, then end, so that TorchServe starts the worker anew."""
    _log_death(error)
    timer = threading.Timer(_LAST_WORDS_S, process.end_process, (1,))
    timer.daemon = True
    timer.start()


def _end_process(error: PipelineError) -> None:
    """Under torchrun: the same, but say nothing any more where TorchServe knows that a rank is gone.

    It answers everybody then and starts anew. What rank 0 says from then on waits in the frontend and is taken for the
    answer to the new ranks' first command, so it must say nothing.
    """
    if isinstance(error, RankLostError):
        _log_death(error)
        process.end_process(1)
    _end_soon(error)
