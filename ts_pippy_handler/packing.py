"""Linear layers on CPUs: weights laid out once for oneDNN's matrix kernels, instead of once per call.

Measured on a 2-core AMD EPYC (AVX-512) with torch 2.13, the linear layers of half of SmolLM2-135M in float32 on one
thread take 7.2, 9.8, 20 and 112 ms for 1, 8, 32 and 256 rows packed, and 12.7, 22, 45 and 260 ms through
``torch.nn.functional.linear``. Results differ by rounding only; float32 stays float32.

The operators are the ones torch's own compiler emits for CPUs (``torch/_inductor/fx_passes/mkldnn_fusion.py``); they
are not public, so :func:`can_pack` tries them first and everything works without them.
"""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

_PART_BYTES = 16 << 20

logger = logging.getLogger(__name__)

_ROWS_HINT = 8  # the packed layout suits all batch sizes from 1 to 256 equally, unless it is made for a single row


@cache
def can_pack(dtype: torch.dtype, device_type: str) -> bool:
    """Whether packed linear layers work here: a CPU, a dtype oneDNN computes natively, and right results."""
    if device_type != "cpu" or dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(size, generator=generator) for size in ((24, 40), (3, 40)))
    try:
        packed = linear(rows, pack(weight))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.warning("linear layers stay unpacked and slower: %s", error)
        return False
    return torch.allclose(packed, rows @ weight.T, rtol=1e-5, atol=1e-5)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's weight [out, in] in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def linear(rows: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's outputs [T, out] of rows [T, in], from its packed weight."""
    outputs: torch.Tensor = _linear_op()(rows, packed, None, "none", [], "")
    return outputs


class Scratch:
    """Plain memory through which one weight after the other passes on its way to its packed form.

    Outside the heap: buffers of their own would leave gaps between the packed weights, up to 45 % more resident memory
    was measured. What a smaller weight does not need goes back to the system, so the largest should come first.

    Args:
        num_values: Numbers in the largest.
        dtype: Of the numbers.
    """

    def __init__(self, num_values: int, dtype: torch.dtype) -> None:
        self._memory = mmap.mmap(-1, max(num_values, 1) * dtype.itemsize)
        self._values = torch.frombuffer(self._memory, dtype=dtype)

    def take(self, num_values: int) -> torch.Tensor:
        """Return the first ``num_values`` numbers, whatever is in them, instead of those handed out before."""
        values = self._values[:num_values]
        end = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end < len(self._memory) and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, end)
        return values


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """How one parameter [out, in] is packed: in parts of consecutive rows, each an attribute of the stage."""

    attributes: tuple[str, ...]
    rows_per_part: int
    num_columns: int
    is_only_packed: bool
    """Whether nothing reads the plain parameter; a tied embedding still does."""

    @property
    def values_per_part(self) -> int:
        """Numbers in the largest part."""
        return self.rows_per_part * self.num_columns

    def parts(self, num_rows: int) -> list[tuple[slice, str]]:
        """Return the rows of each part and the attribute that holds them packed."""
        starts = range(0, num_rows, self.rows_per_part)
        rows = [slice(start, min(start + self.rows_per_part, num_rows)) for start in starts]
        return list(zip(rows, self.attributes, strict=True))


def use_packed_linears(module: fx.GraphModule, dtype: torch.dtype, device: torch.device) -> dict[str, PackedWeight]:
    """Let the linear layers of a stage read packed weights, where that works.

    Large weights are packed in parts, because a part exists twice while it is packed.

    Returns:
        What must be packed, by name of the parameter it is made from.
    """
    if not can_pack(dtype, device.type):
        return {}
    parameters = dict(module.named_parameters())
    packed: dict[str, PackedWeight] = {}
    for source in [node for node in module.graph.nodes if node.op == "get_attr" and node.target in parameters]:
        linears = [user for user in source.users if _is_linear_with_weight(user, source)]
        if not linears:
            continue
        weight = parameters[source.target]
        rows = min(weight.shape[0], max(1, _PART_BYTES * weight.shape[0] // weight.nbytes))
        names = tuple(f"{source.target}_packed_{part}" for part in range(-(-weight.shape[0] // rows)))
        packed[source.target] = PackedWeight(
            attributes=names,
            rows_per_part=rows,
            num_columns=weight.shape[1],
            is_only_packed=len(linears) == len(source.users),
        )
        for linear in linears:
            _replace(module, linear, names)
        if packed[source.target].is_only_packed:
            module.graph.erase_node(source)
    return packed


def _is_linear_with_weight(node: fx.Node, weight: fx.Node) -> bool:
    return node.target is torch.ops.aten.linear.default and node.args[1] is weight and node.args[0] is not weight


def is_packed_linear(node: fx.Node) -> bool:
    """Whether a node of a stage's graph is a linear layer, or a part of one, that reads a packed weight."""
    return node.op == "call_function" and str(node.target) == "mkldnn._linear_pointwise.default"


def _replace(module: fx.GraphModule, linear: fx.Node, names: tuple[str, ...]) -> None:
    """Compute a linear layer part by part and join the outputs."""
    graph = module.graph
    bias = linear.args[2] if len(linear.args) > 2 else None
    with graph.inserting_before(linear):
        # The bias fits no single part, so it is added to the whole where there are several.
        own_bias = bias if len(names) == 1 else None
        parts = [
            graph.call_function(
                _linear_op(), (linear.args[0], graph.create_node("get_attr", name), own_bias, "none", [], "")
            )
            for name in names
        ]
        whole = parts[0] if len(parts) == 1 else graph.call_function(torch.ops.aten.cat.default, (parts, -1))
        if bias is not None and own_bias is None:
            whole = graph.call_function(torch.ops.aten.add.Tensor, (whole, bias))
    linear.replace_all_uses_with(whole)
    graph.erase_node(linear)


def _linear_op() -> torch._ops.OpOverload:
    operator: torch._ops.OpOverload = torch.ops.mkldnn._linear_pointwise.default
    return operator
