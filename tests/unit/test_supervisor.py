"""Ranks of a host without TorchServe are started anew, a bounded number of times, and what keeps them away is told."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.processes import wait_until
from ts_pippy_handler import supervisor
from ts_pippy_handler.errors import ServerError
from ts_pippy_handler.supervisor import Meeting, supervise

MEETING = Meeting(
    host="127.0.0.1", port=1, name="m_9000", own_address="127.0.0.1", num_hosts=2, num_ranks=1, wait_s=0.1
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.05)
    monkeypatch.setattr(supervisor, "_NAME_S", 0.1)


@pytest.mark.usefixtures("quick")
def test_a_host_that_does_not_come() -> None:
    said: list[str] = []
    with pytest.raises(ServerError, match=r"^127.0.0.1:1: nothing listens there for 0.1 s; expected is the torchrun"):
        supervise(MEETING, "{}", said.append)
    assert said == ["127.0.0.1:1: nothing listens there yet; waiting for TorchServe, 0 s so far"]


@pytest.mark.usefixtures("quick")
def test_ranks_that_end_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MAX_STARTS", 3)
    monkeypatch.setattr(supervisor, "_command", lambda *arguments: [sys.executable, "-c", "raise SystemExit(7)"])
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = replace(MEETING, port=server.getsockname()[1])
        with pytest.raises(ServerError, match=r"^the ranks of this host ended 3 times within 300 s; the reason is in"):
            supervise(meeting, "{}", said.append)
    assert (
        said
        == [
            f"{meeting}: joining 'm_9000' with 1 of the ranks",
            f"{meeting}: torchrun has ended with status 7; beginning again",
        ]
        * 3
    )


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("found", "reason"), [([], "no torchrun meets there; give"), (["a_1", "b_2"], "several meet there: a_1, b_2; give")]
)
def test_the_name_of_the_meeting(found: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor.ranks, "find_meetings", lambda host, port: found)
    with pytest.raises(ServerError, match=reason):
        supervisor._find_name(MEETING)


def test_a_torchrun_that_outlives_its_rank_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(supervisor, "_RANKLESS_S", 0.3)
    monkeypatch.setattr(supervisor.network, "answers", lambda host, port: True)
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = f"import subprocess, sys, time; rank = subprocess.Popen({child}); time.sleep(60)"
    assert _run(code, monkeypatch, end_rank_after_s=0.5) == "a rank has ended, and torchrun has not"


def test_a_torchrun_without_a_network_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(supervisor, "_UNREACHABLE_S", 0.3)
    monkeypatch.setattr(supervisor.network, "answers", lambda host, port: False)
    assert _run("import time; time.sleep(60)", monkeypatch) == "127.0.0.1 cannot be reached for 0 s"


def _run(code: str, monkeypatch: pytest.MonkeyPatch, end_rank_after_s: float | None = None) -> str:
    started: list[psutil.Process] = []
    begun = time.monotonic()

    class Watched(supervisor._Watched):
        def __init__(self, torchrun: psutil.Process, meeting: Meeting) -> None:
            super().__init__(torchrun, meeting)
            started.append(torchrun)

        def reason_to_end(self) -> str | None:
            if end_rank_after_s is not None and time.monotonic() - begun > end_rank_after_s:
                for rank in self.ranks:
                    with contextlib.suppress(psutil.Error):
                        rank.kill()
            return super().reason_to_end()

    monkeypatch.setattr(supervisor, "_Watched", Watched)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.1)
    reason = supervisor._run([sys.executable, "-c", code], MEETING)
    assert not started[0].is_running()
    return reason


def test_torchrun_does_not_outlive_who_started_it() -> None:
    code = """if True:
        import subprocess, sys
        from ts_pippy_handler.process import end_with_parent
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=end_with_parent)
        print(child.pid, flush=True)
        input()
    """
    parent: subprocess.Popen[Any] = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))  # type: ignore[union-attr]
        parent.kill()
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5.0)
