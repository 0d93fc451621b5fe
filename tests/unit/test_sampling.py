"""Tokens depend on a row's own logits, seed and position, and on nothing else; filters are those of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ts_pippy_handler.request import SampledRow
from ts_pippy_handler.sampling import sample

VOCAB = 50


def row(
    *, seed: int = 0, position: int = 1, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> SampledRow:
    return SampledRow(0, position, temperature, top_k, top_p, seed)


def logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    values = logits(20).to(dtype)
    greedy = sample(values, [row(temperature=0.0, seed=index, top_k=3, top_p=0.2) for index in range(20)])
    assert greedy == values.argmax(-1).tolist()
    assert all(type(token) is int for token in greedy)


def test_top_k_of_one_is_greedy() -> None:
    values = logits(30)
    rows = [row(seed=index, temperature=1.5, top_k=1) for index in range(30)]
    assert sample(values, rows) == values.argmax(-1).tolist()


def test_a_tiny_top_p_is_greedy() -> None:
    values = logits(30)
    rows = [row(seed=index, temperature=1.5, top_p=1e-9) for index in range(30)]
    assert sample(values, rows) == values.argmax(-1).tolist()


def test_rows_of_all_kinds_in_one_batch() -> None:
    values = logits(4)
    rows = [row(temperature=0.0), row(seed=3), row(seed=4, top_k=2), row(temperature=0.0, seed=9)]
    together = sample(values, rows)
    assert together == [sample(values[index : index + 1], [each])[0] for index, each in enumerate(rows)]
    assert together[0] == int(values[0].argmax())
    assert together[3] == int(values[3].argmax())


@settings(max_examples=30)
@given(st.permutations(list(range(8))), st.integers(1, 8))
def test_a_row_draws_the_same_in_any_batch(order: list[int], size: int) -> None:
    values = logits(8)
    rows = [row(seed=100 + index, position=5 + index, temperature=0.9, top_k=20, top_p=0.95) for index in range(8)]
    alone = [sample(values[index][None], [rows[index]])[0] for index in range(8)]
    chosen = order[:size]
    assert sample(values[chosen], [rows[index] for index in chosen]) == [alone[index] for index in chosen]


def test_seed_and_position_both_decide() -> None:
    flat = torch.zeros(1, 10_000)

    def draw(seed: int, position: int) -> int:
        return sample(flat, [row(seed=seed, position=position)])[0]

    draws = {(seed, position): draw(seed, position) for seed in (0, 1, 2, 2**31, 2**63 - 1) for position in range(1, 9)}
    assert len(set(draws.values())) == len(draws)
    assert all(draw(*key) == token for key, token in draws.items())


@pytest.mark.parametrize("bit", [32, 40, 62])
def test_all_bits_of_a_seed_count(bit: int) -> None:
    values = torch.zeros(1, 10_000)
    positions = range(1, 9)
    low, high = ([sample(values, [row(seed=seed, position=p)]) for p in positions] for seed in (0, 2**bit))
    assert low != high


def test_the_drawn_tokens_have_the_right_frequencies() -> None:
    chances = torch.tensor([0.5, 0.25, 0.125, 0.125])
    values = (chances.log() * 0.7)[None]  # drawn at temperature 0.7
    num = 4000
    counts = torch.zeros(4)
    for seed in range(num):
        counts[sample(values, [row(seed=seed, temperature=0.7)])[0]] += 1
    for count, chance in zip(counts.tolist(), chances.tolist(), strict=True):
        deviation = math.sqrt(num * chance * (1 - chance))
        assert abs(count - num * chance) < 5 * deviation


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 5, 1.0), (1.0, 0, 0.6), (0.5, 0, 0.9), (2.0, 12, 0.8), (1.0, 3, 0.999), (1.0, 10_000, 1.0)],
)
def test_the_filters_keep_what_those_of_transformers_keep(temperature: float, top_k: int, top_p: float) -> None:
    values = logits(1, seed=4, vocab=16)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))
    probabilities = torch.softmax(warpers(None, values)[0], -1)
    drawn = {
        sample(values, [row(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)])[0] for seed in range(1500)
    }
    kept = set(probabilities.nonzero()[:, 0].tolist())
    assert drawn <= kept
    assert {token for token in kept if probabilities[token] > 0.01} <= drawn


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-40, 1e-320])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    values = logits(5)
    rows = [row(seed=index, temperature=temperature) for index in range(5)]
    assert sample(values, rows) == values.argmax(-1).tolist()


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
