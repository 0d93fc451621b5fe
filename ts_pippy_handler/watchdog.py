"""Notices a rank that is stopped, cut off, or stuck in a step, from threads other than those that compute.

    Hub (rank 0) ◀──── a beat every second, both ways ────▶ Member (each other rank)      TCP, one connection each

Four verdicts. Rank 0 hears nothing of a rank, or a rank nothing of rank 0, for ``silence_s``. A step takes longer than
``step_s``: all ranks log their stacks first. Rank 0 waits for a result while no rank has anything to work on: a message
was lost. Time in which the watching thread itself did not run counts as nothing, for who was stopped or starved cannot
say that others were silent. What follows from a verdict is the caller's. Knows no torch.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import psutil

from ts_pippy_handler.heartbeat import Frame, Greeting, Link, Pulse, find_process, own_process

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 64
_GREETING_S = 5.0
"""A connection that has not shown the secret by then is closed."""
_STACKS_S = 1.0
"""How long the other ranks have at most to log their stacks before anything is ended."""
_CLOSE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a rank counts as lost."""

    silence_s: float
    """Without a beat."""
    step_s: float
    """In one step."""
    join_s: float
    """Until its first beat."""

    @property
    def interval_s(self) -> float:
        """Time between beats."""
        return min(1.0, self.silence_s / 6)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A rank that cannot go on."""

    rank: int
    reason: str
    process: psutil.Process | None = None
    """The rank's process, if it runs on this host and is another one."""

    def __str__(self) -> str:
        return f"rank {self.rank}, stage {self.rank}: {self.reason}"

    def kill(self) -> None:
        """End the rank's process if it is within reach; SIGKILL also ends one that is stopped."""
        if self.process is not None:
            with contextlib.suppress(psutil.Error):  # it checks that this is still the same process
                self.process.kill()


OnVerdict = Callable[[Verdict], None]


class Invitation(msgspec.Struct, frozen=True):
    """Where the hub is and how to show that one is a rank; handed to members by a way that only ranks know."""

    address: str
    port: int
    secret: str
    process: str


@dataclass
class _Peer:
    """Another rank, as this one sees it."""

    rank: int
    link: Link | None = None
    process: psutil.Process | None = None
    last: Frame = field(default_factory=Frame)
    silence_s: float = 0.0
    has_joined: bool = False
    has_left: bool = False

    def hears(self, frame: Frame) -> None:
        self.last = frame
        self.silence_s = 0.0
        self.has_joined = True
        self.has_left = self.has_left or frame.is_last

    def verdict(self, limits: Limits) -> Verdict | None:
        limit = limits.silence_s if self.has_joined else limits.join_s
        if self.has_left or self.silence_s <= limit:
            return None
        key = "heartbeat_timeout" if self.has_joined else "rpc_timeout"
        reason = f"no heartbeat for {self.silence_s:.1f} s (pippy.{key} is {limit:g}); {self._state()}"
        return Verdict(rank=self.rank, reason=reason, process=self.process)

    def _state(self) -> str:
        if self.process is None:
            return "its host or its network is gone, or its process is stopped"
        try:
            is_stopped = self.process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return f"its process {self.process.pid} is gone"
        return f"its process {self.process.pid} " + ("is stopped" if is_stopped else "runs, but cannot be heard")


class _Monitor:
    """What both ends share: the thread, the beats, and the time that counts."""

    def __init__(self, rank: int, pulse: Pulse, limits: Limits, on_verdict: OnVerdict) -> None:
        self._rank = rank
        self._pulse = pulse
        self._limits = limits
        self._on_verdict = on_verdict
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to send and to expect beats."""
        self._thread.start()

    def close(self) -> None:
        """Tell the peers that this rank leaves, and stop watching; no verdict comes after that."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # it has ended by itself
            self._waker.send(b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        last = time.monotonic()
        try:
            while not self._is_closed:
                self._listen_until(last + self._limits.interval_s)
                now = time.monotonic()
                if now - last < self._limits.interval_s or self._is_closed:
                    continue
                for peer in self._peers.values():
                    # Of a longer time this thread has slept through the rest.
                    peer.silence_s += min(now - last, 2 * self._limits.interval_s)
                last = now
                self._beat()
                if (verdict := self._judge()) is not None and not self._is_closed:
                    self._on_verdict(verdict)
                    return
        finally:
            self._beat(is_last=True)
            for peer in self._peers.values():
                self._drop(peer)
            self._selector.close()
            self._waker.close()
            self._woken.close()

    def _listen_until(self, deadline: float) -> None:
        """Take what has come; wait for it until the deadline."""
        for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
            key.data()

    def _judge(self) -> Verdict | None:
        return next((verdict for peer in self._peers.values() if (verdict := peer.verdict(self._limits))), None)

    def _beat(self, *, wants_stacks: bool = False, is_last: bool = False) -> None:
        frame = Frame(self._pulse.busy_s(), self._pulse.num_steps, wants_stacks, is_last)
        for peer in self._peers.values():
            if peer.link is not None:
                try:
                    peer.link.send(frame)
                except OSError:
                    self._drop(peer)

    def _hear(self, peer: _Peer) -> None:
        if peer.link is None:
            return
        try:
            for frame in peer.link.receive():
                peer.hears(frame)
                if frame.wants_stacks:
                    self._log_stacks()
        except (OSError, msgspec.MsgspecError):
            self._drop(peer)

    def _watch(self, peer: _Peer, link: Link) -> None:
        peer.link = link
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._hear(peer))

    def _drop(self, peer: _Peer) -> None:
        """Close a connection. The peer is silent from now on; if its process has ended, others notice that sooner."""
        link, peer.link = peer.link, None
        if link is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.socket)
            link.close()

    def _log_stacks(self) -> None:
        logger.error("rank %d, stage %d: stacks of all threads\n%s", self._rank, self._rank, stacks())


