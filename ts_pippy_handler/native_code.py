"""Compile C source of this package with the compiler of the machine, while a rank loads.

Takes well under a second and keeps nothing on disk. No torch extension, because compiling against torch's headers takes
a minute. Knows nothing of what the source computes.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from ts_pippy_handler import process
from ts_pippy_handler.errors import one_line

logger = logging.getLogger(__name__)

_COMPILE_TIMEOUT_S = 60.0
# Fast mathematics lets sums be vectorised. What it assumes besides, that there is no NaN or infinity, only the search
# for the largest score of a row of attention makes use of; both still reach every result.
_OPTIONS = "-std=gnu11 -O3 -march=native -ffast-math -fPIC"


def compile_function(
    source: str, function: str, defines: Mapping[str, int], *, purpose: str
) -> ctypes._NamedFuncPointer | None:
    """Return a function of a C file of this package, compiled; None, with the reason logged, where that fails.

    Args:
        source: Name of the file.
        function: Name of the function.
        defines: Macros.
        purpose: What it computes, for the log.
    """
    if sys.platform != "linux":
        return None
    try:
        return _compile(source, function, defines, purpose)
    except (OSError, ValueError, AttributeError) as error:  # no program, no command line, nothing of ours in the result
        logger.warning("torch's slower kernels compute %s, since ours cannot be compiled: %s", purpose, one_line(error))
        return None


def _compile(source: str, function: str, defines: Mapping[str, int], purpose: str) -> ctypes._NamedFuncPointer | None:
    compiler = process.c_compiler()
    if shutil.which(compiler[0]) is None:
        logger.info("no C compiler (%s) here: torch's slower kernels compute %s", compiler[0], purpose)
        return None
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    with (
        resources.as_file(resources.files("ts_pippy_handler") / source) as file,
        tempfile.TemporaryDirectory(prefix="ts_pippy_") as folder,
    ):
        compiled, linked = Path(folder) / "compiled.o", Path(folder) / "compiled.so"
        _run([*compiler, *_OPTIONS.split(), "-fopenmp", *macros, "-c", str(file), "-o", str(compiled)])
        # Without -fopenmp: the threads are those of the OpenMP library that torch has brought along.
        _run([*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"])
        found: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(str(linked)), function)
    return found


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
