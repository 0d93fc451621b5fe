"""Tokens depend on a row's own logits, seed and position, and on nothing else; filters are those of transformers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ts_pippy_handler.request import Processing, SampledRow, TokenLogprobs
from ts_pippy_handler.sampling import NO_TOKEN, _processed, logprobs_of, sample

VOCAB = 50


def row(
    *,
    seed: int = 0,
    position: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    processing: Processing | None = None,
) -> SampledRow:
    return SampledRow(0, position, temperature, top_k, top_p, seed, processing)


def asking(**changes: Any) -> Processing:
    plain = Processing([], [], 0.0, 1.0, 0.0, 0.0, (), [], None)
    return msgspec.structs.replace(plain, **changes)


def logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    values = logits(20).to(dtype)
    greedy = sample(values, [row(temperature=0.0, seed=index, top_k=3, top_p=0.2) for index in range(20)])
    assert greedy == values.argmax(-1).tolist()
    assert all(type(token) is int for token in greedy)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_comes_from_what_is_no_number(temperature: float) -> None:
    logits = torch.randn(4, VOCAB)
    logits[0, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, 9] = torch.inf
    rows = [row(temperature=temperature)] * 4
    first, second, *others = sample(logits, rows)
    assert [first, *others] == [NO_TOKEN] * 3
    assert [second] == sample(logits[1:2], rows[:1])


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


CONTEXT = [3, 3, 7, 0, 49, 12, 3]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2, 100.0])
@pytest.mark.parametrize("num_prompt", [0, 4, 7])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float, num_prompt: int) -> None:
    values = logits(1)
    own = asking(prompt=CONTEXT[:num_prompt], generated=CONTEXT[num_prompt:], repetition_penalty=penalty)
    expected = RepetitionPenaltyLogitsProcessor(float(penalty))(torch.tensor([CONTEXT]), values.clone())
    assert torch.equal(_processed(values[0], own), expected[0])


def test_presence_counts_once_and_frequency_each_time_and_the_prompt_not_at_all() -> None:
    values = logits(1)
    own = asking(prompt=[1, 1, 12], generated=CONTEXT, presence_penalty=0.5, frequency_penalty=-0.25)
    expected = values[0].clone()
    for token in set(CONTEXT):
        expected[token] -= 0.5 - 0.25 * CONTEXT.count(token)
    torch.testing.assert_close(_processed(values[0], own), expected, rtol=0, atol=1e-6)
    assert torch.equal(_processed(values[0], asking(presence_penalty=2.0, frequency_penalty=2.0)), values[0])


def test_a_bias_is_added() -> None:
    values = logits(1)
    biases = {5: 1.5, 0: -100.0, 49: 0.25}
    expected = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])(
        torch.tensor([[1]]), values
    )
    assert torch.equal(_processed(values[0], asking(logit_bias=tuple(biases.items()))), expected[0])


def test_suppressed_tokens_are_never_chosen() -> None:
    values = logits(1)
    likely = values[0].topk(3).indices.tolist()
    expected = MinNewTokensLengthLogitsProcessor(0, 1, likely)(torch.empty(1, 0, dtype=torch.long), values)
    own = asking(suppressed=likely, logit_bias=((likely[0], 100.0),))
    processed = _processed(values[0], own)
    assert torch.equal(processed, expected[0])
    drawn = {sample(values, [row(seed=seed, temperature=2.0, processing=own)])[0] for seed in range(200)}
    assert not drawn & set(likely)
    assert sample(values, [row(temperature=0.0, processing=own)]) == [int(expected.argmax())]


@pytest.mark.parametrize(("min_p", "temperature"), [(0.05, 1.0), (0.3, 2.0), (1.0, 1.0)])
def test_min_p_keeps_what_that_of_transformers_keeps(min_p: float, temperature: float) -> None:
    values = logits(1, seed=4, vocab=16)
    scores = MinPLogitsWarper(min_p)(None, TemperatureLogitsWarper(temperature)(None, values))
    probabilities = torch.softmax(scores[0], -1)
    own = asking(min_p=min_p)
    drawn = {sample(values, [row(seed=s, temperature=temperature, processing=own)])[0] for s in range(800)}
    assert drawn <= set(probabilities.nonzero()[:, 0].tolist())
    assert {token for token in range(16) if probabilities[token] > 0.02} <= drawn


@pytest.mark.parametrize("token", [0, 17, 49])
def test_the_largest_bias_forces_a_token_and_the_smallest_bans_it(token: int) -> None:
    values = logits(1)
    for temperature in (0.0, 1.0):
        forced = [
            row(temperature=temperature, seed=seed, processing=asking(logit_bias=((token, 100.0),)))
            for seed in range(20)
        ]
        assert sample(values.expand(20, -1), forced) == [token] * 20
        banned = [
            row(temperature=temperature, seed=seed, processing=asking(logit_bias=((token, -100.0),)))
            for seed in range(20)
        ]
        assert token not in sample(values.expand(20, -1), banned)


def test_the_order_is_processors_then_temperature_then_filters() -> None:
    values = logits(1, vocab=30)
    own = asking(prompt=[1, 2], generated=[3], repetition_penalty=1.7, min_p=0.02, logit_bias=((4, 2.0),))
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            SequenceBiasLogitsProcessor([[[4], 2.0]]),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    probabilities = torch.softmax(chain(torch.tensor([[1, 2, 3]]), values.clone())[0], -1)
    num = 3000
    counts = torch.zeros(30)
    for seed in range(num):
        wanted = row(seed=seed, temperature=1.4, top_k=12, top_p=0.9, processing=own)
        counts[sample(values, [wanted])[0]] += 1
    assert not counts[probabilities == 0].any()
    deviation = (num * probabilities * (1 - probabilities)).sqrt()
    assert bool(((counts - num * probabilities).abs() <= 5 * deviation).all())


def test_the_given_logits_are_not_changed() -> None:
    values = logits(2)
    before = values.clone()
    own = asking(prompt=[1], generated=[2], repetition_penalty=2.0, presence_penalty=1.0, suppressed=[3], logprobs=2)
    own = msgspec.structs.replace(own, logit_bias=((5, 9.0),), min_p=0.5)
    sample(values, [row(temperature=0.0, processing=own), row(temperature=1.0, processing=own)])
    assert torch.equal(values, before)


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e40, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 100.0])
def test_no_penalty_breaks_a_draw(penalty: float, temperature: float) -> None:
    values = logits(1)
    values[0, :3] = torch.tensor([0.0, -torch.inf, 1e20])
    own = asking(prompt=list(range(VOCAB)), repetition_penalty=penalty, suppressed=[2], min_p=0.1)
    (token,) = sample(values, [row(temperature=temperature, processing=own)])
    assert 0 <= token < VOCAB
    assert token != 2


processings = st.builds(
    Processing,
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.5]),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=3).map(tuple),
    suppressed=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)
any_rows = st.builds(
    row,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(1, 1000),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.8, 1.0]),
    processing=st.none() | processings,
)


@settings(max_examples=60)
@given(st.lists(any_rows, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_that_asks_for_anything_gets_the_same_in_any_batch(rows: list[SampledRow], chance: Any) -> None:
    values = logits(len(rows))
    arrived = [msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=SampledRow) for each in rows]
    alone = [sample(values[index][None], [each])[0] for index, each in enumerate(rows)]
    order = list(range(len(rows)))
    chance.shuffle(order)
    together = [arrived[index] for index in order]
    tokens = sample(values[order], together)
    assert tokens == [alone[index] for index in order]
    own = [(logprobs_of(values[i][None], [rows[i]], [alone[i]]) or [None])[0] for i in order]
    assert (logprobs_of(values[order], together, tokens) or [None] * len(rows)) == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [0, 1, 5, 20, 60])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype, num: int) -> None:
    values = logits(3).to(dtype)
    own = asking(logprobs=num, logit_bias=((7, 100.0),))
    rows = [row(temperature=0.0, processing=own), row(), row(temperature=0.1, processing=own)]
    tokens = sample(values, rows)
    assert (tokens[0], tokens[2]) == (7, 7)
    answers = logprobs_of(values, rows, tokens)
    assert answers[1] is None
    for index in (0, 2):
        expected = torch.log_softmax(values[index].double(), -1)
        answer = answers[index]
        assert answer is not None
        assert answer.logprob == pytest.approx(float(expected[7]), abs=1e-5)
        assert len(answer.top) == min(num, VOCAB)
        ids = [token for token, _ in answer.top]
        order = sorted(range(VOCAB), key=lambda token, chances=expected: (-float(chances[token]), token))
        assert ids == order[:num]
        assert [value for _, value in answer.top] == pytest.approx(expected[ids].tolist(), abs=1e-5)


def test_of_equal_logprobs_the_first_tokens_are_reported() -> None:
    values = torch.zeros(1, VOCAB)
    values[0, 30:40] = 2.0
    (answer,) = logprobs_of(values, [row(temperature=0.0, processing=asking(logprobs=4))], [30])
    assert answer is not None
    assert [token for token, _ in answer.top] == [30, 31, 32, 33]
    assert answer.top[0][1] == answer.logprob


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_logprobs_are_numbers_that_json_has(bad: float) -> None:
    values = logits(1)
    values[0, 3] = bad
    (answer,) = logprobs_of(values, [row(processing=asking(logprobs=VOCAB))], [3])
    assert isinstance(answer, TokenLogprobs)
    assert answer.logprob == -9999.0
    assert len(answer.top) == VOCAB
    assert all(math.isfinite(value) for _, value in answer.top)


def test_without_a_wish_nothing_is_reported() -> None:
    assert logprobs_of(logits(2), [row(), row(processing=asking(min_p=0.5))], [1, 2]) == []


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
