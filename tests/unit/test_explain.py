"""The reason of a cut names the rule, the stage that limits, and what its neighbours would gain or lose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.test_fit import memory, model, pippy
from ts_pippy_handler import fit
from ts_pippy_handler.costs import LayerCosts
from ts_pippy_handler.explain import explain
from ts_pippy_handler.fit import DeviceMemory


def reason(costs: LayerCosts, num_stages: int, limit: DeviceMemory | None = None, **settings: Any) -> str:
    config = pippy(**settings)
    return explain(costs, config, limit, fit.decide(costs, config, num_stages, limit))


def timed(layers: list[int], head: int = 0) -> LayerCosts:
    """Return the costs of a model in which nothing but weights takes time worth mentioning."""
    return model([1000 * layer for layer in layers], head=1000 * head)


def test_by_time() -> None:
    # The head is computed for a third of the rows: 40, 40 and 30 + 14.
    assert reason(timed([10] * 11, head=40), 3) == (
        "Cut so that the slowest stage is as fast as it can be (split: time, for 2 prompt tokens to each new one). "
        "Stage 2 limits, with 35.5% of the time of all stages. With one layer fewer there, "
        "given to stage 1, the slowest stage would be 13.7% slower."
    )
    assert reason(timed([10] * 9), 3).endswith(
        "Stage 0 limits, with 33.3% of the time of all stages. With one layer fewer there, "
        "given to stage 1, the slowest stage would be 33.3% slower."
    )
    assert reason(timed([10, 10, 40, 10]), 3).endswith(
        "Stage 1 limits, with 57.1% of the time of all stages; it has a single layer, so no other cut relieves it."
    )
    assert reason(timed([10] * 9), 1) == "One stage has all layers."


def test_the_middle_stage_has_two_neighbours() -> None:
    assert reason(timed([30, 20, 20, 25]), 3).endswith(
        "Stage 1 limits, with 42.1% of the time of all stages. With one layer fewer there, "
        "given to stage 0, the slowest stage would be 25.0% slower; "
        "given to stage 2, the slowest stage would be 12.5% slower."
    )


def test_by_memory() -> None:
    assert reason(model([10] * 10, embedding=20), 2, split="memory") == (
        "Cut so that the stage with the most weights has as few as it can (split: memory). "
        "Stage 0 limits, with 50.0% of the weights of all stages. With one layer fewer there, "
        "given to stage 1, the largest stage would be 16.7% larger."
    )


def test_as_given() -> None:
    assert reason(timed([10] * 4), 2, split=[3, 1]) == (
        "Cut as given (split: [3, 1]). Stage 0 limits, with 75.0% of the time of all stages. "
        "With one layer fewer there, given to stage 1, the slowest stage would be 33.3% faster. "
        "split: time would give [2, 2]: the slowest stage would be 33.3% faster."
    )
    assert reason(timed([10] * 4), 2, split=[2, 2]).endswith("slower. split: time would cut there, too.")


def test_devices() -> None:
    costs, sizes = model([100] * 12), ["500B", "5000B"]
    declared = {"device_memory": sizes, "kv_cache_tokens": 10}
    assert reason(costs, 2, memory(500, 5_000), **declared) == (
        "Cut so that the slowest stage is as fast as it can be (split: time, for 2 prompt tokens to each new one). "
        "Device memory, 500 B declared for stage 0, 4.9 KiB declared for stage 1, leaves a cache of 11 tokens; "
        "without that limit the layers would be [6, 6]. "
        "Stage 1 limits, with 66.7% of the time of all stages. With one layer fewer there, "
        "given to stage 0, stage 0 would not fit its device."
    )
    measured = reason(costs, 2, memory(5_000, 5_000), device_memory={0: "5kB"}, split="memory", kv_cache_tokens=10)
    assert measured == (
        "Cut so that the fullest device is as empty as it can be (split: memory). "
        "Device memory, 4.9 KiB declared for stage 0, 4.9 KiB measured for stage 1, leaves a cache of 365 tokens "
        "and changes nothing. Stage 0 limits, with 14.6% of its device in use. With one layer fewer there, "
        "given to stage 1, the fullest device would be 16.4% fuller."
    )
    given = reason(costs, 2, memory(5_000, 5_000), split=[5, 7], device_memory="measured")
    assert "leaves a cache of 306 tokens. Stage 1 limits" in given


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_a_cut_that_is_optimal_cannot_be_bettered_by_a_neighbour(num_stages: int) -> None:
    assert "faster" not in reason(timed([10 + layer % 3 for layer in range(12)], head=70), num_stages).replace(
        "neither slower nor faster", ""
    )
