"""From a configuration to a loaded stage, the same on every rank and together with the others.

Rank 0 has the model traced and hands out the stages; each rank reads only its stage's weights and says how it went; if
one rank fails, all fail with its reason. Then they agree on the size of the cache: the smallest rank decides. Knows
nothing of requests.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from ts_pippy_handler import device_memory, model_config, partition, tracer, tracing
from ts_pippy_handler.config import PippyConfig, ServingConfig, written_layers
from ts_pippy_handler.errors import CheckpointError, ConfigError, LoadError, one_line
from ts_pippy_handler.fit import DeviceMemory
from ts_pippy_handler.generation_defaults import read_defaults
from ts_pippy_handler.graph_data import ModelFacts, decode_stage
from ts_pippy_handler.heartbeat import Pulse
from ts_pippy_handler.meter import peak_memory_bytes
from ts_pippy_handler.process import keep_freed_memory
from ts_pippy_handler.ranks import Group, device_of, set_threads
from ts_pippy_handler.stage import Stage
from ts_pippy_handler.transport import Transport
from ts_pippy_handler.weights import Checkpoint

logger = logging.getLogger(__name__)

_CACHE_SHARE = 0.25
"""Part of a rank's free memory that the cache may take when no size is configured."""


@dataclass(frozen=True, kw_only=True)
class LoadedRank:
    """What a rank has once loading succeeded everywhere."""

    group: Group
    stage: Stage
    transport: Transport | None
    """None for a single rank."""
    num_slots: int
    """Tokens the cache of every stage holds."""
    max_len: int
    """Tokens of one request: the model's window, or the cache if that is smaller."""
    vocab_size: int
    stages: list[bytes]
    """On rank 0 every rank's stage, to hand out again when ranks are started anew."""
    pulse: Pulse = field(default_factory=Pulse)
    """Tells the watchdog when this rank works."""


def load(
    group: Group, config: ServingConfig, *, traced: tracer.Tracing | None = None, show_progress: bool = False
) -> LoadedRank:
    """Load this rank's stage, together with all ranks of ``group``.

    Args:
        group: The ranks.
        config: The checked configuration.
        traced: On rank 0, the model if its tracing has begun already.
        show_progress: Whether a progress bar is shown.

    Raises:
        LoadError: On every rank, with the reason of each rank that failed.
    """
    started = time.monotonic()
    stage, facts, memory, error = None, None, None, None
    stages: list[bytes] = []
    try:
        memory = device_memory.agree(group, config.pippy)
        stage, facts, stages = _load_stage(group, config, memory, traced, show_progress=show_progress)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        error = caught
    group.outcome("loaded", error)
    assert stage is not None
    assert facts is not None
    budget = None if memory is None else memory.budgets[group.place.rank]
    num_slots = _agree_on_slots(group, config.pippy, stage, facts, budget)
    _allocate_cache(group, stage, num_slots)
    if config.pippy.compile:
        _compile(group, stage)
    transport = _transport(group, stage, config) if group.store is not None else None
    keep_freed_memory()  # not before the weights are read, whose buffers come back in other sizes
    logger.info(
        "rank %d: stage %d of %d, layers %d-%d, %.1f MB of weights, cache of %d tokens, %s, %d threads, %.1f s, "
        "peak %.0f MB resident",
        group.place.rank,
        stage.graph.index,
        stage.graph.num_stages,
        stage.graph.first_layer,
        stage.graph.first_layer + stage.graph.num_layers - 1,
        stage.num_bytes / 1e6,
        num_slots,
        stage.device,
        torch.get_num_threads(),
        time.monotonic() - started,
        peak_memory_bytes() / 1e6,
    )
    return LoadedRank(
        group=group,
        stage=stage,
        transport=transport,
        num_slots=num_slots,
        max_len=min(num_slots, facts.max_positions or num_slots),
        vocab_size=facts.vocab_size,
        stages=stages,
    )


def rejoin(loaded: LoadedRank, group: Group, config: ServingConfig) -> LoadedRank:
    """Put an already loaded stage of this rank into a new group whose other ranks load afresh.

    Raises:
        LoadError: If another rank fails to load.
    """
    device_memory.agree(group, config.pippy)  # the others ask for this rank's; how the model is cut stays
    group.hand_out("stage", loaded.stages)
    group.outcome("loaded", None)
    smallest = min(group.wait_for_all("slots", loaded.num_slots))
    if smallest < loaded.num_slots:
        raise LoadError(f"a rank holds {smallest} tokens in its cache now, not {loaded.num_slots} as before")
    group.outcome("cache", None)
    if config.pippy.compile:
        group.outcome("compiled", None)
    return LoadedRank(
        group=group,
        stage=loaded.stage,
        transport=_transport(group, loaded.stage, config),
        num_slots=loaded.num_slots,
        max_len=loaded.max_len,
        vocab_size=loaded.vocab_size,
        stages=loaded.stages,
    )


def _transport(group: Group, stage: Stage, config: ServingConfig) -> Transport:
    in_flight = config.pippy.batches_in_flight(group.place.world_size)
    return Transport(stage.device, config.pippy.step_timeout, in_flight)


def trace_checkpoint(config: ServingConfig, checkpoint: Checkpoint | None = None) -> tracing.TracedModel:
    """Trace the model a configuration names, as :func:`build_model` builds it."""
    return build_model(config, checkpoint).trace()


def build_model(config: ServingConfig, checkpoint: Checkpoint | None = None) -> tracing.Untraced:
    """Build the model a configuration names without weights, in the configured dtype or the checkpoint's own.

    Args:
        config: Names the model.
        checkpoint: Its tensors, where it will be loaded.

    Raises:
        LoadError: If it cannot be built, or the checkpoint does not hold it.
    """
    read = read_model_config(config)
    name = config.handler.torch_dtype_name
    return tracing.build(read, tracing.checkpoint_dtype(read) if name is None else getattr(torch, name), checkpoint)


