"""What a bench tells: from the times of tokens and the ranks' counters to a report, as JSON or as tables.

``bench_engine`` and ``bench_http`` do the running. Plain data; knows no torch and no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ts_pippy_handler.meter import RankStats
from ts_pippy_handler.workload import Workload

_DIGITS = 6
_TABLE_WIDTH = 120


@dataclass(kw_only=True)
class Served:
    """One request, served."""

    started_s: float
    arrivals_s: list[float] = field(default_factory=list)
    """When each new token arrived, or each chunk of a stream; same clock."""
    num_prompt: int | None = None
    num_output: int = 0
    token_ids: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of seconds; None where nothing was measured."""

    p50: float | None
    p95: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Interpolate between the nearest values."""
        if not values:
            return cls(p50=None, p95=None)
        p50, p95 = np.percentile(values, [50, 95])
        return cls(p50=float(p50), p95=float(p95))


@dataclass(frozen=True, kw_only=True)
class Hop:
    """What a stage received from the stage before it; stage 0 receives sampled tokens from the last."""

    from_stage: int
    bytes_received: int
    wait_and_receive_s: float
    """All batches together; the time that the stage before still computes is part of it."""
    mean_wait_and_receive_s: float | None


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One stage, which is one rank."""

    stage: int
    busy_share: float
    """Time computing, as a share of the wall time."""
    compute_s: float
    send_s: float
    num_batches: int
    num_tokens: int
    """Rows of the batches: prompt tokens, and new ones that were sent through again for the next."""
    hop: Hop | None
    """None for a single stage."""
    cpu_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a bench found. What a server does not tell is None."""

    output_tokens_per_s: float
    total_tokens_per_s: float | None
    """Prompt tokens and new ones."""
    ttft_s: Percentiles
    """From handing a request over to its first token; with all requests at once, waiting for the others included."""
    inter_token_s: Percentiles
    """Between two tokens of a request, or two chunks of a stream."""
    wall_s: float
    """From the first request to the last token; without loading."""
    load_s: float | None
    num_requests: int
    num_short: int
    """Requests with fewer new tokens than were asked for: more than 0 means that the server heeds end-of-sequence."""
    concurrency: int | None
    """Most requests at a time; None for all at once."""
    prompt_tokens: int | None
    output_tokens: int
    stages: list[StageReport] | None = None
    peak_memory_bytes: int | None = None
    """Sum of the ranks' peaks."""
    cpu_s: float | None = None
    """Sum over the ranks, during ``wall_s``."""
    bookkeeping_share: float | None = None
    """Scheduling and delivery, as a share of the time rank 0 spends on steps: all but idleness."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded

    def as_table(self) -> str:
        """Return the report to be read by people."""
        console = Console(width=_TABLE_WIDTH, no_color=True)
        with console.capture() as captured:
            console.print(self._figures())
            if self.stages is not None:
                console.print(_stage_table(self.stages))
        return captured.get().rstrip()

    def _figures(self) -> Table:
        at_a_time = "all at once" if self.concurrency is None else f"{self.concurrency} at a time"
        table = Table(title=f"{self.num_requests} requests, {at_a_time}", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in (
            ("output tokens/s", f"{self.output_tokens_per_s:,.1f}"),
            ("total tokens/s", _or_dash(self.total_tokens_per_s, "{:,.1f}")),
            ("prompt tokens", _or_dash(self.prompt_tokens, "{:,}")),
            ("output tokens", f"{self.output_tokens:,}"),
            ("requests that ended early", f"{self.num_short:,}"),
            ("time to first token, p50 / p95", _pair(self.ttft_s)),
            ("between tokens, p50 / p95", _pair(self.inter_token_s)),
            ("wall time", f"{self.wall_s:.2f} s"),
            ("load time", _or_dash(self.load_s, "{:.2f} s")),
            ("processor time, all ranks", _or_dash(self.cpu_s, "{:.2f} s")),
            ("peak memory, all ranks", _or_dash(_scaled(self.peak_memory_bytes, 1e6), "{:,.0f} MB")),
            ("bookkeeping, share of rank 0's steps", _or_dash(_scaled(self.bookkeeping_share, 0.01), "{:.1f} %")),
        ):
            if value != "-":
                table.add_row(name, value)
        return table


def summarise(
    workload: Workload, served: Sequence[Served], *, wall_s: float, concurrency: int | None, load_s: float | None = None
) -> Report:
    """Make the report of requests that were served, in the workload's order, without the ranks' part."""
    gaps = [gap for each in served for gap in np.diff(each.arrivals_s).tolist()]
    prompts = [each.num_prompt for each in served if each.num_prompt is not None]
    num_prompt = sum(prompts) if len(prompts) == len(served) else None
    num_output = sum(each.num_output for each in served)
    wanted = [request.max_tokens for request in workload.requests]
    return Report(
        output_tokens_per_s=num_output / wall_s,
        total_tokens_per_s=None if num_prompt is None else (num_prompt + num_output) / wall_s,
        ttft_s=Percentiles.of([each.arrivals_s[0] - each.started_s for each in served if each.arrivals_s]),
        inter_token_s=Percentiles.of(gaps),
        wall_s=wall_s,
        load_s=load_s,
        num_requests=len(served),
        num_short=sum(each.num_output < most for each, most in zip(served, wanted, strict=True)),
        concurrency=concurrency,
        prompt_tokens=num_prompt,
        output_tokens=num_output,
    )


def with_ranks(report: Report, ranks: Sequence[RankStats]) -> Report:
    """Add what the ranks counted during the wall time."""
    first = ranks[0]
    steps_s = first.compute_s + first.wait_s + first.send_s + first.bookkeeping_s
    return replace(
        report,
        stages=[_stage_report(rank, len(ranks), report.wall_s) for rank in ranks],
        peak_memory_bytes=sum(rank.peak_memory_bytes for rank in ranks),
        cpu_s=sum(rank.cpu_s for rank in ranks),
        bookkeeping_share=first.bookkeeping_s / steps_s if steps_s else None,
    )


def _stage_report(rank: RankStats, num_ranks: int, wall_s: float) -> StageReport:
    hop = Hop(
        from_stage=(rank.rank - 1) % num_ranks,
        bytes_received=rank.bytes_received,
        wait_and_receive_s=rank.wait_s,
        mean_wait_and_receive_s=rank.wait_s / rank.num_receives if rank.num_receives else None,
    )
    return StageReport(
        stage=rank.rank,
        busy_share=rank.compute_s / wall_s,
        compute_s=rank.compute_s,
        send_s=rank.send_s,
        num_batches=rank.num_batches,
        num_tokens=rank.num_tokens,
        hop=hop if num_ranks > 1 else None,
        cpu_s=rank.cpu_s,
        peak_memory_bytes=rank.peak_memory_bytes,
    )


def _stage_table(stages: Sequence[StageReport]) -> Table:
    table = Table(title="stages")
    headings = "stage|busy|compute s|batches|tokens|received kB|wait and receive, ms/batch|CPU s|peak MB"
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    for stage in stages:
        hop = stage.hop
        table.add_row(
            str(stage.stage),
            f"{stage.busy_share:.0%}",
            f"{stage.compute_s:.2f}",
            f"{stage.num_batches:,}",
            f"{stage.num_tokens:,}",
            _or_dash(_scaled(hop and hop.bytes_received, 1e3), "{:,.1f}"),
            _or_dash(_scaled(hop and hop.mean_wait_and_receive_s, 1e-3), "{:.2f}"),
            f"{stage.cpu_s:.2f}",
            f"{stage.peak_memory_bytes / 1e6:,.0f}",
        )
    return table


def _scaled(value: Any, unit: float) -> float | None:
    return None if value is None else value / unit


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _pair(values: Percentiles) -> str:
    if values.p50 is None or values.p95 is None:
        return "-"
    return f"{values.p50 * 1e3:,.1f} / {values.p95 * 1e3:,.1f} ms"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
