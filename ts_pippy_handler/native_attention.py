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
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
        runs: Of each row, first slot and number of slots of every piece of its context; at least one slot.
    """

    def __init__(self, rows: Sequence[int], runs: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.long)
        offsets = [0]
        for own in runs:
            offsets.append(offsets[-1] + len(own))
        self.offsets = torch.tensor(offsets, dtype=torch.long)
        self.runs = torch.tensor([run for own in runs for run in own], dtype=torch.long)
        self.longest = max((sum(count for _, count in own) for own in runs), default=0)


class NativeAttention:
    """The compiled function for one shape of attention layers."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        self._attend = library.attend
        self._attend.argtypes = [
            *(pointer, integer, integer, pointer, pointer, integer, integer),
            *(pointer, pointer, integer, pointer, integer, ctypes.c_float, ctypes.c_int, pointer),
        ]
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
            decode.runs.data_ptr(),
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
    library = _compiled(key_dim, value_dim, group)
    return None if library is None else NativeAttention(library, torch.get_num_threads())


@cache
def _compiled(key_dim: int, value_dim: int, group: int) -> ctypes.CDLL | None:
    compiler = process.c_compiler()
    if shutil.which(compiler[0]) is None:
        logger.info("no C compiler (%s) here: attention uses torch's kernels, which decode more slowly", compiler[0])
        return None
    shape = [f"-DKEY_DIM={key_dim}", f"-DVALUE_DIM={value_dim}", f"-DGROUP={group}"]
    try:
        with (
            resources.as_file(resources.files("ts_pippy_handler") / "decode_attention.c") as source,
            tempfile.TemporaryDirectory(prefix="ts_pippy_") as folder,
        ):
            compiled, linked = Path(folder) / "attention.o", Path(folder) / "attention.so"
            _run([*compiler, *_OPTIONS.split(), "-fopenmp", *shape, "-c", str(source), "-o", str(compiled)])
            # Without -fopenmp: the threads are those of the OpenMP library that torch has brought along.
            _run([*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
            return ctypes.CDLL(str(linked))
    except OSError as error:
        logger.warning("attention uses torch's slower kernels, since ours cannot be compiled: %s", one_line(error))
        return None


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end within {_COMPILE_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise OSError(f"{command[0]} failed: {done.stderr or done.stdout}")
