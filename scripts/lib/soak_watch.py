"""What the ranks use while a soak runs: memory, descriptors and threads of every process, and how they grow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

_INTERVAL_S = 0.5
_LEAST_S = 45.0
"""Over less, one large batch looks like growth."""


@dataclass(frozen=True)
class Sample:
    """What one process used at one time."""

    time_s: float
    rss_bytes: int
    num_descriptors: int
    num_threads: int


@dataclass(frozen=True)
class Growth:
    """How one process changed from the end of its warm-up to its own end, or that of the soak."""

    rank: int
    pid: int
    seconds: float
    rss_mb: float
    """Resident memory when its warm-up ended, by the line through all samples."""
    growth_percent: float
    """Growth of that line since then."""
    mb_per_hour: float
    descriptors: tuple[int, int]
    threads: tuple[int, int]


def growth(rank: int, pid: int, samples: Sequence[Sample], warmup_s: float) -> Growth | None:
    """Fit a line through the memory of a process by least squares.

    Args:
        rank: Whose it is.
        pid: Its process.
        samples: In the order of time.
        warmup_s: Seconds since the first sample that are not looked at.

    Returns:
        None if the process did not live long enough beyond its warm-up.
    """
    # A process that ends has no memory any more, but is still there for a moment.
    kept = [sample for sample in samples if sample.time_s - samples[0].time_s >= warmup_s and sample.rss_bytes]
    if not kept or kept[-1].time_s - kept[0].time_s < _LEAST_S:
        return None
    times = np.array([sample.time_s - kept[0].time_s for sample in kept])
    slope, start = np.polyfit(times, np.array([sample.rss_bytes for sample in kept]), 1)
    return Growth(
        rank=rank,
        pid=pid,
        seconds=float(times[-1]),
        rss_mb=float(start) / 1e6,
        growth_percent=float(100 * slope * times[-1] / start),
        mb_per_hour=float(slope) * 3600 / 1e6,
        descriptors=(kept[0].num_descriptors, kept[-1].num_descriptors),
        threads=(kept[0].num_threads, kept[-1].num_threads),
    )


class Watch:
    """Samples every rank until stopped, on a thread of its own.

    Args:
        rank_pids: Tells the process of each rank, in order; asked again when one is gone.
        max_ranks: As many as there are when all are.
    """

    def __init__(self, rank_pids: Callable[[], Sequence[int]], max_ranks: int) -> None:
        self._rank_pids = rank_pids
        self._max_ranks = max_ranks
        self._samples: dict[tuple[int, int], list[Sample]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)
        self._thread.start()

    def stop(self) -> Mapping[tuple[int, int], Sequence[Sample]]:
        """Return all samples, by rank and process."""
        self._stopping.set()
        self._thread.join()
        return self._samples

    def _run(self) -> None:
        pids: Sequence[int] = []
        while not self._stopping.wait(_INTERVAL_S):
            if len(pids) != self._max_ranks or not all(map(psutil.pid_exists, pids)):
                pids = self._rank_pids()
            for rank, pid in enumerate(pids if len(pids) == self._max_ranks else []):
                with contextlib.suppress(psutil.Error):
                    self._samples.setdefault((rank, pid), []).append(sample(pid))


def sample(pid: int) -> Sample:
    """Return what a process uses now.

    Raises:
        psutil.Error: If it is gone.
    """
    process = psutil.Process(pid)
    with process.oneshot():
        return Sample(time.monotonic(), process.memory_info().rss, process.num_fds(), process.num_threads())
