"""Choose how many layers each stage gets. Numbers only; knows neither graphs nor devices."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence

from ts_pippy_handler.errors import ConfigError

StageCost = Callable[[int, int, int], float]
"""Cost of a stage, given its number, its first layer and the layer after its last."""


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Cut a sequence of layers into consecutive stages so that the most expensive stage is as cheap as possible.

    Among the cuts for which it is, the one whose stages are most alike is taken.

    Args:
        costs: Cost of each layer, in any unit.
        num_stages: Number of stages; each gets at least one layer.

    Returns:
        Number of layers of each stage, in order.

    Raises:
        ConfigError: If there are fewer layers than stages.
    """
    total = list(itertools.accumulate(costs, initial=0))
    return cheapest(len(costs), num_stages, lambda _, start, end: total[end] - total[start])


def cheapest(num_layers: int, num_stages: int, cost: StageCost) -> list[int]:
    """Do the same where a stage's cost may be any function of its number and its layers.

    Args:
        num_layers: Layers to spread over the stages.
        num_stages: Number of stages; each gets at least one layer.
        cost: Of a stage with the layers ``start`` … ``end - 1``; infinite where these cannot be.

    Returns:
        Number of layers of each stage, in order; with an infinite cost if nothing else is possible.

    Raises:
        ConfigError: If there are fewer layers than stages.
    """
    check_num_stages(num_stages, num_layers)
    worst, _ = _cut(num_layers, num_stages, cost, max, -math.inf)

    def unevenness(stage: int, start: int, end: int) -> float:
        own = cost(stage, start, end)
        return max(own, 0) ** 2 if own <= worst else math.inf

    # Where one stage is dear however the others are cut, as with a large head alone, these shall still be alike.
    _, sizes = _cut(num_layers, num_stages, unevenness, operator.add, 0)
    return sizes


def _cut(
    num_layers: int, num_stages: int, cost: StageCost, combine: Callable[[float, float], float], nothing: float
) -> tuple[float, list[int]]:
    """Return the smallest combination of the stages' costs, and the number of layers of each stage."""
    # best[s][k]: smallest combination when the first k layers fill s stages; cut[s][k]: where stage s begins.
    best = [[math.inf] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[stage - 1] * (num_layers + 1) for stage in range(num_stages + 1)]
    best[0][0] = nothing
    for stage in range(1, num_stages + 1):
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                combined = combine(best[stage - 1][start], cost(stage - 1, start, end))
                if combined < best[stage][end]:
                    best[stage][end], cut[stage][end] = combined, start
    sizes: list[int] = []
    end = num_layers
    for stage in range(num_stages, 0, -1):
        sizes.append(end - cut[stage][end])
        end = cut[stage][end]
    return best[num_stages][num_layers], sizes[::-1]


def check_split(sizes: Sequence[int], num_stages: int, num_layers: int) -> list[int]:
    """Check a split given by hand.

    Raises:
        ConfigError: If it does not cover every layer once with ``num_stages`` stages.
    """
    check_num_stages(num_stages, num_layers)
    if len(sizes) != num_stages:
        raise ConfigError(f"pippy.split: {list(sizes)} describes {len(sizes)} stages, but there are {num_stages} ranks")
    if sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"pippy.split: {list(sizes)} adds up to {sum(sizes)} layers, but the model has {num_layers}; "
            "every stage needs at least one"
        )
    return list(sizes)


def check_num_stages(num_stages: int, num_layers: int) -> None:
    """Check that every stage can have a layer.

    Raises:
        ConfigError: Naming both numbers.
    """
    if num_layers < 1:
        raise ConfigError(f"the model's config.json says that it has {num_layers} layers; at least one is needed")
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"number of stages: got {num_stages}, allowed are 1 to {num_layers}, the model's layers")
