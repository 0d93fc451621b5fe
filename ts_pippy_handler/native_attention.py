"""Attention of decode rows on CPUs, compiled from ``decode_attention.c`` for the layers of a stage while it loads.

torch's fused kernel is called once for each request and layer. Measured on a 2-core AMD EPYC (AVX2), one thread, rows
of 290 cached tokens, it takes 86 µs for SmolLM2's 9 heads of 64 over 3 key/value heads; this takes 35, for all rows of
a batch in one call and without gathering what lies in pieces. With 1, 2 and 3 heads in a group this was 1.4 to 2.4
times as fast, with 4 and more it was not faster, so those stay with torch.

Needs the C compiler of the machine (``CC``, else ``cc``), takes well under a second, and keeps nothing on disk; without
one everything works with torch's kernels. No torch extension, because compiling against torch's headers takes a minute.
Knows nothing of batches: what to attend to comes as :class:`DecodeRows`.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from ts_pippy_handler import process
from ts_pippy_handler.errors import one_line

logger = logging.getLogger(__name__)

_MAX_GROUP = 3
_COMPILE_TIMEOUT_S = 60.0
# Fast mathematics lets sums be vectorised. What it assumes besides, that there is no NaN or infinity, only the search
# for the largest score makes use of; both still reach the result.
_OPTIONS = "-std=gnu11 -O3 -march=native -ffast-math -fPIC"


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
    if device.type != "cpu" or dtype is not torch.float32 or group > _MAX_GROUP or sys.platform != "linux":
        return None
    attend = _compiled(key_dim, value_dim, group)
    return None if attend is None else NativeAttention(attend, torch.get_num_threads())


@cache
def _compiled(key_dim: int, value_dim: int, group: int) -> Callable[..., int] | None:
    try:
        return _compile(key_dim, value_dim, group)
    except (OSError, ValueError, AttributeError) as error:  # no program, no command line, nothing of ours in the result
        logger.warning("attention uses torch's slower kernels, since ours cannot be compiled: %s", one_line(error))
        return None


def _compile(key_dim: int, value_dim: int, group: int) -> Callable[..., int] | None:
    compiler = process.c_compiler()
    if shutil.which(compiler[0]) is None:
        logger.info("no C compiler (%s) here: attention uses torch's kernels, which decode more slowly", compiler[0])
        return None
    shape = [f"-DKEY_DIM={key_dim}", f"-DVALUE_DIM={value_dim}", f"-DGROUP={group}"]
    with (
        resources.as_file(resources.files("ts_pippy_handler") / "decode_attention.c") as source,
        tempfile.TemporaryDirectory(prefix="ts_pippy_") as folder,
    ):
        compiled, linked = Path(folder) / "attention.o", Path(folder) / "attention.so"
        _run([*compiler, *_OPTIONS.split(), "-fopenmp", *shape, "-c", str(source), "-o", str(compiled)])
        # Without -fopenmp: the threads are those of the OpenMP library that torch has brought along.
        _run([*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
        attend = ctypes.CDLL(str(linked)).attend
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    attend.argtypes = [
        *(pointer, integer, integer, pointer, pointer, integer, integer),
        *(pointer, pointer, integer, pointer, integer, ctypes.c_float, ctypes.c_int, pointer),
    ]
    return attend


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end within {_COMPILE_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise OSError(f"{command[0]} failed: {done.stderr or done.stdout}")