def read_model_config(config: ServingConfig) -> Any:
    """Read config.json of the configured checkpoint."""
    handler = config.handler
    return model_config.read_config(handler.model_path, trust_remote_code=handler.trust_remote_code)


def _receive_stage(
    group: Group, config: ServingConfig, memory: DeviceMemory | None, traced: tracer.Tracing | None
) -> tuple[list[bytes], bytes]:
    """Return this rank's stage; rank 0 has the model traced and hands the stages out.

    Returns:
        All stages (on rank 0 only, to hand out again when ranks are started anew), and this rank's.

    Raises:
        LoadError: If the model cannot be split.
    """
    if group.place.rank:
        own = group.receive("stage")
        if not own:
            raise LoadError("rank 0 could not trace the model")
        return [], own
    try:
        if traced is None:
            stages = tracer.trace_stages(config, group.place.world_size, memory)
        else:
            stages = traced.stages(memory)
    except BaseException:  # whatever it is, the other ranks must not wait
        group.hand_out("stage", [b""] * group.place.world_size)
        raise
    group.hand_out("stage", stages)
    return stages, stages[0]


def _load_stage(
    group: Group,
    config: ServingConfig,
    memory: DeviceMemory | None,
    traced: tracer.Tracing | None,
    *,
    show_progress: bool,
) -> tuple[Stage, ModelFacts, list[bytes]]:
    place = group.place
    set_threads(place, config.pippy.threads_per_rank)
    stages, own = _receive_stage(group, config, memory, traced)
    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
    graph, facts = decode_stage(own)
    if facts.unread:
        logger.warning(
            "%s: nothing reads %d of the checkpoint's %d tensors, such as %s; does config.json describe this model?",
            config.handler.model_path,
            len(facts.unread),
            len(checkpoint.names),
            ", ".join(facts.unread[:3]),
        )
    total = sum(parameter.nbytes for parameter in graph.module.parameters())
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"rank {place.rank}: reading weights",
        disable=not show_progress,
        leave=False,
        position=place.rank,
    ) as bar:
        stage = Stage(
            graph,
            facts,
            checkpoint,
            device_of(place),
            pack_weights=config.pippy.pack_weights,
            native_attention=config.pippy.native_attention,
            native_linear=config.pippy.native_linear,
            progress=lambda num_bytes: _advance(bar, num_bytes),
        )
    return stage, facts, stages


def _advance(bar: tqdm[NoReturn], num_bytes: int) -> None:
    bar.update(num_bytes)


def _agree_on_slots(
    group: Group, pippy: PippyConfig, stage: Stage, facts: ModelFacts, budget: int | None = None
) -> int:
    """Return the cache size that every rank can hold, in tokens, a multiple of the block size.

    ``budget`` is what the stage may take of its device in all; without one the cache takes a share of what is free now.
    """
    if pippy.kv_cache_tokens is not None:
        own = pippy.kv_cache_tokens
    else:
        if budget is None:
            share = int(device_memory.free_share(group.place) * _CACHE_SHARE)
        else:
            batch_tokens = pippy.batch_tokens(on_cpu=stage.device.type == "cpu")
            share = budget - stage.resident_bytes - stage.graph.work_bytes_per_row * batch_tokens
        own = max(share, 0) // max(stage.kv_bytes_per_token, 1)
        if facts.max_positions:
            own = min(own, facts.max_positions * pippy.max_running_requests)
    smallest = min(group.wait_for_all("slots", own))
    num_blocks = smallest // pippy.block_size
    if num_blocks < 1:
        raise LoadError(
            f"the key/value cache holds {smallest} tokens on the smallest rank, less than one block of "
            f"{pippy.block_size}; free memory or set pippy.kv_cache_tokens"
        )
    return int(num_blocks * pippy.block_size)


def _allocate_cache(group: Group, stage: Stage, num_slots: int) -> None:
    error: LoadError | None = None
    try:
        stage.allocate_cache(num_slots)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as failed:  # a lack of memory, or an absurd number
        size = num_slots * stage.kv_bytes_per_token / 1e9
        error = LoadError(
            f"a key/value cache of {num_slots} tokens needs {size:.1f} GB on {stage.device}, which cannot be had; "
            f"lower pippy.kv_cache_tokens ({one_line(failed, 120)})"
        )
    group.outcome("cache", error)


def _compile(group: Group, stage: Stage) -> None:
    error: Exception | None = None
    try:
        stage.compile()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        error = caught
    group.outcome("compiled", error)


def check_early(config: ServingConfig, num_stages: int) -> None:
    """Check at once, before any rank is started, what needs neither a trace nor weights.

    Raises:
        ConfigError: If the number of stages is impossible or contradicts an explicit split or declared memory.
        CheckpointError: If the checkpoint's config, index or weight files are missing or damaged, contradict
            each other, or generation_config.json asks for what is not supported.
    """
    split = config.pippy.split
    if isinstance(split, list) and len(split) != num_stages:
        raise ConfigError(f"pippy.split: {split} describes {len(split)} stages, but there are {num_stages}")
    device_memory.check_declared(config.pippy, num_stages)
    path = config.handler.model_path
    model_config.check_written(path)
    layers = written_layers(path)
    partition.check_num_stages(num_stages, max(num_stages, 1) if layers is None else layers)
    num_tensors = len(Checkpoint(path, config.handler.index_filename).names)
    if layers is not None and layers > num_tensors:
        raise CheckpointError(f"{path}/config.json: {layers} layers, but the checkpoint has only {num_tensors} tensors")
    read_defaults(path)
