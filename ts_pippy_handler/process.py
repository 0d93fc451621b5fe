"""A rank's process: how it ends, and how it keeps its memory. Knows no torch and no other ranks.

Processes die with their parent, whoever kills it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from platformdirs import user_cache_path

PARENT_PID = "TS_PIPPY_PARENT_PID"
"""Environment variable that tells a started rank who started it."""

_PARENT_POLL_S = 0.1
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # of glibc's malloc.h
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_has_failed = threading.Event()


def die_with_parent() -> None:
    """End this process when its parent is gone, within a second. Starts a daemon thread."""
    parent = int(os.environ.get(PARENT_PID, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends; to be called between fork and exec."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_interrupts_to_parent() -> None:
    """Ignore Ctrl-C, which a terminal sends to the children too; the parent ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_process(status: int) -> NoReturn:
    """End this process now, without tearing Python and torch down.

    Teardown was measured to take more than a second, during which the process holds its output pipes; TorchServe takes
    their closing for the failure of the worker it has started meanwhile.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def end_quickly_at_exit() -> None:
    """Let a regular exit of this process skip the teardown too."""
    atexit.register(lambda: end_process(int(_has_failed.is_set())))


def keep_compiled_code() -> None:
    """Let torch's compiler keep its code in the user's cache directory, unless the environment says where."""
    folder = user_cache_path("ts_pippy_handler") / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # One compiler in this process: a pool of them would outlive a rank that is killed.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def c_compiler() -> list[str]:
    """Return the command of the machine's C compiler, which need not be there: ``CC``, else ``cc``."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def on_signal(number: signal.Signals, action: Callable[[], None] | None) -> None:
    """Call ``action`` whenever this process gets a signal; None ignores it. For the main thread only.

    ``action`` runs between any two steps of the main thread, so it must not wait for a lock.
    """
    signal.signal(number, signal.SIG_IGN if action is None else lambda _number, _frame: action())


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process of this host handles a signal itself, so that the signal does not end it."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
        if (found := re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)) is not None:
            return bool(int(found[1], 16) >> (number - 1) & 1)
    return False


def mark_failed(*, failed: bool = True) -> None:
    """Let the exit status say whether something failed."""
    if failed:
        _has_failed.set()
    else:
        _has_failed.clear()


def share_memory_arena() -> None:
    """Let all threads that start from now on allocate where the main thread does.

    What is freed in an arena of their own goes back to the system in pieces of 64 MB, whatever
    :func:`keep_freed_memory` says.
    """
    _mallopt(_M_ARENA_MAX, 1)


def keep_freed_memory() -> bool:
    """Let the C library keep memory that is freed, for the next batch; return whether it does.

    By default glibc gives the large buffers of a batch back to the system, which clears every page of them anew for the
    next batch: 38,000 page faults and a tenth of the time of 512 prompt tokens were measured. What is kept is bounded
    by what the largest batch needed, and above 512 MB of it goes back.
    """
    settings = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 512 << 20), (_M_TOP_PAD, 16 << 20))
    return all(_mallopt(option, value) for option, value in settings)


def _mallopt(option: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    return mallopt is not None and mallopt(option, value) == 1
