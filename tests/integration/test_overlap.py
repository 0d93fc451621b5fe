"""Stages work at the same time: with stages that take a fixed time, no work is waited for that could be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command import ts_pippy
from tests.models import Checkpoints
from tests.oracle import random_prompts

pytestmark = pytest.mark.alone
FAULTS = Path(__file__).parents[1] / "faults"
DELAY_S = 0.06
"""Per batch and stage: long against what Python and the wire take, also while tests run side by side."""


def bench(model: Path, tmp_path: Path, *, stages: int, num_requests: int, num_new: int) -> Any:
    """Run equal requests at once through stages that take ``DELAY_S`` a batch."""
    prompts = random_prompts(num_requests, 4, 4, 256, seed=5)
    requests = [{"prompt_token_ids": prompt, "max_tokens": num_new} for prompt in prompts]
    work = tmp_path / "work.json"
    work.write_text(json.dumps({"requests": requests}))
    environment = {"PYTHONPATH": str(FAULTS), "TS_PIPPY_FAULTS": json.dumps({"delay_s": DELAY_S})}
    options = ("--stages", stages, "--dtype", "float32", "--workload", work, "--concurrency", num_requests, "--json")
    return ts_pippy("bench", model, *options, environment=environment).json()


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_stage_is_busy_while_there_are_twice_as_many_requests(
    checkpoints: Checkpoints, tmp_path: Path, stages: int
) -> None:
    found = bench(checkpoints("llama"), tmp_path, stages=stages, num_requests=2 * stages, num_new=40)
    shares = [stage["busy_share"] for stage in found["stages"]]
    assert min(shares) >= 0.85, shares
    # Every batch carries two requests; a token of each takes one turn through all stages.
    assert found["stages"][0]["num_batches"] == pytest.approx(40 * stages, rel=0.1)


def test_eight_requests_over_four_stages_take_less_than_half_the_serial_time(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    num_new = 20
    found = bench(checkpoints("llama"), tmp_path, stages=4, num_requests=8, num_new=num_new)
    serial_s = 8 * num_new * 4 * DELAY_S
    assert found["wall_s"] < 0.4 * serial_s
    assert found["wall_s"] >= serial_s / 8, "faster than the delays allow"
