"""What a started program consists of, uses and leaves behind.

Its processes are found by a mark in the environment that they all inherit, so also those whose parents are gone, and
never those of anybody else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

_MARK = "TS_PIPPY_TEST_MARK"
_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.1


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = _POLL_S) -> bool:
    """Poll until the condition holds; return whether it did within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time that the processes have used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(each.user + each.system for each in times))


def cpu_share(pids: Iterable[int], seconds: float) -> float:
    """Return the share of one core that the processes use together, watched for some seconds."""
    pids = list(pids)
    begin, used = time.monotonic(), cpu_seconds(pids)
    time.sleep(seconds)
    return (cpu_seconds(pids) - used) / (time.monotonic() - begin)


def kill(pid: int) -> None:
    """End a process as an out-of-memory killer would."""
    psutil.Process(pid).kill()


class Footprint:
    """The processes, sockets and shared memory of one program that a test starts."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        # Short, since the path of a unix socket has room for about a hundred characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="tsp-", dir="/tmp"))
        self._shared_memory = set(_shared_memory())

    def environment(self) -> dict[str, str]:
        """Return the environment to start the program in."""
        temporary = str(self.temporary)
        return os.environ | {_MARK: self._mark, "TEMP": temporary, "TMP": temporary, "TMPDIR": temporary}

    def processes(self) -> list[psutil.Process]:
        """Return the live processes of the program, oldest first."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def listening(self) -> list[tuple[int, str, int]]:
        """Return process id, address and port of everything that the program listens on."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                open_sockets = process.net_connections("inet")
                listening = [each.laddr for each in open_sockets if each.status == psutil.CONN_LISTEN]
                found += [(process.pid, address.ip, address.port) for address in listening]
        return found

    def leftovers(self, timeout_s: float, *, sockets: bool = True) -> list[str]:
        """Return what remains of the program after the time, in words; returns early when nothing does."""
        remaining: list[str] = []

        def gone() -> bool:
            remaining[:] = [each for each in self._remaining() if sockets or not each.startswith("socket ")]
            return not remaining

        wait_until(gone, timeout_s)
        return remaining

    def end_processes(self) -> None:
        """Kill what still runs."""

        def none_left() -> bool:
            processes = self.processes()
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return not processes

        assert wait_until(none_left, 15), f"cannot be killed: {self.processes()}"

    def erase(self) -> None:
        """Kill what still runs, and remove the temporary folder."""
        self.end_processes()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _remaining(self) -> Iterator[str]:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                yield f"process {process.pid} (parent {process.ppid()}): {' '.join(process.cmdline())[:200]}"
        yield from (f"socket {path}" for path in _sockets(self.temporary))
        new = set(_shared_memory()) - self._shared_memory
        if new:
            yield from (f"shared memory {path}" for path in sorted(new - _mapped()))


def _shared_memory() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (str(path) for path in _SHARED_MEMORY.iterdir())


def _sockets(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    yield str(path)


def _mapped() -> set[str]:
    """Return the shared memory that some live process uses: another program's, or one about to be ended."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.update(mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/"))
            found.update(opened.path for opened in process.open_files() if opened.path.startswith("/dev/shm/"))
    return found
