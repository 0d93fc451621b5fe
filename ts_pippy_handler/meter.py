"""What a rank spends its time on: sums over its loop, cheap enough to be always on.

The loop says what it has just done, and the time since it last said something counts as that. Time it sleeps is
skipped, so what is left of ``elapsed_s`` is idleness::

    receive batch │ receive activations │ run the stage │ send on │ receive batch │ …
        skip()    │   spent("wait")     │   "compute"   │ "send"  │    skip()     │

A rank is a process, so a process has one meter, :data:`METER`. One thread counts; any thread reads. Knows no torch and
no other ranks.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Activity = Literal["compute", "wait", "send", "bookkeeping"]


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """What one rank has done since its counters were last reset."""

    rank: int
    elapsed_s: float
    """Time since the reset, or since the process started."""
    compute_s: float
    """Running the stage and sampling. On a GPU only until the kernels are launched; they are waited for later."""
    wait_s: float
    """Waiting for and receiving what the rank before it sends, after the batch was announced; on rank 0, waiting for
    the sampled tokens while no other batch could be started."""
    send_s: float
    """Handing batches, activations and results over; they travel while the rank goes on."""
    bookkeeping_s: float
    """On rank 0: scheduling, and telling requests of their tokens. 0 on the others."""
    bytes_received: int
    """Of activations; on rank 0, of sampled tokens, logprobs and logits."""
    num_receives: int
    """Batches whose activations or results were received."""
    num_batches: int
    num_tokens: int
    """Rows of these batches."""
    cpu_s: float
    """Processor time of the process, all its threads."""
    peak_memory_bytes: int
    """Most memory that was ever resident (VmHWM); never reset. Memory of a GPU does not count."""


@dataclass
class _Sums:
    seconds: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(_ACTIVITIES, 0.0))
    bytes_received: int = 0
    num_receives: int = 0
    num_batches: int = 0
    num_tokens: int = 0


_ACTIVITIES: tuple[Activity, ...] = ("compute", "wait", "send", "bookkeeping")


class Meter:
    """Counts for one loop."""

    def __init__(self) -> None:
        self._sums = _Sums()
        self._mark = time.monotonic()
        self._lock = threading.Lock()
        self._base: dict[str, float] = {}
        """The sums at the last reset. What is counted only ever grows, so that resetting disturbs no counting."""

    def skip(self) -> None:
        """Let the time since the last call count as nothing."""
        self._mark = time.monotonic()

    def spent(self, activity: Activity) -> None:
        """Let the time since the last call count as ``activity``."""
        now = time.monotonic()
        self._sums.seconds[activity] += now - self._mark
        self._mark = now

    def ran(self, num_tokens: int) -> None:
        """Count a batch that went through the stage."""
        self._sums.num_batches += 1
        self._sums.num_tokens += num_tokens

    def received(self) -> None:
        """Count a batch whose activations or results came from another rank."""
        self._sums.num_receives += 1

    def count_bytes(self, num_bytes: int) -> None:
        """Count what came from another rank."""
        self._sums.bytes_received += num_bytes

    def read(self, *, reset: bool = False) -> dict[str, Any]:
        """Return the fields of :class:`RankStats` but the rank, as plain numbers.

        Args:
            reset: Whether the next call counts from here.
        """
        with self._lock:
            now = self._totals()
            since = {name: value - self._base.get(name, 0) for name, value in now.items()}
            if reset:
                self._base = now
        return {**since, "peak_memory_bytes": peak_memory_bytes()}

    def _totals(self) -> dict[str, float]:
        sums = asdict(self._sums)
        seconds = sums.pop("seconds")
        return {
            "elapsed_s": time.monotonic() - _STARTED,
            "cpu_s": time.process_time(),
            **{f"{activity}_s": value for activity, value in seconds.items()},
            **sums,
        }


_STARTED = time.monotonic()
METER = Meter()
"""This process's meter."""


def read(reset: bool) -> dict[str, Any]:
    """Return what this process's meter reads; rank 0 has every rank call it."""
    return METER.read(reset=reset)


def peak_memory_bytes() -> int:
    """Return the most memory of this process that was ever resident."""
    # Not getrusage where it can be helped: on Linux a started process inherits its parent's peak there.
    try:
        status = Path(f"/proc/{os.getpid()}/status").read_text("utf-8")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
