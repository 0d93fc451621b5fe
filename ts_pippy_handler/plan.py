"""Show a split before anything is loaded: layers, parameters, bytes and cache of every stage.

Traces the model on the meta device; reads config.json and no weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ts_pippy_handler import device_memory, explain, fit, loading
from ts_pippy_handler.config import ServingConfig

_WIDTH = 120
_BAR_WIDTH = 20


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a plan."""

    stage: int
    first_layer: int
    num_layers: int
    num_parameters: int
    weight_bytes: int
    read_bytes_per_token: int
    """Bytes of weights read to compute one token of an answer, of experts those it is sent to."""
    time_share: float
    """Part of the time of all stages, as predicted (``step_time.py``)."""
    kv_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model would be split."""

    model_type: str
    dtype: str
    split: str | list[int]
    stages: list[StagePlan]
    reason: str
    """Why the model is cut there, in a few sentences."""

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return asdict(self)

    def as_table(self) -> str:
        """Return the plan as a table with bars of the time each stage takes, and the reason under it."""
        kind = self.split if isinstance(self.split, str) else "given"
        table = Table(title=f"{self.model_type}, {self.dtype}, {len(self.stages)} stages, split: {kind}")
        for column in (
            "stage",
            "layers",
            "parameters",
            "weights MB",
            "read MB/token",
            "KV bytes/token",
            "share of time",
        ):
            table.add_column(column, justify="left" if column.startswith("share") else "right")
        slowest = max(stage.time_share for stage in self.stages)
        for stage in self.stages:
            last = stage.first_layer + stage.num_layers - 1
            table.add_row(
                str(stage.stage),
                f"{stage.first_layer}-{last}",
                f"{stage.num_parameters:,}",
                f"{stage.weight_bytes / 1e6:.1f}",
                f"{stage.read_bytes_per_token / 1e6:.1f}",
                f"{stage.kv_bytes_per_token:,}",
                f"{stage.time_share:6.1%} " + "█" * max(1, round(_BAR_WIDTH * stage.time_share / slowest)),
            )
        console = Console(width=_WIDTH, no_color=True)
        with console.capture() as captured:
            console.print(table)
            console.print(self.reason, highlight=False, markup=False)
        return captured.get().rstrip()


def make_plan(config: ServingConfig, num_stages: int) -> Plan:
    """Trace the model and cut it.

    Raises:
        LoadError: If the model or the number of stages is not possible.
    """
    traced = loading.trace_checkpoint(config)
    memory = device_memory.on_this_machine(config.pippy, num_stages)
    decision = fit.decide(traced.costs, config.pippy, num_stages, memory)
    layers = fit.ranges(decision.sizes)
    units = [traced.costs.cost(range(*each)) for each in layers]
    total = sum(unit.time_cost for unit in units)
    stages: list[StagePlan] = []
    for index, ((first, end), cost) in enumerate(zip(layers, units, strict=True)):
        stages.append(
            StagePlan(
                stage=index,
                first_layer=first,
                num_layers=end - first,
                num_parameters=cost.num_parameters,
                weight_bytes=cost.weight_bytes,
                read_bytes_per_token=cost.read_bytes,
                time_share=cost.time_cost / total,
                kv_bytes_per_token=cost.kv_bytes_per_token,
            )
        )
    return Plan(
        model_type=str(traced.config.model_type),
        dtype=str(traced.dtype).removeprefix("torch."),
        split=config.pippy.split,
        stages=stages,
        reason=explain.explain(traced.costs, config.pippy, memory, decision),
    )