class Hub(_Monitor):
    """Rank 0's end: watches every other rank, and all steps.

    Args:
        address: IPv4 address to listen on.
        world_size: Number of ranks, this one included.
        pulse: Of this rank.
        limits: When a rank counts as lost.
        on_verdict: Called at most once, on the hub's thread.
    """

    def __init__(self, address: str, world_size: int, pulse: Pulse, limits: Limits, on_verdict: OnVerdict) -> None:
        super().__init__(0, pulse, limits, on_verdict)
        self._peers = {rank: _Peer(rank) for rank in range(1, world_size)}
        self._strangers: dict[Link, float] = {}
        self._stalled_s = 0.0
        self._num_steps: list[int] = []
        self._last_judged = time.monotonic()
        self._listener = socket.create_server((address, 0), backlog=max(world_size, 16)) if world_size > 1 else None
        port = 0
        if self._listener is not None:
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            port = self._listener.getsockname()[1]
        self.invitation = Invitation(address, port, secrets.token_hex(32), own_process())

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            if self._listener is not None:
                self._listener.close()
            for link in self._strangers:
                link.close()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no descriptors left
            return
        link = Link(connection)
        while len(self._strangers) >= _MAX_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        self._strangers[link] = time.monotonic() + _GREETING_S
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        """Take a member in who shows the secret; send anybody else away."""
        if link not in self._strangers:
            return
        try:
            frames = link.receive()
        except (OSError, msgspec.MsgspecError):
            self._send_away(link)
            return
        if not frames:
            return
        greeting = frames[0].greeting
        if greeting is None or not hmac.compare_digest(greeting.secret.encode(), self.invitation.secret.encode()):
            self._send_away(link)
            return
        del self._strangers[link]
        self._selector.unregister(link.socket)
        peer = self._peers[greeting.rank]  # who knows the secret knows the ranks
        self._drop(peer)
        peer.process = find_process(greeting.process)
        self._watch(peer, link)
        for frame in frames:
            peer.hears(frame)

    def _send_away(self, link: Link) -> None:
        del self._strangers[link]
        self._selector.unregister(link.socket)
        link.close()

    def _judge(self) -> Verdict | None:
        now = time.monotonic()
        for link in [link for link, deadline in self._strangers.items() if deadline < now]:
            self._send_away(link)
        verdict = super()._judge() or self._judge_steps() or self._judge_progress(now - self._last_judged)
        self._last_judged = now
        return verdict

    def _judge_steps(self) -> Verdict | None:
        busy = {0: self._pulse.busy_s(), **{peer.rank: peer.last.busy_s for peer in self._peers.values()}}
        rank = max(busy, key=lambda rank: busy[rank])
        if busy[rank] <= self._limits.step_s:
            return None
        self._log_stacks()
        self._beat(wants_stacks=True)
        # Not so long that they miss this rank's heartbeat.
        deadline = time.monotonic() + min(_STACKS_S, self._limits.silence_s / 2)
        while time.monotonic() < deadline:
            self._listen_until(deadline)
        limit = self._limits.step_s
        return self._verdict(rank, f"stuck in a step for {busy[rank]:.1f} s (pippy.step_timeout is {limit:g})")

    def _judge_progress(self, elapsed_s: float) -> Verdict | None:
        """Find the rank that a message did not reach, when a batch is under way and no rank works."""
        num_steps = [self._pulse.num_steps, *(peer.last.num_steps for peer in self._peers.values())]
        is_busy = self._pulse.busy_s() or any(peer.last.busy_s for peer in self._peers.values())
        if is_busy or not self._pulse.is_expecting or num_steps != self._num_steps:
            self._num_steps, self._stalled_s = num_steps, 0.0
            return None
        self._stalled_s += min(elapsed_s, 2 * self._limits.interval_s)
        if self._stalled_s <= self._limits.silence_s:
            return None
        behind = [rank for rank in self._peers if num_steps[rank] < num_steps[rank - 1]]
        rank = behind[0] if behind else max(self._peers)
        return self._verdict(
            rank,
            f"nothing has moved for {self._stalled_s:.1f} s (pippy.heartbeat_timeout is {self._limits.silence_s:g}), "
            f"though a batch is under way: a message {'to' if behind else 'from'} this rank was lost",
        )

    def _verdict(self, rank: int, reason: str) -> Verdict:
        return Verdict(rank=rank, reason=reason, process=self._peers[rank].process if rank else None)


class Member(_Monitor):
    """The end of a rank above 0: watches rank 0.

    Args:
        rank: Of this process.
        invitation: From the hub.
        pulse: Of this rank.
        limits: When rank 0 counts as lost.
        on_verdict: Called at most once, on the member's thread.

    Raises:
        OSError: If the hub cannot be reached.
    """

    def __init__(self, rank: int, invitation: Invitation, pulse: Pulse, limits: Limits, on_verdict: OnVerdict) -> None:
        super().__init__(rank, pulse, limits, on_verdict)
        connection = socket.create_connection((invitation.address, invitation.port), timeout=limits.join_s)
        link = Link(connection)
        link.send(Frame(greeting=Greeting(invitation.secret, rank, own_process())))
        hub = _Peer(0, process=find_process(invitation.process), has_joined=True)
        self._peers = {0: hub}
        self._watch(hub, link)


def stacks() -> str:
    """Return where every thread of this process is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(parts)
