"""From the times of tokens and the counters of ranks to a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ts_pippy_handler.bench import Percentiles, Served, summarise, with_ranks
from ts_pippy_handler.meter import RankStats
from ts_pippy_handler.workload import Workload, WorkloadRequest


@pytest.mark.parametrize(
    ("values", "p50", "p95"),
    [
        ([], None, None),
        ([4.0], 4.0, 4.0),
        ([2.0, 1.0], 1.5, 1.95),
        ([3.0, 1.0, 2.0], 2.0, 2.9),
        ([float(each) for each in range(101)], 50.0, 95.0),
    ],
)
def test_percentiles(values: list[float], p50: float | None, p95: float | None) -> None:
    found = Percentiles.of(values)
    assert found.p50 == (None if p50 is None else pytest.approx(p50))
    assert found.p95 == (None if p95 is None else pytest.approx(p95))


def workload(*max_tokens: int) -> Workload:
    requests = [WorkloadRequest(id=i, prompt_token_ids=[1], max_tokens=each) for i, each in enumerate(max_tokens)]
    return Workload(file=Path("w.json"), requests=requests)


SERVED = [
    Served(started_s=10.0, arrivals_s=[11.0, 11.5, 12.0], num_prompt=5, num_output=3),
    Served(started_s=10.5, arrivals_s=[13.5], num_prompt=7, num_output=1),
]


def stats(rank: int, **others: Any) -> RankStats:
    values: dict[str, Any] = {
        "elapsed_s": 5.0, "compute_s": 2.0, "wait_s": 0.5, "send_s": 0.25, "bookkeeping_s": 0.25,
        "bytes_received": 1000, "num_receives": 5, "num_batches": 5, "num_tokens": 14, "cpu_s": 2.5,
        "peak_memory_bytes": 4_000_000,
    }  # fmt: skip
    return RankStats(rank=rank, **{**values, **others})


def test_what_the_tokens_say() -> None:
    found = summarise(workload(3, 2), SERVED, wall_s=4.0, concurrency=None, load_s=2.0)
    assert (found.output_tokens_per_s, found.total_tokens_per_s) == (1.0, 4.0)
    assert (found.ttft_s.p50, found.inter_token_s.p50) == (2.0, 0.5)
    assert (found.num_requests, found.num_short) == (2, 1)
    assert (found.prompt_tokens, found.output_tokens) == (12, 4)
    assert (found.stages, found.cpu_s, found.peak_memory_bytes, found.bookkeeping_share) == (None,) * 4


def test_what_is_not_known_is_none() -> None:
    served = [Served(started_s=0.0, arrivals_s=[1.0], num_prompt=None, num_output=1)]
    found = summarise(workload(1), served, wall_s=1.0, concurrency=1)
    assert (found.prompt_tokens, found.total_tokens_per_s, found.load_s) == (None, None, None)
    assert found.inter_token_s == Percentiles(p50=None, p95=None)
    assert "total tokens/s" not in found.as_table()
    assert "-" not in {cell.strip() for line in found.as_table().splitlines() for cell in line.split("│")}


def test_what_the_ranks_say() -> None:
    report = summarise(workload(3, 2), SERVED, wall_s=4.0, concurrency=2)
    found = with_ranks(report, [stats(0), stats(1, compute_s=1.0, num_receives=0)])
    assert found.stages is not None
    assert [stage.busy_share for stage in found.stages] == [0.5, 0.25]
    assert [stage.hop.from_stage for stage in found.stages if stage.hop] == [1, 0]
    assert [stage.hop.mean_wait_and_receive_s for stage in found.stages if stage.hop] == [0.1, None]
    assert (found.cpu_s, found.peak_memory_bytes) == (5.0, 8_000_000)
    assert found.bookkeeping_share == pytest.approx(0.25 / 3.0)
    table = found.as_table()
    assert "2 requests, 2 at a time" in table
    assert "50%" in table
    assert "8 MB" in table


def test_a_single_stage_has_no_hop() -> None:
    found = with_ranks(summarise(workload(3, 2), SERVED, wall_s=4.0, concurrency=None), [stats(0)])
    assert found.stages is not None
    assert found.stages[0].hop is None
    assert "all at once" in found.as_table()


def test_json_is_plain_and_rounded() -> None:
    report = with_ranks(summarise(workload(3, 2), SERVED, wall_s=3.0, concurrency=None), [stats(0), stats(1)])
    found = json.loads(json.dumps(report.as_dict()))
    assert found["output_tokens_per_s"] == 1.333333
    assert found["ttft_s"] == {"p50": 2.0, "p95": 2.9}
    assert found["stages"][1]["hop"]["bytes_received"] == 1000
