"""Linear layers on CPUs: weights laid out once for fast matrix kernels, instead of once per call.

The kernels are our own where they are faster (``native_linear.py``), else oneDNN's. Measured on a 2-core AMD EPYC
(AVX-512) with torch 2.13, the linear layers of half of SmolLM2-135M in float32 on one thread take 7.2, 9.8, 20 and
112 ms for 1, 8, 32 and 256 rows packed for oneDNN, and 12.7, 22, 45 and 260 ms through
``torch.nn.functional.linear``. Results differ by rounding only; float32 stays float32.

oneDNN's operators are the ones torch's own compiler emits for CPUs (``torch/_inductor/fx_passes/mkldnn_fusion.py``);
they are not public, so :func:`find_kernels` tries all kernels first and everything works without them.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from ts_pippy_handler import native_linear
from ts_pippy_handler.native_linear import HugePages

_PART_BYTES = 16 << 20

logger = logging.getLogger(__name__)

_ROWS_HINT = 8  # the packed layout suits all batch sizes from 1 to 256 equally, unless it is made for a single row


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How linear layers are packed and computed."""

    pack: Callable[[torch.Tensor, HugePages | None], torch.Tensor]
    """Lays out a weight [out, in], or consecutive rows of it, in the memory given if it needs ``num_values`` there."""
    num_values: Callable[[int, int], int]
    """Numbers of huge pages that a weight of so many outputs and inputs takes."""
    linear: Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[int], torch.Tensor | None], torch.Tensor]
    """Multiplies rows [..., in] with the packed parts of a weight, of so many outputs each, and adds the bias."""


def _pack_for_onednn(weight: torch.Tensor, _memory: HugePages | None = None) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _onednn_linear(
    rows: torch.Tensor, parts: Sequence[torch.Tensor], _num_outputs: Sequence[int], bias: torch.Tensor | None
) -> torch.Tensor:
    operator = torch.ops.mkldnn._linear_pointwise
    # The bias fits no single part, so it is added to the whole where there are several.
    own_bias = bias if len(parts) == 1 else None
    products: list[torch.Tensor] = [operator(rows, part, own_bias, "none", [], "") for part in parts]
    whole = products[0] if len(products) == 1 else torch.cat(products, -1)
    return whole if bias is None or own_bias is not None else whole + bias


NATIVE = Kernels(
    pack=native_linear.pack,
    num_values=lambda num_outputs, num_inputs: math.prod(native_linear.packed_shape(num_outputs, num_inputs)),
    linear=native_linear.linear,
)
ONEDNN = Kernels(pack=_pack_for_onednn, num_values=lambda *_: 0, linear=_onednn_linear)  # its memory is its own


def find_kernels(dtype: torch.dtype, device_type: str, *, native: bool = True) -> Kernels | None:
    """Return the kernels that linear layers use here; None where packing gains nothing or does not work.

    Args:
        dtype: Of weights and rows.
        device_type: Where they lie, as ``torch.device.type``.
        native: Whether kernels compiled here may be used.
    """
    if device_type != "cpu" or dtype is not torch.float32:
        return None
    if native and native_linear.find_multiply() is not None and _works(NATIVE):
        return NATIVE
    if torch.backends.mkldnn.is_available() and _works(ONEDNN):
        return ONEDNN
    return None


@cache
def _works(kernels: Kernels) -> bool:
    """Whether kernels compute what torch computes."""
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(size, generator=generator) for size in ((24, 40), (3, 40)))
    try:
        product = kernels.linear(rows, [kernels.pack(weight, None)], [24], None)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.warning("linear layers stay unpacked and slower: %s", error)
        return False
    return torch.allclose(product, rows @ weight.T, rtol=1e-5, atol=1e-5)


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

    kernels: Kernels
    attributes: tuple[str, ...]
    num_rows: int
    rows_per_part: int
    num_columns: int
    is_only_packed: bool
    """Whether nothing reads the plain parameter; a tied embedding still does."""

    @property
    def values_per_part(self) -> int:
        """Numbers in the largest part."""
        return self.rows_per_part * self.num_columns

    def parts(self) -> list[tuple[slice, str]]:
        """Return the rows of each part and the attribute that holds them packed."""
        starts = range(0, self.num_rows, self.rows_per_part)
        rows = [slice(start, min(start + self.rows_per_part, self.num_rows)) for start in starts]
        return list(zip(rows, self.attributes, strict=True))


def reserve(packed: Iterable[PackedWeight]) -> HugePages:
    """Return memory for the parts of all these weights."""
    num_values = sum(
        weight.kernels.num_values(rows.stop - rows.start, weight.num_columns)
        for weight in packed
        for rows, _ in weight.parts()
    )
    return HugePages(num_values)


def use_packed_linears(
    module: fx.GraphModule, dtype: torch.dtype, device: torch.device, *, native: bool = True
) -> dict[str, PackedWeight]:
    """Let the linear layers of a stage read packed weights, where that works.

    Large weights are packed in parts, because a part exists twice while it is packed.

    Args:
        module: The stage, which is changed.
        dtype: Of its weights.
        device: Where it will run.
        native: Whether kernels compiled here may be used.

    Returns:
        What must be packed, by name of the parameter it is made from.
    """
    kernels = find_kernels(dtype, device.type, native=native)
    if kernels is None:
        return {}
    parameters = dict(module.named_parameters())
    packed: dict[str, PackedWeight] = {}
    for source in [node for node in module.graph.nodes if node.op == "get_attr" and node.target in parameters]:
        linears = [user for user in source.users if _is_linear_with_weight(user, source)]
        if not linears:
            continue
        weight = parameters[source.target]
        rows = _rows_per_part(weight)
        names = tuple(f"{source.target}_packed_{part}" for part in range(-(-len(weight) // rows)))
        packing = packed[source.target] = PackedWeight(
            kernels=kernels,
            attributes=names,
            num_rows=len(weight),
            rows_per_part=rows,
            num_columns=weight.shape[1],
            is_only_packed=len(linears) == len(source.users),
        )
        for linear in linears:
            _replace(module.graph, linear, packing)
        if packing.is_only_packed:
            module.graph.erase_node(source)
    return packed


def _rows_per_part(weight: torch.Tensor) -> int:
    rows = min(len(weight), max(1, _PART_BYTES * len(weight) // weight.nbytes))
    whole_panels = rows - rows % native_linear.PANEL
    return rows if rows == len(weight) else whole_panels or rows


def _is_linear_with_weight(node: fx.Node, weight: fx.Node) -> bool:
    return node.target is torch.ops.aten.linear.default and node.args[1] is weight and node.args[0] is not weight


def is_packed_linear(node: fx.Node) -> bool:
    """Whether a node of a stage's graph is a linear layer that reads a packed weight.

    Its arguments are those of :attr:`Kernels.linear`.
    """
    return node.target in (NATIVE.linear, ONEDNN.linear)


def _replace(graph: fx.Graph, linear: fx.Node, packing: PackedWeight) -> None:
    bias = linear.args[2] if len(linear.args) > 2 else None
    sizes = tuple(rows.stop - rows.start for rows, _ in packing.parts())
    with graph.inserting_before(linear):
        parts = tuple(graph.create_node("get_attr", name) for name in packing.attributes)
        product = graph.call_function(packing.kernels.linear, (linear.args[0], parts, sizes, bias))
    linear.replace_all_uses_with(product)
    graph.erase_node(linear)
