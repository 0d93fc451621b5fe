"""Keeps the ranks of a host without TorchServe running: waits for the other host, runs torchrun, and begins again.

torchrun alone ends for good when the host of its rendezvous is gone, and TorchServe replaces that rendezvous at every
restart of its worker; so torchrun is started anew here each time. A torchrun whose ranks have ended, or that waits for
a network that is cut, is ended. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ts_pippy_handler import network, ranks
from ts_pippy_handler.errors import ServerError
from ts_pippy_handler.process import end_with_parent

_MAX_STARTS = 12
_STARTS_WINDOW_S = 300.0
_PAUSE_S = 1.0
_POLL_S = 0.5
_LOOK_EVERY_S = 5.0
_TELL_EVERY_S = 60.0
_UNREACHABLE_S = 20.0
_RANKLESS_S = 5.0
"""How long torchrun may take to end after one of its ranks has."""
_NAME_S = 30.0
_JOIN_S = 600
_STORE_S = 30


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where this host's ranks meet those of the others."""

    host: str
    port: int
    name: str | None
    """torchrun's rendezvous id; None for the one that is found there."""
    own_address: str
    num_hosts: int
    num_ranks: int
    """On this host."""
    wait_s: float
    """For the host of the rendezvous, at most."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Say = Callable[[str], None]


def supervise(meeting: Meeting, job: str, say: Say) -> None:
    """Run this host's ranks, again whenever they have ended, until interrupted.

    Args:
        meeting: Where to meet.
        job: For ``ts_pippy_handler.worker``.
        say: Takes a line of progress.

    Raises:
        ServerError: If the meeting's host is not there in time, or the ranks end again and again.
    """
    starts: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ts-pippy-rank-") as folder:
        file = Path(folder) / "job.json"
        file.touch(mode=0o600)
        file.write_text(job, "utf-8")
        while True:
            now = time.monotonic()
            starts = [then for then in starts if now - then < _STARTS_WINDOW_S]
            if len(starts) >= _MAX_STARTS:
                raise ServerError(
                    f"the ranks of this host ended {len(starts)} times within {_STARTS_WINDOW_S:g} s; the reason is in "
                    "the lines above, and in the log of TorchServe's host"
                )
            _wait_for_host(meeting, say)
            name = meeting.name or _find_name(meeting)
            starts.append(time.monotonic())
            say(f"{meeting}: joining {name!r} with {meeting.num_ranks} of the ranks")
            ended = _run(_command(meeting, name, file), meeting)
            say(f"{meeting}: {ended}; beginning again")
            time.sleep(_PAUSE_S)


def _wait_for_host(meeting: Meeting, say: Say) -> None:
    """Wait until something listens at the rendezvous."""
    started = time.monotonic()
    told: float | None = None
    while not network.answers(meeting.host, meeting.port):
        now = time.monotonic()
        if now - started > meeting.wait_s:
            raise ServerError(
                f"{meeting}: nothing listens there for {meeting.wait_s:g} s; expected is the torchrun that TorchServe "
                "starts for the model, with that port in torchrun.rdzv-endpoint"
            )
        if told is None or now - told > _TELL_EVERY_S:
            say(f"{meeting}: nothing listens there yet; waiting for TorchServe, {now - started:.0f} s so far")
            told = now
        time.sleep(_POLL_S)


def _find_name(meeting: Meeting) -> str:
    """Return the rendezvous id that TorchServe made of the model's name and the worker's port."""
    deadline = time.monotonic() + _NAME_S
    found: list[str] = []
    while time.monotonic() < deadline:
        found = ranks.find_meetings(meeting.host, meeting.port)
        if len(found) == 1:
            return found[0]
        time.sleep(_POLL_S)
    what = f"several meet there: {', '.join(found)}" if found else "no torchrun meets there"
    raise ServerError(
        f"{meeting}: {what}; give --rdzv-id, which is behind --rdzv-id in the line 'Worker cmdline' of TorchServe's log"
    )


def _command(meeting: Meeting, name: str, job: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(meeting.num_hosts), "--nproc-per-node", str(meeting.num_ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting), "--rdzv-id", name),
        *("--rdzv-conf", f"is_host=false,join_timeout={_JOIN_S},read_timeout={_STORE_S}"),
        *("--local-addr", meeting.own_address, "--max-restarts", "0", "--log-dir", str(job.parent)),
        *("-m", "ts_pippy_handler.worker", str(job)),
    ]


def _run(command: list[str], meeting: Meeting) -> str:
    """Run torchrun to its end, or end it; return in words why it is over."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
        preexec_fn=end_with_parent,
    )
    watched = _Watched(psutil.Process(process.pid), meeting)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_S)
                return f"torchrun has ended with status {status}"
            if (reason := watched.reason_to_end()) is not None:
                return reason
    finally:
        process.kill()  # the ranks follow it
        process.wait()
        psutil.wait_procs(watched.ranks, timeout=_RANKLESS_S)


class _Watched:
    """A torchrun that runs, and whether it still has ranks and a network."""

    def __init__(self, torchrun: psutil.Process, meeting: Meeting) -> None:
        self._torchrun = torchrun
        self._meeting = meeting
        self._looked = self._reached = self._complete = time.monotonic()
        self.ranks: list[psutil.Process] = []

    def reason_to_end(self) -> str | None:
        """Return why torchrun, which does not end by itself, has to."""
        now = time.monotonic()
        if all(_lives(rank) for rank in self.ranks):
            self._complete = now
        if now - self._complete > _RANKLESS_S:
            return "a rank has ended, and torchrun has not"
        if now - self._looked < _LOOK_EVERY_S:
            return None
        self._looked = now
        with contextlib.suppress(psutil.Error):
            self.ranks = self.ranks or self._torchrun.children()
        if network.answers(self._meeting.host, self._meeting.port):
            self._reached = time.monotonic()
        if now - self._reached > _UNREACHABLE_S:
            return f"{self._meeting.host} cannot be reached for {now - self._reached:.0f} s"
        return None


def _lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended, and that a torchrun that hangs does not reap, does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
