"""What ranks tell each other beside the batches, to show that they live: frames over TCP, and what is in them.

A frame is two bytes of length and a msgpack array. The first one of a connection carries a greeting with a secret that
only the ranks know; whoever cannot show it is a stranger. Knows no torch and no threads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import psutil

_LENGTH = struct.Struct("!H")
_MAX_FRAME_BYTES = 512
_READ_BYTES = 4096


class Pulse:
    """What the thread that computes lets others know. One thread writes, any thread reads."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.is_expecting = False
        """On rank 0: whether it waits for the last stage's result."""
        self._since: float | None = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count what happens inside as one step."""
        self.num_steps += 1
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Say that a result is waited for inside."""
        self.is_expecting = True
        try:
            yield
        finally:
            self.is_expecting = False

    def busy_s(self) -> float:
        """Return how long the current step has taken so far; 0 between steps."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Who opens a connection."""

    secret: str
    rank: int
    process: str


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One beat."""

    busy_s: float = 0.0
    num_steps: int = 0
    wants_stacks: bool = False
    is_last: bool = False
    """Whether the sender leaves, and silence means nothing from now on."""
    greeting: Greeting | None = None


class Link:
    """One end of a connection that never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._received = b""
        self._unsent = b""

    def send(self, frame: Frame) -> None:
        """Send a frame; it is dropped while an earlier one waits for a peer that takes nothing.

        Raises:
            OSError: If the connection is closed.
        """
        if not self._unsent:
            body = msgspec.msgpack.encode(frame)
            self._unsent = _LENGTH.pack(len(body)) + body
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[Frame]:
        """Return the frames that have come as a whole.

        Raises:
            OSError: If the connection is closed.
            msgspec.MsgspecError: If what came is no frame.
        """
        try:
            received = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not received:
            raise ConnectionResetError("closed by the peer")
        self._received += received
        frames = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MAX_FRAME_BYTES:
                raise msgspec.DecodeError(f"a frame of {length} bytes, at most {_MAX_FRAME_BYTES} are allowed")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            frames.append(msgspec.msgpack.decode(self._received[_LENGTH.size : end], type=Frame))
            self._received = self._received[end:]
        return frames

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def own_process() -> str:
    """Return a name of this process that :func:`find_process` understands on the same host."""
    return f"{own_host()}/{os.getpid()}"


def find_process(name: str) -> psutil.Process | None:
    """Return a process by the name it gave itself; None if it runs elsewhere or is this one."""
    host, _, pid = name.rpartition("/")
    if host != own_host() or not pid.isdigit() or int(pid) == os.getpid():
        return None
    with contextlib.suppress(psutil.Error):
        return psutil.Process(int(pid))
    return None


@cache
def own_host() -> str:
    """Return what differs between any two hosts, and between containers that see different processes."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
