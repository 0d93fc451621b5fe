"""The soak's own judgement: it must tell a right answer from a wrong, hung or lost one, and a leak from noise."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from scripts.lib.soak_traffic import Answer, Expected, Shot, Task, judge, random_options, random_shot
from scripts.lib.soak_watch import Sample, growth

EXPECTED = Expected([104, 105, 33], "hi!", "length")
SHOT = Shot("plain", b"{}", expected=EXPECTED)
RIGHT = Answer(status=200, text="hi!", token_ids=[104, 105, 33], finish_reason="length")
ABORTED = replace(RIGHT, text="hi", token_ids=[104, 105], finish_reason="abort")


@pytest.mark.parametrize(
    ("shot", "answer", "kind", "problem"),
    [
        (SHOT, RIGHT, "length", None),
        (replace(SHOT, format="chat"), replace(RIGHT, token_ids=None), "length", None),
        (SHOT, replace(RIGHT, text="ho!"), "length", "wrong"),
        (SHOT, replace(RIGHT, token_ids=[104, 105]), "length", "wrong"),
        (SHOT, replace(RIGHT, finish_reason="stop"), "stop", "wrong"),
        (SHOT, replace(RIGHT, finish_reason=None), "no finish reason", "wrong"),
        (SHOT, ABORTED, "abort", "wrong"),
        (replace(SHOT, ending="cancel"), ABORTED, "abort", None),
        (replace(SHOT, ending="cancel"), RIGHT, "length", None),
        (replace(SHOT, ending="cancel"), replace(ABORTED, token_ids=[104, 33]), "abort", "wrong"),
        (replace(SHOT, ending="cancel"), replace(ABORTED, text="ho"), "abort", "wrong"),
        (replace(SHOT, ending="leave"), Answer(end="left"), "left", None),
        (SHOT, Answer(end="late"), "hung", "hung"),
        (SHOT, Answer(end="cut"), "lost", "lost"),
        (SHOT, Answer(status=429), "429", None),
        (SHOT, Answer(status=503), "5xx", "wrong"),
        (SHOT, Answer(status=400), "refused", "wrong"),
        (SHOT, Answer(status=200, error="the pipeline failed"), "error", "wrong"),
        (replace(SHOT, expected=None), Answer(status=400), "4xx", None),
        (replace(SHOT, expected=None), RIGHT, "accepted", "wrong"),
    ],
)
def test_without_a_fault_only_the_right_end_will_do(shot: Shot, answer: Answer, kind: str, problem: str | None) -> None:
    verdict = judge(shot, answer, during_fault=False)
    assert (verdict.kind, verdict.problem) == (kind, problem)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(end="cut"), None),
        (Answer(status=500), None),
        (Answer(status=200, error="rank 1 is gone"), None),
        (Answer(end="late"), "hung"),
        (replace(RIGHT, text="ho!"), "wrong"),
        (ABORTED, "wrong"),
        (Answer(status=400), "wrong"),
    ],
)
def test_a_fault_excuses_an_error_but_no_wrong_answer(answer: Answer, problem: str | None) -> None:
    assert judge(SHOT, answer, during_fault=True).problem == problem


def test_shots_are_of_every_kind_and_damaged_ones_expect_a_refusal() -> None:
    draw = random.Random(1)
    tasks = [Task({"prompt": "a", **random_options(draw)}, EXPECTED) for _ in range(20)]
    tasks += [Task({"messages": [{"role": "user", "content": "a"}], "max_new_tokens": 3}, EXPECTED)]
    shots = [random_shot(draw, tasks, "model") for _ in range(2000)]
    assert {(shot.format, shot.is_stream) for shot in shots} == {
        (form, is_stream) for form in ("plain", "completions", "chat") for is_stream in (False, True)
    }
    assert {shot.ending for shot in shots} == {"wait", "cancel", "leave"}
    for share in (sum(shot.expected is None for shot in shots), sum(shot.ending != "wait" for shot in shots)):
        assert 50 < share < 150
    for shot in shots:
        if shot.expected is not None:
            fields = json.loads(shot.body)
            assert bool(fields.get("stream")) == shot.is_stream
            assert ("model" in fields) == (shot.format != "plain")


def samples(num: int, slope: float) -> list[Sample]:
    """Return a sample each second, growing by ``slope`` bytes a second after a jump in the first ten."""
    noise = random.Random(1)
    return [
        Sample(float(now), round(1e8 * (0.5 if now < 10 else 1) + slope * now + noise.uniform(-1e5, 1e5)), 20, 9)
        for now in range(num)
    ]


def test_growth_is_that_of_the_line_after_the_warm_up() -> None:
    found = growth(1, 5, samples(111, 50_000), 10)
    assert found is not None
    assert found.growth_percent == pytest.approx(5, abs=0.1)
    assert found.mb_per_hour == pytest.approx(180, rel=0.02)
    assert (found.rank, found.pid, found.descriptors, found.threads) == (1, 5, (20, 20), (9, 9))
    level = growth(1, 5, samples(111, 0), 10)
    assert level is not None
    assert abs(level.growth_percent) < 0.1
    assert growth(1, 5, samples(20, 50_000), 10) is None, "too short to say"
