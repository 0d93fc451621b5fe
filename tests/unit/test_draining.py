"""A drained model refuses what is new, finishes what it has, and says when nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import wait_until
from tests.unit.test_engine import DEADLINE_S, Harness, drain, expected
from ts_pippy_handler import cli, process
from ts_pippy_handler.draining import Drain
from ts_pippy_handler.errors import DrainingError
from ts_pippy_handler.request import FinishReason


@pytest.fixture
def harness() -> Iterator[Harness]:
    """An engine that computes nothing until ``go`` is set."""
    harness = Harness(max_running=2)
    harness.go = threading.Event()  # type: ignore[attr-defined]
    harness.stage.before = lambda batch: harness.go.wait(DEADLINE_S)  # type: ignore[attr-defined]
    yield harness
    harness.go.set()  # type: ignore[attr-defined]
    harness.engine.close(timeout_s=DEADLINE_S)


def test_accepted_requests_finish_and_new_ones_are_refused(harness: Any) -> None:
    state = Drain(harness.engine, 60)
    assert state.report() is None
    queues = [harness.submit([5, 6], 4)[1] for _ in range(3)]  # two run, one waits
    state.begin()
    state.begin()  # a second signal changes nothing
    assert wait_until(lambda: not harness.engine.health()["ready"], DEADLINE_S)
    for refused in (lambda: harness.submit([5]), lambda: harness.engine.check_room(1)):
        with pytest.raises(DrainingError, match="takes no new requests"):
            refused()
    report = state.report()
    assert report is not None
    assert (report["unanswered"], report["aborted"], report["limit"]) == (3, 0, 60)
    harness.go.set()
    for events in queues:
        tokens, last = drain(events)
        assert (tokens, last.finish_reason) == (expected([5, 6], 4), FinishReason.LENGTH)
    assert wait_until(lambda: state.report()["unanswered"] == 0, DEADLINE_S)  # type: ignore[index]
    assert state.report()["aborted"] == 0  # type: ignore[index]
    assert harness.engine.is_running, "health is still answered"


def test_what_has_not_finished_at_the_limit_is_aborted(harness: Any) -> None:
    queues = [harness.submit([5, 6], 4)[1] for _ in range(3)]
    state = Drain(harness.engine, 0.2)
    state.begin()
    assert wait_until(lambda: state.report()["aborted"] == 3, DEADLINE_S)  # type: ignore[index]
    harness.go.set()
    assert [drain(events)[1].finish_reason for events in queues] == [FinishReason.ABORT] * 3
    assert wait_until(lambda: state.report()["unanswered"] == 0, DEADLINE_S)  # type: ignore[index]


def test_answers_that_have_not_left_count(harness: Any) -> None:
    unsent = [2]
    state = Drain(harness.engine, 60, lambda: unsent[0])
    state.begin()
    assert state.report()["unanswered"] == 2  # type: ignore[index]
    unsent[0] = 0
    assert state.report()["unanswered"] == 0  # type: ignore[index]


def test_a_signal_is_caught_only_by_who_listens() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    told = threading.Event()
    try:
        process.on_signal(signal.SIGUSR1, None)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not process.catches(os.getpid(), signal.SIGUSR1), "ignored is not caught"
        process.on_signal(signal.SIGUSR1, told.set)
        assert process.catches(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert told.wait(DEADLINE_S)
        assert not process.catches(2**22 + 1, signal.SIGUSR1), "there is no such process"
    finally:
        signal.signal(signal.SIGUSR1, before)


# The command, against an HTTP server in the place of TorchServe


class Served:
    """What ``v1/health`` answers, one entry after the other; the last one again and again."""

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""

    def next(self) -> tuple[int, Any]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts a server with the given answers."""
    servers = []

    def start(*answers: tuple[int, Any]) -> Served:
        served = Served(list(answers))

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                served.asked.append((self.path, self.headers["Authorization"]))
                status, body = served.next()
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Keep the test's output clean."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        served.url = f"http://127.0.0.1:{server.server_port}"
        return served

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def health(pid: int | None, unanswered: int | None, *, aborted: int = 0, seconds: float = 1.0) -> tuple[int, Any]:
    """An answer of a model: not draining when ``unanswered`` is None."""
    state = {"seconds": seconds, "limit": 60.0, "unanswered": unanswered, "aborted": aborted}
    rank = {"rank": 0, "pid": pid, "state": "ready" if pid else "lost"}
    return 200 if unanswered is None else 503, {"ranks": [rank], "drain": None if unanswered is None else state}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that were sent; everybody listens."""
    monkeypatch.setattr("ts_pippy_handler.drain_cli._POLL_S", 0.01)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("ts_pippy_handler.drain_cli.process", SimpleNamespace(catches=lambda pid, number: True))
    monkeypatch.setattr("ts_pippy_handler.drain_cli.os", SimpleNamespace(kill=lambda *call: sent.append(call)))
    return sent


def run(served: Served, *options: str) -> int:
    return cli.main(["drain", "a model", "--url", served.url, *options])


def test_the_command_waits_until_nothing_is_left(
    serve: Any, told: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(health(7, None), health(7, 2), health(7, 2), health(7, 0))
    assert run(served, "--api-key", "secret") == 0
    assert told == [(7, signal.SIGUSR1)]
    assert served.asked == [("/predictions/a%20model/1.0/v1/health", "Bearer secret")] * 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["process 7: told to drain", "process 7: 2 left, 1 of at most 60 s"]
    assert lines[2:] == [
        "process 7: 0 left, 1 of at most 60 s",
        "drained: the model can be unregistered, or TorchServe stopped",
    ]


def test_every_worker_is_drained(serve: Any, told: list[tuple[int, int]]) -> None:
    served = serve(health(7, None), health(7, 0), health(9, None), health(7, 0), health(9, 1), health(9, 0))
    assert run(served, "--workers", "2") == 0
    assert [pid for pid, _ in told] == [7, 9]
    assert len(served.asked) == 6


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            health(7, 0, aborted=3),
            r"3 requests had not finished at the limit \(handler.drain_timeout\) and were aborted",
        ),
        (health(7, 2, seconds=91), r"process 7: 2 requests do not end"),
        (health(None, None), r"a model: rank 0 is lost"),
        ((404, {"code": 404, "message": "Model not found: a model"}), r"a model: status 404: Model not found: a model"),
        ((200, {"text": "x"}), r"a model is not served by ts_pippy_handler"),
        ((500, "no object"), r"a model: status 500: "),
    ],
)
def test_what_ends_the_command_with_an_error(
    serve: Any, told: list[tuple[int, int]], capsys: pytest.CaptureFixture[str], answer: Any, message: str
) -> None:
    assert run(serve(answer)) == 1
    assert re.search(f"^ts-pippy: error: {message}", only_line(capsys))


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_process_that_does_not_listen_is_left_alone(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(serve(health(os.getpid(), None))) == 1
    assert "does not listen for SIGUSR1" in only_line(capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--url", "http://192.0.2.1:8080"), "--url: must be an http address on loopback, got 'http://192.0.2.1:8080'"),
        (("--url", "127.0.0.1:8080"), "--url: must be an http address on loopback"),
        (("--workers", "0"), "--workers: must be at least 1, got 0"),
        (("--key-file", "nothing.json"), "nothing.json: not a key file of TorchServe: FileNotFoundError"),
    ],
)
def test_options_that_cannot_be(
    told: list[tuple[int, int]], capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert cli.main(["drain", "m", *options]) == 1
    assert message in only_line(capsys)
    assert not told


def test_a_server_that_is_not_there(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "m", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 does not answer" in only_line(capsys)


def test_the_key_file_lies_where_torchserve_was_started(
    serve: Any, told: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key_file.json").write_text('{"inference": {"key": "found"}, "management": {"key": "other"}}')
    monkeypatch.chdir(tmp_path)
    served = serve(health(7, 0))
    assert run(served) == 0
    assert served.asked == [("/predictions/a%20model/1.0/v1/health", "Bearer found")]
