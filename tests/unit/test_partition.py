"""Every layer is in one stage, in order, and no other cut has a cheaper dearest stage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_pippy_handler.errors import ConfigError
from ts_pippy_handler.partition import balance, check_split


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_layer_is_covered_once(num_stages: int) -> None:
    for num_layers in range(1, 41):
        costs = [1 + (7 * layer) % 5 for layer in range(num_layers)]
        if num_layers < num_stages:
            with pytest.raises(ConfigError, match=f"got {num_stages}, allowed are 1 to {num_layers}, the model's"):
                balance(costs, num_stages)
            continue
        sizes = balance(costs, num_stages)
        assert len(sizes) == num_stages
        assert min(sizes) >= 1
        assert sum(sizes) == num_layers


def dearest(costs: list[int], sizes: list[int]) -> int:
    ends = list(itertools.accumulate(sizes))
    return max(sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_cut_is_better(costs: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    best = min(
        dearest(costs, [b - a for a, b in itertools.pairwise([0, *cuts, len(costs)])])
        for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert dearest(costs, balance(costs, num_stages)) == best


def test_equal_layers_give_equal_stages() -> None:
    assert balance([3] * 12, 4) == [3, 3, 3, 3]


def test_stages_beside_a_heavy_one_are_alike() -> None:
    assert balance([1] * 8 + [50], 5) == [2, 2, 2, 2, 1]


def test_a_heavy_last_layer_gets_company_last() -> None:
    assert balance([1, 1, 1, 1, 1, 1, 6], 2) == [6, 1]


@pytest.mark.parametrize("num_stages", [0, -1, 6])
def test_an_impossible_number_of_stages(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"^number of stages: got {num_stages}, allowed are 1 to 5, the model's lay"):
        balance([1] * 5, num_stages)
    with pytest.raises(ConfigError, match=f"got {num_stages}, allowed are 1 to 5"):
        check_split([5], num_stages, 5)


def test_a_split_by_hand_is_kept() -> None:
    assert check_split((1, 3, 1), 3, 5) == [1, 3, 1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([2, 3, 1], r"^pippy.split: \[2, 3, 1\] describes 3 stages, but there are 2 ranks$"),
        ([2, 4], r"^pippy.split: \[2, 4\] adds up to 6 layers, but the model has 5; every stage needs at least one$"),
        ([5, 0], r"^pippy.split: \[5, 0\] adds up to 5 layers, .* every stage needs at least one$"),
        ([6, -1], r"every stage needs at least one$"),
    ],
)
def test_a_wrong_split_by_hand(sizes: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(sizes, 2, 5)
