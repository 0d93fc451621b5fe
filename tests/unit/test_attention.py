"""Cached attention equals attention written out with one big mask, whatever lies in the cache and where."""

from __future__ import annotations

import random

import pytest
import torch

from ts_pippy_handler.attention import AttentionSpec, _route, attention_op
from ts_pippy_handler.cached_attention import AttentionPlan, CachedAttention, allocate_caches
from ts_pippy_handler.errors import UnsupportedModelError
from ts_pippy_handler.request import Segment

CPU = torch.device("cpu")
NUM_SLOTS = 96


def spec(**changes: object) -> AttentionSpec:
    values = {
        "layer": 0,
        "num_heads": 4,
        "num_kv_heads": 2,
        "key_dim": 8,
        "value_dim": 6,
        "scale": 0.3,
        "window": 0,
        "softcap": 0.0,
    }
    return AttentionSpec(**{**values, **changes})  # type: ignore[arg-type]


class Sequence:
    """The queries, keys and values of one request, and the runs of slots its cache lies in."""

    def __init__(self, s: AttentionSpec, length: int, runs: list[tuple[int, int]], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.runs = runs
        self.done = 0
        self.query, self.key, self.value = (
            torch.randn(heads, length, dim, generator=generator) * 2
            for heads, dim in ((s.num_heads, s.key_dim), (s.num_kv_heads, s.key_dim), (s.num_kv_heads, s.value_dim))
        )


def reference(
    s: AttentionSpec, sequence: Sequence, sinks_H: torch.Tensor | None = None, slopes_H: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of all rows at once [T, H, D], in float64 and row by row."""
    group = s.num_heads // s.num_kv_heads
    length = sequence.query.shape[1]
    out = torch.zeros(length, s.num_heads, s.value_dim, dtype=torch.float64)
    for head in range(s.num_heads):
        key, value = sequence.key[head // group].double(), sequence.value[head // group].double()
        for row in range(length):
            first = max(0, row + 1 - s.window) if s.window else 0
            scores = key[first : row + 1] @ sequence.query[head, row].double() * s.scale
            if s.softcap:
                scores = s.softcap * torch.tanh(scores / s.softcap)
            if slopes_H is not None:
                distance = torch.arange(first - row, 1, dtype=torch.float64)
                scores = scores + slopes_H[head].double() * distance * s.bias_scale
            if sinks_H is not None:
                scores = torch.cat([scores, sinks_H[head : head + 1].double()])
            weights = torch.softmax(scores, 0)
            out[row, head] = weights[: row + 1 - first] @ value[first : row + 1]
    return out


KINDS = {
    "plain": {},
    "one head per group": {"num_kv_heads": 4},
    "one group": {"num_kv_heads": 1},
    "wide window": {"window": 50},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "softcap and window": {"softcap": 1.5, "window": 5},
    "sinks": {},
    "sinks and window": {"window": 5},
    "slopes": {"bias_scale": 0.5},
    "slopes and window": {"window": 5},
    "slopes, one head per group": {"num_kv_heads": 4},
}
CHUNKS = {
    "prefill": [(14,), (9,), (1,)],
    "chunks": [(5, 1, 8), (4, 5), (1,)],
    "decode": [(1,) * 14, (3, *(1,) * 6), (1,)],
}
RUNS = {
    "in place": ([(0, 16)], [(32, 16)], [(64, 16)]),
    "fragmented": ([(40, 4), (0, 8), (20, 4)], [(60, 4), (52, 4), (56, 4)], [(90, 4)]),
    "runs longer than needed": ([(40, 12), (0, 30)], [(60, 8), (30, 8)], [(90, 2), (80, 4)]),
}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_three_requests_in_shared_batches(kind: str, chunks: str, runs: str) -> None:
    s = spec(**KINDS[kind])
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if "sinks" in kind else None
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0]) if "slopes" in kind else None
    sequences = [
        Sequence(s, sum(sizes), own, seed)
        for seed, (sizes, own) in enumerate(zip(CHUNKS[chunks], RUNS[runs], strict=True))
    ]
    expected = [reference(s, sequence, sinks, slopes) for sequence in sequences]
    plan = AttentionPlan()
    attention = CachedAttention(s, plan)
    allocate_caches([attention], NUM_SLOTS, torch.float32, CPU)
    attention.key_cache_GSD.fill_(torch.nan)  # whatever is read without having been written shows
    attention.value_cache_GSD.fill_(torch.nan)
    shuffle = random.Random(0)
    for turn in range(max(map(len, CHUNKS[chunks]))):
        active = [(q, sizes[turn]) for q, sizes in enumerate(CHUNKS[chunks]) if turn < len(sizes)]
        shuffle.shuffle(active)
        segments = [Segment(size, sequences[q].done, sequences[q].runs) for q, size in active]
        parts = [slice(sequences[q].done, sequences[q].done + size) for q, size in active]
        packed = [
            torch.cat([getattr(sequences[q], name)[:, part] for (q, _), part in zip(active, parts, strict=True)], 1)[
                None
            ]
            for name in ("query", "key", "value")
        ]
        plan.prepare(segments, CPU)
        output = attention(*packed, sinks, slopes)
        rows = sum(size for _, size in active)
        assert output.shape == (1, rows, s.num_heads, s.value_dim)
        assert output.is_contiguous()
        wanted = torch.cat([expected[q][part] for (q, _), part in zip(active, parts, strict=True)])
        torch.testing.assert_close(output[0].double(), wanted, rtol=1e-4, atol=1e-5)
        for q, size in active:
            sequences[q].done += size


def test_bfloat16_stays_bfloat16() -> None:
    s = spec()
    sequence = Sequence(s, 6, [(0, 8)], 0)
    plan = AttentionPlan()
    attention = CachedAttention(s, plan)
    allocate_caches([attention], 8, torch.bfloat16, CPU)
    plan.prepare([Segment(6, 0, [(0, 8)])], CPU)
    output = attention(*(tensor[None].bfloat16() for tensor in (sequence.query, sequence.key, sequence.value)))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output[0].double(), reference(s, sequence), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("wide", [True, False])
def test_a_wide_bias_is_not_rounded_beside_narrow_scores(wide: bool) -> None:
    length = 700
    s = spec(num_heads=1, num_kv_heads=1, wide_bias=wide)
    sequence = Sequence(s, length, [(0, length)], 0)
    rounded = Sequence(s, length, [(0, length)], 0)
    inputs = [tensor.bfloat16() for tensor in (sequence.query, sequence.key, sequence.value)]
    rounded.query, rounded.key, rounded.value = (tensor.float() for tensor in inputs)
    slopes = torch.tensor([0.25])
    attention = CachedAttention(s, plan := AttentionPlan())
    allocate_caches([attention], length, torch.bfloat16, CPU)
    plan.prepare([Segment(length, 0, [(0, length)])], CPU)
    output = attention(*(tensor[None] for tensor in inputs), None, slopes)
    assert output.dtype == torch.bfloat16
    error = (output[0].double() - reference(s, rounded, None, slopes)).abs().mean()
    # Unless it is wide, 0.25 * 699 is rounded to a multiple of 1: neighbours are told apart by less than that.
    assert (error < 0.02) == wide, error


def test_new_tokens_go_to_the_slots_behind_the_cached_ones() -> None:
    plan = AttentionPlan()
    plan.prepare([Segment(5, 3, [(10, 4), (2, 4)]), Segment(1, 0, [(30, 4)]), Segment(2, 8, [(50, 8), (40, 8)])], CPU)
    assert plan.slots_T.tolist() == [13, 2, 3, 4, 5, 30, 40, 41]


def test_values_cached_for_each_token() -> None:
    assert spec().values_per_token == 2 * (8 + 6)


def test_the_operator_itself_must_not_run() -> None:
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(NotImplementedError, match="replaced by cached attention before a stage runs"):
        attention_op(query, query, query, None, None, 0, 1.0, 0, 0.0, 1.0, False)


class FakeAttention(torch.nn.Module):
    layer_idx = 3
    is_causal = True


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        (
            {},
            {"position_bias": 1},
            "^FakeAttention passes 'position_bias' to attention, which pipeline stages do",
        ),
        ({}, {"attention_mask": torch.ones(1)}, "^FakeAttention builds an attention mask of its own$"),
        ({"is_causal": False}, {}, "^FakeAttention is not causal; only causal language models can be split$"),
        ({"layer_idx": None}, {}, "^FakeAttention does not know its layer index$"),
    ],
)
def test_what_the_operator_cannot_express_is_refused(changes: dict, arguments: dict, message: str) -> None:
    module = FakeAttention()
    for name, value in changes.items():
        setattr(module, name, value)
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(UnsupportedModelError, match=message):
        _route(module, query, query, query, arguments.pop("attention_mask", None), **arguments)


def test_arguments_reach_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []
    monkeypatch.setattr("ts_pippy_handler.attention.attention_op", lambda *args: seen.append(args))
    query, sinks = torch.zeros(1, 4, 3, 16), torch.zeros(4)
    _route(FakeAttention(), query, query, query, None, dropout=0.0, position_ids=None)
    _route(FakeAttention(), query, query, query, None, 0.7, sliding_window=9, softcap=30.0, s_aux=sinks)
    assert seen[0][3:] == (None, None, 3, 0.25, 0, 0.0, 1.0, False)
    assert seen[1][3] is sinks
    assert seen[1][4:] == (None, 3, 0.7, 9, 30.0, 1.0, False)
