"""Linear layers on CPUs with AVX2 and no AVX-512, in float32, compiled from ``linear.c`` while a stage loads.

oneDNN's kernels, which torch and vLLM use, leave much of such a processor idle at the few rows of a decode batch.
Measured on a 2-core AMD EPYC (AVX2), one thread, the linear layers of half of SmolLM2-135M in milliseconds:

====  =====  ======  ====
rows  torch  oneDNN  this
====  =====  ======  ====
1     16.5   17.8    12.7
4     28.1   22.0    16.2
8     33.9   27.5    23.7
16    41.5   38.2    27.0
32    62.3   59.1    46.3
128   172.7  186.3   155.6
512   675.3  723.8   612.4
====  =====  ======  ====

A row's result does not depend on the other rows, to the bit. With AVX-512, oneDNN is faster than this; other
processors have not been measured.

Knows nothing of graphs: ``packing.py`` decides which layers are computed so.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ts_pippy_handler.native_code import compile_function

PANEL = 16
"""Outputs that lie together in a packed weight."""


@cache
def find_multiply() -> Callable[..., None] | None:
    """Return the compiled function; None where torch's kernels serve."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    multiply = compile_function("linear.c", "multiply", {}, purpose="linear layers")
    if multiply is None:
        return None
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    multiply.argtypes = [pointer, integer, integer, pointer, integer, pointer, ctypes.c_int, pointer, integer]
    multiply.restype = None
    return multiply


class HugePages:
    """Memory for packed weights in pages of 2 MiB, where the system has such: a fifth less time for 8 rows.

    Args:
        num_values: Numbers, in float32, of all that will be taken.
    """

    def __init__(self, num_values: int) -> None:
        self._memory = mmap.mmap(-1, max(num_values, 1) * torch.float32.itemsize)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._values = torch.frombuffer(self._memory, dtype=torch.float32)
        self._num_taken = 0

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of zeros that keeps this memory alive."""
        start, self._num_taken = self._num_taken, self._num_taken + math.prod(shape)
        return self._values[start : self._num_taken].view(shape)


def packed_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight."""
    return -(-num_outputs // PANEL), num_inputs, PANEL


def pack(weight: torch.Tensor, memory: HugePages | None = None) -> torch.Tensor:
    """Return a weight [out, in] in panels: [out / 16, in, 16], with zeros for the outputs that the last one lacks.

    Args:
        weight: float32.
        memory: Where the result lies; by default in memory of its own.
    """
    shape = packed_shape(*weight.shape)
    packed = weight.new_zeros(shape) if memory is None else memory.take(shape)
    whole = len(weight) // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, weight.shape[1]).transpose(1, 2)
    if whole < len(packed):
        rest = weight[whole * PANEL :]
        packed[whole, :, : len(rest)] = rest.T
    return packed


def linear(
    rows: torch.Tensor, parts: Sequence[torch.Tensor], num_outputs: Sequence[int], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return rows times a packed weight.

    Runs with as many threads as torch has in this process.

    Args:
        rows: [..., in], float32 on the CPU.
        parts: The weight, in parts of consecutive outputs, each as :func:`pack` returns it.
        num_outputs: Of each part.
        bias: [out], if the layer has one.

    Returns:
        [..., out].
    """
    multiply = find_multiply()
    assert multiply is not None, "the weight was packed for it"
    rows = rows.contiguous()
    num_inputs = rows.shape[-1]
    num_rows = rows.numel() // num_inputs
    width = sum(num_outputs)
    out = rows.new_empty(*rows.shape[:-1], width)
    address, bias_address, threads = out.data_ptr(), None if bias is None else bias.data_ptr(), torch.get_num_threads()
    for part, count in zip(parts, num_outputs, strict=True):
        multiply(rows.data_ptr(), num_rows, num_inputs, part.data_ptr(), count, bias_address, threads, address, width)
        address += count * out.itemsize
        if bias_address is not None:
            bias_address += count * out.itemsize
    return out
