"""The product of rows with the matrix of their expert."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ts_pippy_handler.experts import grouped_mm, use_own_operator


@pytest.mark.parametrize("ends", [[2, 2, 7], [0, 7, 7], [7, 7, 7], [1, 3, 5]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_row_meets_its_own_expert(ends: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(size, generator=generator) for size in ((7, 4), (3, 4, 5)))
    product = grouped_mm(rows, weights, torch.tensor(ends, dtype=dtype))
    for row in range(7):
        expert = next((index for index, end in enumerate(ends) if row < end), None)
        expected = torch.zeros(5) if expert is None else rows[row] @ weights[expert]
        torch.testing.assert_close(product[row], expected)


def test_weights_that_lie_transposed() -> None:
    rows, weights = torch.randn(3, 4), torch.randn(2, 5, 4)
    product = grouped_mm(rows, weights.transpose(1, 2), torch.tensor([1, 3]))
    torch.testing.assert_close(product[2], weights[1] @ rows[2])


def test_it_takes_the_place_of_transformers_operator() -> None:
    import transformers.integrations.moe  # noqa: F401 - defines the operator

    graph = fx.Graph()
    rows, weights, ends = (graph.placeholder(name) for name in ("rows", "weights", "ends"))
    theirs = torch.ops.transformers.grouped_mm_fallback.default
    graph.output(graph.call_function(theirs, (rows, weights), {"offs": ends}))
    module = fx.GraphModule(torch.nn.Module(), graph)
    use_own_operator(module)
    module.recompile()
    values = torch.randn(3, 4), torch.randn(2, 4, 5), torch.tensor([1, 3], dtype=torch.int32)
    torch.testing.assert_close(module(*values), grouped_mm(*values))
    assert "transformers" not in module.code
