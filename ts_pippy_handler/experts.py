"""Mixtures of experts: one matrix product for each expert over the rows that were routed to it.

transformers computes experts as a grouped matrix product; the operator it leaves in a traced graph is its own. This one
takes its place, so that a stage runs without transformers. Knows nothing of routing.

Source: transformers 5 ``integrations/moe.py``; ``torch.nn.functional.grouped_mm``.
"""

from __future__ import annotations

import torch
from torch import fx

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
