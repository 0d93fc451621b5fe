"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces that can be cut and slowed.

What a test starts while it is :meth:`Hosts.inside` runs on the first host, with TorchServe; the second has a process
tree and a name of its own, so that nothing there can be reached but over the network. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.processes import wait_until
from tests.torchserve import BIN

CLONE_NEWNET = 0x40000000
_numbers = itertools.count()
_STOP_S = 20.0


def require_hosts() -> None:
    """Skip the test where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if missing:
        pytest.skip(f"network namespaces need {' and '.join(missing)} (Debian: iproute2, util-linux)")
    name = f"pippy-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    _ip("netns", "del", name)


class Hosts:
    """Two hosts. As a context manager they are gone afterwards.

    Args:
        folder: For logs.
        addresses: Last number of each host's address; torchrun numbers hosts by their addresses.
    """

    def __init__(self, folder: Path, addresses: tuple[int, int] = (1, 2)) -> None:
        number = next(_numbers) % 100
        self._names = [f"pippy{os.getpid()}-{number}{letter}" for letter in "ab"]
        self._links = [f"p{os.getpid() % 100000}n{number}{letter}" for letter in "ab"]
        self.addresses = [f"10.177.{number}.{last}" for last in addresses]
        self.network = f"10.177.{number}.0/24"
        self.log = folder / "second-host.log"
        self._second: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        require_hosts()
        try:
            for name in self._names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            first, second = self._names
            _ip("link", "add", self._links[0], "netns", first, "type", "veth", "peer", self._links[1], "netns", second)
            for name, link, address in zip(self._names, self._links, self.addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self._erase()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        try:
            self.kill_second()
        finally:
            self._erase()

    def _erase(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread, and what it starts, run on the first host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net", "rb") as home, open(f"/run/netns/{self._names[0]}", "rb") as first:
            if libc.setns(first.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(home.fileno(), CLONE_NEWNET)

    # The network

    def cut(self) -> None:
        """Let nothing pass any more; nobody is told."""
        _ip("-n", self._names[1], "link", "set", self._links[1], "down")

    def mend(self) -> None:
        """Undo :meth:`cut`."""
        _ip("-n", self._names[1], "link", "set", self._links[1], "up")

    def slow(self, rate: str = "2mbit") -> None:
        """Let only so much pass, in each direction."""
        for name, link in zip(self._names, self._links, strict=True):
            command = ["tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", "rate", rate]
            done = subprocess.run(
                [*command, "burst", "16kb", "latency", "300ms"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"this kernel cannot slow an interface: {done.stderr.strip()}")

    # The second host

    def start_second(self, *arguments: object, environment: dict[str, str] | None = None) -> None:
        """Run ``ts-pippy rank`` with these arguments on the second host."""
        assert self._second is None
        command = shlex.join([str(BIN / "ts-pippy"), "rank", *map(str, arguments)])
        isolated = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        with self.log.open("ab") as log:
            self._second = subprocess.Popen(
                ["ip", "netns", "exec", self._names[1], *isolated, "sh", "-c", f"hostname second && exec {command}"],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill_second(self) -> None:
        """End everything on the second host at once, as a lost host would be."""
        second, self._second = self._second, None
        if second is not None:
            second.kill()
            second.wait(_STOP_S)
            assert wait_until(lambda: not self._pids(), _STOP_S), f"processes {self._pids()} remain on the second host"

    def wait_second_ended(self, timeout_s: float) -> int | None:
        """Return the status with which the command ended by itself; None if it has not."""
        assert self._second is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._second.wait(timeout_s)
        return None

    def second_log(self) -> str:
        """Return what the second host wrote."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _pids(self) -> list[str]:
        done = subprocess.run(
            ["ip", "netns", "pids", self._names[1]], capture_output=True, text=True, timeout=20, check=False
        )
        return done.stdout.split()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
