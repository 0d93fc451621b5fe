"""A rank keeps the memory that a batch has freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, sys, threading, torch
from ts_pippy_handler.process import keep_freed_memory, share_memory_arena

def faults(sizes, times=10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        tensors = [torch.ones(size) for size in sizes]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    patterns = [[1 << 20] * 40, [1 << 19] * 80, [3 << 18, 1 << 18] * 40]
    for sizes in patterns:
        faults(sizes)
    print(sum(faults(sizes) for sizes in patterns), kept)

torch.set_num_threads(1)
kept = 0
if sys.argv[1] == "keep":
    share_memory_arena()
    kept = int(keep_freed_memory())
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def faults(mode: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", PROBE, mode], capture_output=True, text=True, timeout=120, check=True)
    found, kept = map(int, done.stdout.split())
    return found, kept


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_memory_is_not_faulted_in_again() -> None:
    found, kept = faults("keep")
    if not kept:
        pytest.skip("another C library")
    by_default, _ = faults("default")
    assert found < by_default / 10, (found, by_default)
