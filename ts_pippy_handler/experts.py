"""Mixtures of experts: one matrix product for each expert over the rows that were routed to it.

transformers computes experts as a grouped matrix product; the operator it leaves in a traced graph is its own. This one
takes its place, so that a stage runs without transformers. Knows nothing of routing.

Source: transformers 5 ``integrations/moe.py``; ``torch.nn.functional.grouped_mm``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ts_pippy_handler.liveness import bytes_per_row, viewed

_THEIRS = "transformers.grouped_mm_fallback.default"


@torch.library.custom_op("ts_pippy::grouped_mm", mutates_args=())
def grouped_mm(rows_SI: torch.Tensor, weights_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply rows, sorted by expert, with the matrix of their expert.

    Args:
        rows_SI: Rows [S, I], in the dtype of the weights.
        weights_EIO: A matrix [I, O] for each of E experts.
        ends_E: Index behind the last row of each expert, int32 or int64.

    Returns:
        Tensor [S, O]; rows behind the last end are zero.
    """
    output_SO = rows_SI.new_zeros(rows_SI.shape[0], weights_EIO.shape[2])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(rows_SI[start:end], weights_EIO[expert], out=output_SO[start:end])
        start = end
    return output_SO


@grouped_mm.register_fake
def _shape(rows_SI: torch.Tensor, weights_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return rows_SI.new_empty(rows_SI.shape[0], weights_EIO.shape[2])


def use_own_operator(graph: fx.GraphModule) -> None:
    """Replace transformers' operator in a traced graph."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target) == _THEIRS:
            rows, weights, *ends = node.args
            node.target = torch.ops.ts_pippy.grouped_mm.default
            node.args, node.kwargs = (rows, weights, *ends, *node.kwargs.values()), {}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How the rows of a batch choose among the experts of one operator."""

    parameter: str
    """That holds a matrix for each of them."""
    num_experts: int
    row_share: float
    """Part of the experts that a row is sent to."""


def choice(node: fx.Node) -> Choice | None:
    """Return how a node of a traced graph chooses experts; None for all other nodes."""
    if node.target is not torch.ops.ts_pippy.grouped_mm.default:
        return None
    rows, weights = node.args[:2]
    assert isinstance(rows, fx.Node)
    assert isinstance(weights, fx.Node)
    num_experts, width, _ = weights.meta["val"].shape
    value = rows.meta["val"]
    while (source := viewed(weights)) is not None:
        weights = source
    copies_of_row = bytes_per_row(value) / (width * value.element_size())
    return Choice(
        parameter=str(weights.target), num_experts=num_experts, row_share=min(copies_of_row / num_experts, 1.0)
    )
