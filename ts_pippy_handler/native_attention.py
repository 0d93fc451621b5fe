"""Attention of decode rows on CPUs, compiled from ``decode_attention.c`` for the layers of a stage while it loads.

torch's fused kernel is called once for each request and layer. Measured on a 2-core AMD EPYC (AVX2), one thread, rows
of 290 cached tokens, it takes 86 µs for SmolLM2's 9 heads of 64 over 3 key/value heads; this takes 35, for all rows of
a batch in one call and without gathering what lies in pieces. With 1, 2 and 3 heads in a group this was 1.4 to 2.4
times as fast, with 4 and more it was not faster, so those stay with torch.

Needs the C compiler of the machine (``CC``, else ``cc``); without one everything works with torch's kernels.
Knows nothing of batches: what to attend to comes as :class:`DecodeRows`.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ts_pippy_handler.native_code import compile_function

_MAX_GROUP = 3


class DecodeRows:
    """Which rows of a batch are decode rows, and which slots of the cache each attends to.

    Args:
        rows: Numbers of the rows.
        slots: Of each row, where the tokens of its context lie; int64, at least one.
    """

    def __init__(self, rows: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        lengths = [len(own) for own in slots]
        self.rows = torch.tensor(rows, dtype=torch.long)
        self.offsets = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.long)
        self.slots = torch.cat(list(slots)) if slots else torch.empty(0, dtype=torch.long)
        self.longest = max(lengths, default=0)


class NativeAttention:
    """The compiled function for one shape of attention layers."""

    def __init__(self, attend: Callable[..., int], num_threads: int) -> None:
        self._attend = attend
        self._num_threads = num_threads

    def attend(
        self,
        query_HTD: torch.Tensor,
        key_GSD: torch.Tensor,
        value_GSD: torch.Tensor,
        decode: DecodeRows,
        scale: float,
        out_THD: torch.Tensor,
    ) -> None:
        """Write what the decode rows attend to into their rows of ``out_THD``.

        All tensors are float32 on the CPU; all but the query are contiguous.

        Raises:
            MemoryError: If there is no memory for the scores.
        """
        if query_HTD.stride(2) != 1:
            query_HTD = query_HTD.contiguous()
        failed = self._attend(
            query_HTD.data_ptr(),
            query_HTD.stride(0),
            query_HTD.stride(1),
            key_GSD.data_ptr(),
            value_GSD.data_ptr(),
            key_GSD.shape[0],
            key_GSD.shape[1],
            decode.rows.data_ptr(),
            decode.offsets.data_ptr(),
            len(decode.rows),
            decode.slots.data_ptr(),
            decode.longest,
            scale,
            self._num_threads,
            out_THD.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention scores of {decode.longest} tokens")


def find_native_attention(
    *, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> NativeAttention | None:
    """Return the compiled function for layers of this shape; None where torch's kernels serve.

    It runs with as many threads as torch has in this process now.
    """
    group = num_heads // num_kv_heads
    if device.type != "cpu" or dtype is not torch.float32 or group > _MAX_GROUP:
        return None
    attend = _compiled(key_dim, value_dim, group)
    return None if attend is None else NativeAttention(attend, torch.get_num_threads())


@cache
def _compiled(key_dim: int, value_dim: int, group: int) -> Callable[..., int] | None:
    shape = {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "GROUP": group}
    attend = compile_function("decode_attention.c", "attend", shape, purpose="attention")
    if attend is None:
        return None
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    attend.argtypes = [
        *(pointer, integer, integer, pointer, pointer, integer, integer),
        *(pointer, pointer, integer, pointer, integer, ctypes.c_float, ctypes.c_int, pointer),
    ]
    return attend
