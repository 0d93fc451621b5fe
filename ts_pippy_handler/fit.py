"""Splits that fit the memory of their devices: how many layers each stage gets, or why no split will do.

A stage needs its weights, the cache of its layers, and room to compute its largest batch. Numbers only; how much memory
there is comes from :mod:`~ts_pippy_handler.device_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ByteSize

from ts_pippy_handler import partition
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.costs import LayerCosts, Unit
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.partition import StageCost

_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What the stage of each rank may take of its device."""

    budgets: Sequence[int]
    """Bytes, rank by rank."""
    on_cpu: bool
    """Whether stages run on CPUs, where weights may be packed."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a stage takes of its device besides the cache."""

    weight_bytes: int
    work_bytes: int
    """To compute the largest batch."""
    kv_bytes_per_token: int

    def total(self, num_tokens: int) -> int:
        """Return the bytes with a cache of so many tokens."""
        return self.weight_bytes + self.work_bytes + self.kv_bytes_per_token * num_tokens

    def tokens_in(self, budget: int) -> int:
        """Return how many tokens of cache the rest of ``budget`` holds; negative if not even the weights fit."""
        return (budget - self.total(0)) // max(self.kv_bytes_per_token, 1)


def need(unit: Unit, batch_tokens: int, *, packs_weights: bool) -> Need:
    """Return what a stage with the costs ``unit`` takes whose largest batch has ``batch_tokens``."""
    return Need(
        weight_bytes=unit.weight_bytes + (unit.doubled_bytes if packs_weights else 0),
        work_bytes=unit.work_bytes_per_row * batch_tokens,
        kv_bytes_per_token=unit.kv_bytes_per_token,
    )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How many layers each stage gets, and by what."""

    sizes: list[int]
    cost: StageCost
    """What was made as small as possible for the stage where it is largest: ``time_cost`` or bytes; with device memory
    and ``split: memory`` the share of it that is used. Infinite where a stage would not fit."""
    cache_tokens: int | None = None
    """Tokens of cache that every stage has room for; None without device memory."""


def layers_per_stage(
    costs: LayerCosts, pippy: PippyConfig, num_stages: int, memory: DeviceMemory | None = None
) -> list[int]:
    """Return how many layers each stage gets under ``pippy.split``; see :func:`decide`."""
    return decide(costs, pippy, num_stages, memory).sizes


def decide(costs: LayerCosts, pippy: PippyConfig, num_stages: int, memory: DeviceMemory | None = None) -> Decision:
    """Choose how many layers each stage gets under ``pippy.split``.

    With ``memory`` every stage fits its device together with its share of the cache: of ``pippy.kv_cache_tokens``, else
    of at least one full batch and half the largest cache that any split leaves room for.

    Raises:
        ConfigError: If the split does not fit the model or the number of stages.
        LoadError: If no split fits the memory, with what each stage needs and has.
    """
    fitted = None if memory is None else _Fit(costs, pippy, memory)
    if isinstance(pippy.split, list):
        given = partition.check_split(pippy.split, num_stages, costs.num_layers)
        if fitted is not None:
            return fitted.check(given)
        return Decision(sizes=given, cost=_cost_of(costs, "time"))
    partition.check_num_stages(num_stages, costs.num_layers)
    if fitted is not None:
        return fitted.best(num_stages)
    sizes = partition.balance([_measure(unit, pippy.split) for unit in costs.units], num_stages)
    return Decision(sizes=sizes, cost=_cost_of(costs, pippy.split))


def _measure(unit: Unit, split: str) -> int:
    return unit.time_cost if split == "time" else unit.weight_bytes


def _cost_of(costs: LayerCosts, split: str) -> StageCost:
    return lambda _, start, end: _measure(costs.cost(range(start, end)), split)


class _Fit:
    """One model on given devices."""

    def __init__(self, costs: LayerCosts, pippy: PippyConfig, memory: DeviceMemory) -> None:
        self._costs = costs
        self._pippy = pippy
        self._budgets = memory.budgets
        packs = memory.on_cpu and pippy.pack_weights and costs.value_bytes == _FLOAT32_BYTES
        self._batch_tokens = pippy.batch_tokens(on_cpu=memory.on_cpu)
        num = costs.num_layers
        self._units = [dict(enumerate(costs.growing(start, num), start + 1)) for start in range(num)]
        """``[start][end]``: cost of the layers ``start`` … ``end - 1``."""
        self._needs = [
            {end: need(unit, self._batch_tokens, packs_weights=packs) for end, unit in units.items()}
            for units in self._units
        ]

    @property
    def _fewest_tokens(self) -> int:
        """Tokens that the cache must hold."""
        return self._pippy.kv_cache_tokens or min(self._costs.max_positions or self._batch_tokens, self._batch_tokens)

    def best(self, num_stages: int) -> Decision:
        num_layers = self._costs.num_layers
        roomiest = partition.cheapest(num_layers, num_stages, lambda *layers: -self._tokens(*layers))
        most = self._cache_tokens(roomiest)
        wanted = self._fewest_tokens
        if most < wanted:
            self._refuse(
                partition.cheapest(num_layers, num_stages, self._missing_bytes),
                f"the model fits no split over {num_stages} stages; the nearest",
            )
        if self._pippy.kv_cache_tokens is None:
            windows = (self._costs.max_positions or most) * self._pippy.max_running_requests
            wanted = max(wanted, min(windows, most // 2))

        cost = self._cost_with(wanted)
        return self._decision(partition.cheapest(num_layers, num_stages, cost), cost)

    def check(self, sizes: list[int]) -> Decision:
        if any(self._missing_bytes(stage, *layers) > 0 for stage, layers in enumerate(ranges(sizes))):
            self._refuse(sizes, "the given split does not fit;")
        return self._decision(sizes, self._cost_with(self._fewest_tokens))

    def _decision(self, sizes: list[int], cost: StageCost) -> Decision:
        return Decision(sizes=sizes, cost=cost, cache_tokens=self._cache_tokens(sizes))

    def _cost_with(self, num_tokens: int) -> StageCost:
        def cost(stage: int, start: int, end: int) -> float:
            if self._tokens(stage, start, end) < num_tokens:
                return math.inf
            if self._pippy.split == "memory":
                return self._needs[start][end].total(num_tokens) / self._budgets[stage]
            return self._units[start][end].time_cost

        return cost

    def _tokens(self, stage: int, start: int, end: int) -> int:
        return self._needs[start][end].tokens_in(self._budgets[stage])

    def _cache_tokens(self, sizes: Sequence[int]) -> int:
        return min(self._tokens(stage, start, end) for stage, (start, end) in enumerate(ranges(sizes)))

    def _missing_bytes(self, stage: int, start: int, end: int) -> int:
        return self._needs[start][end].total(self._fewest_tokens) - self._budgets[stage]

    def _refuse(self, sizes: list[int], what: str) -> None:
        tokens = self._fewest_tokens
        stages = []
        for stage, (start, end) in enumerate(ranges(sizes)):
            each, missing = self._needs[start][end], self._missing_bytes(stage, start, end)
            stages.append(
                f"stage {stage} (layers {start}-{end - 1}) needs {_show(each.total(tokens))}: weights "
                f"{_show(each.weight_bytes)}, cache {_show(each.kv_bytes_per_token * tokens)}, computing "
                f"{_show(each.work_bytes)}; has {_show(self._budgets[stage])}, "
                + (f"{_show(missing)} too little" if missing > 0 else "enough")
            )
        shrink = "lower pippy.kv_cache_tokens" if self._pippy.kv_cache_tokens else "lower pippy.max_batch_tokens"
        raise LoadError(
            f"pippy.device_memory: {what} [{', '.join(map(str, sizes))}], with a cache of {tokens} tokens: "
            f"{'; '.join(stages)}. Use more stages, larger devices or a narrower handler.dtype, or {shrink}"
        )


def ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return first layer and the one after the last of each stage."""
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _show(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable(separator=" ")
