"""Ranks that fall silent, are stuck, or lost a message; over real connections on loopback, with short limits."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.processes import wait_until
from ts_pippy_handler import watchdog
from ts_pippy_handler.heartbeat import Frame, Link, Pulse, find_process, own_process
from ts_pippy_handler.watchdog import Hub, Invitation, Limits, Member, Verdict

SILENCE_S, STEP_S, JOIN_S = 0.6, 0.9, 2.0
LIMITS = Limits(silence_s=SILENCE_S, step_s=STEP_S, join_s=JOIN_S)
LATE_S = 10.0


class Group:
    """A hub and members, all in this process, and their verdicts."""

    def __init__(self, world_size: int, limits: Limits = LIMITS) -> None:
        self.verdicts: queue.Queue[tuple[int, Verdict]] = queue.Queue()
        self.pulses = [Pulse() for _ in range(world_size)]
        self.hub = Hub("127.0.0.1", world_size, self.pulses[0], limits, lambda verdict: self.verdicts.put((0, verdict)))
        self.hub.start()
        self.members: dict[int, Member] = {}
        self._limits = limits

    def join(self, rank: int) -> Member:
        tell = lambda verdict: self.verdicts.put((rank, verdict))  # noqa: E731
        member = Member(rank, self.hub.invitation, self.pulses[rank], self._limits, tell)
        self.members[rank] = member
        member.start()
        return member

    def verdict(self) -> tuple[int, Verdict]:
        return self.verdicts.get(timeout=LATE_S)

    def is_quiet(self, seconds: float) -> bool:
        with contextlib.suppress(queue.Empty):
            self.verdicts.get(timeout=seconds)
            return False
        return True

    def close(self) -> None:
        for member in self.members.values():
            member.close()
        self.hub.close()


@pytest.fixture
def three() -> Iterator[Group]:
    group = Group(3)
    group.join(1)
    group.join(2)
    yield group
    group.close()


def test_ranks_that_beat_are_left_alone_however_idle_and_leave_without_a_word(three: Group) -> None:
    assert three.is_quiet(3 * SILENCE_S)
    three.members[1].close()
    assert three.is_quiet(3 * SILENCE_S)


def test_a_rank_that_falls_silent_is_named(three: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(three.members[2], "_beat", lambda **flags: None)
    seen_by, verdict = three.verdict()
    assert (seen_by, verdict.rank) == (0, 2)
    assert str(verdict).startswith("rank 2, stage 2: no heartbeat for ")
    assert "(pippy.heartbeat_timeout is 0.6)" in verdict.reason


def test_every_rank_notices_a_silent_rank_0(three: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(three.hub, "_beat", lambda **flags: None)
    found = [three.verdict() for _ in range(2)]
    assert {(seen_by, verdict.rank) for seen_by, verdict in found} == {(1, 0), (2, 0)}


def test_a_rank_whose_connection_closes_has_as_long_as_a_silent_one(three: Group) -> None:
    link = three.members[1]._peers[0].link
    assert link is not None
    started = time.monotonic()
    link.socket.shutdown(socket.SHUT_RDWR)
    _, verdict = three.verdict()
    assert verdict.rank in (0, 1)
    assert time.monotonic() - started > SILENCE_S / 2


def test_a_rank_that_never_comes_is_waited_for_longer() -> None:
    group = Group(3)
    try:
        group.join(1)
        started = time.monotonic()
        _, verdict = group.verdict()
        assert verdict.rank == 2
        assert "pippy.rpc_timeout is 2" in verdict.reason
        assert time.monotonic() - started >= JOIN_S
    finally:
        group.close()


def test_time_that_the_watching_rank_slept_through_is_no_silence(three: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = three.hub._listen_until
    for member in three.members.values():
        monkeypatch.setattr(member, "_on_verdict", lambda verdict: None)

    def sleepy(deadline: float) -> None:
        time.sleep(2 * SILENCE_S)  # as if its process were stopped and continued
        listen(deadline)

    monkeypatch.setattr(three.hub, "_listen_until", sleepy)
    monkeypatch.setattr(three.members[1], "_beat", lambda **flags: None)
    started = time.monotonic()
    _, verdict = three.verdict()
    assert verdict.rank == 1
    assert time.monotonic() - started > 4 * SILENCE_S, "it may count two intervals of each sleep only"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stuck_step_is_told_with_all_stacks(three: Group, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with three.pulses[rank].step():
        _, verdict = three.verdict()
    assert verdict.rank == rank
    assert "stuck in a step for " in verdict.reason
    assert "(pippy.step_timeout is 0.9)" in verdict.reason
    stacks = [f"rank {each}, stage {each}: stacks of all threads" for each in range(3)]
    assert wait_until(lambda: all(any(told.startswith(each) for told in caplog.messages) for each in stacks), LATE_S)
    assert "test_a_stuck_step_is_told_with_all_stacks" in "".join(caplog.messages)


def test_many_short_steps_are_no_stuck_one(three: Group) -> None:
    ends = time.monotonic() + 2 * STEP_S
    while time.monotonic() < ends:
        with three.pulses[1].step():
            time.sleep(0.05)
    assert three.is_quiet(0.1)


def test_a_lost_message_is_found_by_who_has_done_less(three: Group) -> None:
    for pulse in three.pulses[:2]:
        with pulse.step():
            pass
    assert three.is_quiet(2 * SILENCE_S), "nothing is wrong while no result is waited for"
    with three.pulses[0].expecting():
        _, verdict = three.verdict()
    assert verdict.rank == 2
    assert "a message to this rank was lost" in verdict.reason


def test_a_lost_result_is_the_last_rank_s(three: Group) -> None:
    for pulse in three.pulses:
        with pulse.step():
            pass
    with three.pulses[0].expecting():
        _, verdict = three.verdict()
    assert verdict.rank == 2
    assert "a message from this rank was lost" in verdict.reason


def test_a_long_step_elsewhere_is_progress(three: Group) -> None:
    with three.pulses[0].expecting(), three.pulses[1].step():
        assert three.is_quiet(STEP_S - 0.2)


def test_one_rank_alone_watches_its_steps_and_listens_nowhere() -> None:
    group = Group(1)
    try:
        assert group.hub.invitation.port == 0
        with group.pulses[0].step():
            assert group.verdict()[1].rank == 0
    finally:
        group.close()


def test_a_verdict_kills_a_stopped_process_of_this_host() -> None:
    code = "from ts_pippy_handler.heartbeat import own_process; import time; print(own_process(), flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        found = find_process(child.stdout.readline().strip())
        assert found is not None
        assert found.pid == child.pid
        found.suspend()
        Verdict(rank=1, reason="stopped", process=found).kill()
        assert child.wait(10) == -9


def test_processes_elsewhere_and_this_one_are_out_of_reach() -> None:
    assert find_process(own_process()) is None
    assert find_process("other/host/1") is None
    assert find_process("nonsense") is None
    Verdict(rank=1, reason="elsewhere").kill()


STRANGERS = {
    "random bytes": bytes(range(255, 0, -1)) * 20,
    "a huge length": b"\xff\xff" + b"x" * 70_000,
    "an empty frame": b"\x00\x00",
    "no greeting": b"\x00\x05\x95\xc2\x00\xc2\xc2\xc0",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_sent_away(stranger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_GREETING_S", 0.5)
    group = Group(2)
    try:
        group.join(1)
        with socket.create_connection((group.hub.invitation.address, group.hub.invitation.port), 5) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(STRANGERS[stranger])
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b"", "closed, with no answer"
        assert group.is_quiet(2 * SILENCE_S)
    finally:
        group.close()


def test_a_wrong_secret_is_no_rank() -> None:
    group = Group(2)
    try:
        group.join(1)
        right = group.hub.invitation
        forged = Invitation(right.address, right.port, "0" * 64, "other/1")
        told: queue.Queue[Verdict] = queue.Queue()
        forger = Member(1, forged, Pulse(), LIMITS, told.put)
        forger.start()
        assert told.get(timeout=LATE_S).rank == 0, "it hears nothing"
        assert group.is_quiet(SILENCE_S)
        forger.close()
    finally:
        group.close()


def test_a_hundred_silent_connections_keep_no_rank_out() -> None:
    group = Group(2, Limits(silence_s=SILENCE_S, step_s=STEP_S, join_s=60.0))
    try:
        address = (group.hub.invitation.address, group.hub.invitation.port)
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, 5))
            group.join(1)
            assert wait_until(lambda: group.hub._peers[1].has_joined, LATE_S)
            assert group.is_quiet(2 * SILENCE_S)
    finally:
        group.close()


def test_frames_survive_any_cut_and_a_peer_that_takes_nothing() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = Link(left), Link(right)
        sender.send(Frame(1.5, 7))
        whole = right.recv(100)
        for byte in whole[:-1]:
            left.send(bytes([byte]))
            assert receiver.receive() == []
        left.send(whole[-1:])
        assert receiver.receive() == [Frame(1.5, 7)]
        assert receiver.receive() == []
        for _ in range(100_000):
            sender.send(Frame(1.5, 7))
        assert sender._unsent
        left.close()


def test_stacks_name_the_threads() -> None:
    ready = threading.Event()
    thread = threading.Thread(target=ready.wait, name="the-one-that-waits", daemon=True)
    thread.start()
    told = watchdog.stacks()
    ready.set()
    thread.join()
    assert "thread the-one-that-waits:" in told
    assert "self._cond.wait" in told or "wait" in told
