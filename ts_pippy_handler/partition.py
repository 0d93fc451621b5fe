"""Choose how many layers each stage gets. Integers only; knows neither graphs nor devices."""

from __future__ import annotations

from collections.abc import Sequence

from ts_pippy_handler.errors import ConfigError


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Cut a sequence of layers into consecutive stages so that the most expensive stage is as cheap as possible.

    Args:
        costs: Cost of each layer, in any unit.
        num_stages: Number of stages; each gets at least one layer.

    Returns:
        Number of layers of each stage, in order.

    Raises:
        ConfigError: If there are fewer layers than stages.
    """
    num_layers = len(costs)
    check_num_stages(num_stages, num_layers)
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[s][k]: smallest possible maximum when the first k layers fill s stages; cut[s][k]: where stage s begins.
    best = [[float("inf")] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0
    for stage in range(1, num_stages + 1):
        for end in range(stage, num_layers + 1):
            for start in range(stage - 1, end):
                worst = max(best[stage - 1][start], total[end] - total[start])
                if worst < best[stage][end]:
                    best[stage][end], cut[stage][end] = worst, start
    sizes: list[int] = []
    end = num_layers
    for stage in range(num_stages, 0, -1):
        sizes.append(end - cut[stage][end])
        end = cut[stage][end]
    return sizes[::-1]


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
