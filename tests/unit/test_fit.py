"""No stage exceeds its device; the fastest split that fits is taken; what fits none is told in numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_pippy_handler import fit
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.costs import LayerCosts, Use, decode_costs
from ts_pippy_handler.errors import ConfigError, LoadError
from ts_pippy_handler.fit import DeviceMemory

KV, WORK = 2, 1


def model(
    layers: list[int], *, embedding: int = 0, head: int = 0, is_tied: bool = False, window: int | None = None
) -> LayerCosts:
    """Return the costs of a model with so many bytes in each layer, in the embedding and in the head."""
    uses: list[dict[str, int]] = [{f"layer{index}": Use.EVERY_ROW} for index in range(len(layers))]
    sizes = {f"layer{index}": size for index, size in enumerate(layers)} | {"embedding": embedding}
    uses[0]["embedding"] = Use.LOOKUP
    name = "embedding" if is_tied else "head"
    uses[-1][name] = uses[-1].get(name, 0) | Use.LOGIT_ROWS
    return LayerCosts(
        uses=uses,
        num_values=sizes if is_tied else sizes | {"head": head},
        value_bytes=1,
        kv_values_per_token=[KV] * len(layers),
        work_bytes_per_row=[WORK] * len(layers),
        windows=[1] * len(layers),
        num_operators=[0] * len(layers),
        max_positions=window,
    )


def pippy(**settings: Any) -> PippyConfig:
    return PippyConfig.model_validate({"max_batch_tokens": 10, **settings})


def memory(*budgets: int) -> DeviceMemory:
    return DeviceMemory(budgets=budgets, on_cpu=False)


def stages(sizes: list[int]) -> Iterator[range]:
    ends = list(itertools.accumulate(sizes))
    return (range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def num_bytes(costs: LayerCosts, layers: range, tokens: int, rows: int = 10) -> int:
    unit = costs.cost(layers)
    return unit.weight_bytes + rows * unit.work_bytes_per_row + tokens * unit.kv_bytes_per_token


def test_embedding_and_head_count_as_they_are_used() -> None:
    # A large embedding first, of which a token reads next to nothing; a large head last, which it reads whole.
    costs = model([10] * 10, embedding=100, head=80)
    assert fit.layers_per_stage(costs, pippy(split="memory"), 2) == [4, 6]
    assert fit.layers_per_stage(costs, pippy(split="time"), 2) == [6, 4]
    assert fit.layers_per_stage(costs, pippy(split=[4, 6]), 2) == [4, 6]
    with pytest.raises(ConfigError, match=r"^pippy.split: \[1, 2\] adds up to 3 layers, but the model has 10; every"):
        fit.layers_per_stage(costs, pippy(split=[1, 2]), 2)
    for limit in (None, memory(*[10**6] * 11)):
        with pytest.raises(ConfigError, match=r"^number of stages: got 11, allowed are 1 to 10, the model's layers$"):
            fit.layers_per_stage(costs, pippy(), 11, limit)


@pytest.mark.parametrize("num_layers", range(1, 41))
def test_every_layer_once_with_and_without_limits(num_layers: int) -> None:
    costs = model([10 + layer % 3 for layer in range(num_layers)], embedding=70, head=70)
    for num_stages in range(1, 9):
        roomy = memory(*(10_000 - 100 * stage for stage in range(num_stages)))
        for split, limit in itertools.product(("time", "memory"), (None, roomy)):
            if num_stages > num_layers:
                with pytest.raises(ConfigError, match=f"got {num_stages}, allowed are 1 to {num_layers}"):
                    fit.layers_per_stage(costs, pippy(split=split), num_stages, limit)
                continue
            sizes = fit.layers_per_stage(costs, pippy(split=split), num_stages, limit)
            assert [layer for stage in stages(sizes) for layer in stage] == list(range(num_layers))
            assert min(sizes) >= 1
            assert len(sizes) == num_stages


@pytest.mark.parametrize("num_stages", range(3, 9))
@pytest.mark.parametrize("num_layers", [16, 31, 40])
def test_with_a_large_vocabulary_the_ends_get_fewer_layers(num_layers: int, num_stages: int) -> None:
    costs = model([10] * num_layers, embedding=100, head=100)
    by_memory = fit.layers_per_stage(costs, pippy(split="memory"), num_stages)
    assert max(by_memory[0], by_memory[-1]) < min(by_memory[1:-1])
    by_time = fit.layers_per_stage(costs, pippy(split="time"), num_stages)
    assert by_time[-1] < min(by_time[:-1]), "an embedding is no work"


@given(
    layers=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    ends=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    budgets=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    split=st.sampled_from(["time", "memory"]),
    kv_cache_tokens=st.sampled_from([None, 1, 30]),
)
def test_no_stage_exceeds_its_device_and_no_faster_split_fits(
    layers: list[int], ends: tuple[int, int], budgets: list[int], split: str, kv_cache_tokens: int | None
) -> None:
    costs = model(layers, embedding=ends[0], head=ends[1])
    budgets = budgets[: len(layers)]
    settings = pippy(split=split, kv_cache_tokens=kv_cache_tokens)
    fewest = kv_cache_tokens or 10
    every = [
        [b - a for a, b in itertools.pairwise([0, *cuts, len(layers)])]
        for cuts in itertools.combinations(range(1, len(layers)), len(budgets) - 1)
    ]

    def room(sizes: list[int]) -> int:
        """Return the tokens of cache that a split leaves room for."""
        pairs = zip(stages(sizes), budgets, strict=True)
        return min((has - num_bytes(costs, own, 0)) // (KV * len(own)) for own, has in pairs)

    def slowest(sizes: list[int]) -> int:
        return max(costs.cost(own).time_cost for own in stages(sizes))

    most = max(map(room, every))
    if most < fewest:
        with pytest.raises(LoadError, match="fits no split"):
            fit.layers_per_stage(costs, settings, len(budgets), memory(*budgets))
        return
    found = fit.layers_per_stage(costs, settings, len(budgets), memory(*budgets))
    wanted = kv_cache_tokens or max(fewest, most // 2)
    for own, has in zip(stages(found), budgets, strict=True):
        assert num_bytes(costs, own, wanted) <= has
    if split == "time":
        assert slowest(found) == min(slowest(sizes) for sizes in every if room(sizes) >= wanted)


def test_devices_of_unequal_size() -> None:
    costs, small = model([100] * 12), pippy(kv_cache_tokens=10)
    assert fit.layers_per_stage(costs, small, 2, memory(5_000, 5_000)) == [6, 6]
    assert fit.layers_per_stage(costs, small, 2, memory(500, 5_000)) == [4, 8]
    assert fit.layers_per_stage(costs, small, 3, memory(5_000, 260, 5_000)) == [5, 2, 5]
    by_memory = pippy(split="memory", kv_cache_tokens=10)
    assert fit.layers_per_stage(costs, by_memory, 2, memory(2_000, 4_000)) == [4, 8]


def test_the_cache_gets_half_of_what_it_could_have() -> None:
    costs, limit = model([100] * 4), memory(640, 500)
    # Equal stages leave the second 290 bytes, 72 tokens; three layers and one leave 330 bytes for three layers: 55.
    assert fit.layers_per_stage(costs, pippy(), 2, limit) == [2, 2]
    # A cache of 100 tokens fits neither: 2 layers need 410 + 200 bytes.
    with pytest.raises(LoadError, match=r"with a cache of 130 tokens"):
        fit.layers_per_stage(costs, pippy(kv_cache_tokens=130), 2, limit)
    # A short window needs no more cache than its requests can fill.
    assert fit._Fit(model([100] * 4, window=4), pippy(), limit)._fewest_tokens == 4


def test_what_does_not_fit_is_told_in_numbers() -> None:
    costs = model([100 << 20] * 4, embedding=50 << 20, head=50 << 20)
    limit = memory(300 << 20, 200 << 20)
    message = (
        "pippy.device_memory: the model fits no split over 2 stages; the nearest [2, 2], with a cache of 10 tokens: "
        "stage 0 (layers 0-1) needs 250.0 MiB: weights 250.0 MiB, cache 40 B, computing 10 B; has 300.0 MiB, enough; "
        "stage 1 (layers 2-3) needs 250.0 MiB: weights 250.0 MiB, cache 40 B, computing 10 B; has 200.0 MiB, "
        "50.0 MiB too little. "
        "Use more stages, larger devices or a narrower handler.dtype, or lower pippy.max_batch_tokens"
    )
    with pytest.raises(LoadError, match=f"^{re.escape(message)}$"):
        fit.layers_per_stage(costs, pippy(), 2, limit)
    fits = fit.layers_per_stage(costs, pippy(), 2, memory(400 << 20, 200 << 20))
    assert fits == [3, 1]
    given = r"^pippy\.device_memory: the given split does not fit; \[1, 3\], .* 150\.0 MiB too little.*kv_cache_tokens$"
    with pytest.raises(LoadError, match=given):
        fit.layers_per_stage(costs, pippy(split=[1, 3], kv_cache_tokens=1), 2, memory(400 << 20, 200 << 20))
    assert fit.layers_per_stage(costs, pippy(split=[3, 1]), 2, memory(400 << 20, 200 << 20)) == [3, 1]


@pytest.mark.parametrize(
    ("on_cpu", "packs", "doubled"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_tied_embedding_exists_twice_where_weights_are_packed(on_cpu: bool, packs: bool, doubled: bool) -> None:
    costs = model([100, 100], embedding=40, is_tied=True)
    costs = LayerCosts(**{**vars_of(costs), "value_bytes": 4})
    limit = DeviceMemory(budgets=[4 * 240 + 10 + 10 * 4 * KV * 2 + (159 if doubled else 0)], on_cpu=on_cpu)
    if doubled:
        with pytest.raises(LoadError, match="1 B too little"):
            fit.layers_per_stage(costs, pippy(pack_weights=packs), 1, limit)
    else:
        assert fit.layers_per_stage(costs, pippy(pack_weights=packs), 1, limit) == [2]


def test_time_is_that_of_the_rows_that_need_a_weight() -> None:
    plain = model([1000, 1000], embedding=500, head=1000).units
    # An embedding is looked up, a head is computed for a third of the rows: less time than a layer's weights.
    assert plain[0].time_cost == model([1000, 1000]).units[0].time_cost
    head = plain[1].time_cost - plain[0].time_cost
    assert 0.3 * plain[0].time_cost < head < 0.4 * plain[0].time_cost
    # Half of the experts for each row: all are read, half is computed.
    experts = LayerCosts(**{**vars_of(model([1000, 1000])), "row_shares": {"layer0": 0.5}}).units
    assert 0.5 * experts[1].time_cost < experts[0].time_cost < 0.55 * experts[1].time_cost
    assert experts[0].read_bytes == 500
    # Tokens beyond the window are not read.
    short, long, whole = (
        LayerCosts(**{**vars_of(model([1000])), "windows": [window]}).units[0].time_cost for window in (8, 64, 0)
    )
    assert short < long < whole
    started = LayerCosts(**{**vars_of(model([1000])), "num_operators": [3]}).units[0].time_cost
    assert started > model([1000]).units[0].time_cost


def vars_of(costs: LayerCosts) -> dict[str, Any]:
    return {name: getattr(costs, name) for name in costs.__dataclass_fields__}


def test_costs_survive_the_disk() -> None:
    costs = model([3, 4, 5], embedding=7, head=9, window=11)
    assert costs.units
    assert decode_costs(costs.encode()) == costs
