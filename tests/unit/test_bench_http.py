"""The bench against a server on loopback that streams, refuses, stalls and breaks off."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ts_pippy_handler import bench_http, cli
from ts_pippy_handler.bench_http import Server
from ts_pippy_handler.errors import ConfigError, PippyError, ServerError
from ts_pippy_handler.workload import Workload, read_workload

DEADLINE_S = 20.0


def data(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def token(text: str = "x") -> bytes:
    return data({"choices": [{"index": 0, "text": text}]})


DONE = data(b"[DONE]")


class FakeServer(ThreadingHTTPServer):
    """Answers each request by what ``mode`` says."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode = "usage"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # the bench leaves, wherever the server is just then
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        length = int(self.headers["Content-Length"])
        content = self.rfile.read(length)
        if len(content) < length:  # the bench has left
            self.close_connection = True
            return
        body = json.loads(content)
        with server.lock:
            server.bodies.append({"path": self.path, **body})
            server.headers.append(dict(self.headers))
            server.running += 1
            server.most_running = max(server.most_running, server.running)
        try:
            self.answer(server.mode, body["max_tokens"], len(body["prompt"]))
        except OSError:  # the bench has left
            self.close_connection = True
        finally:
            with server.lock:
                server.running -= 1

    def answer(self, mode: str, num_tokens: int, num_prompt: int) -> None:
        if mode == "refuse":
            self.whole(400, b'{"error": {"message": "max_tokens is\\ntoo large", "code": 400}}')
        elif mode == "crash":
            self.whole(500, b"<html>no</html>")
        elif mode == "no stream":
            self.whole(200, b'{"choices": []}')
        elif mode == "silent":
            self.server.released.wait(DEADLINE_S)
        else:
            self.stream(mode, num_tokens, num_prompt)

    def whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, mode: str, num_tokens: int, num_prompt: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.chunk(b": hello\n\n" + data({"choices": [{"index": 0, "text": ""}]}))
        for index in range(num_tokens):
            if index == 1 and mode == "stall":
                self.server.released.wait(DEADLINE_S)
            if index == 1 and mode == "error":
                self.chunk(data({"error": {"message": "a rank is gone"}}))
            if index == 1 and mode == "rubbish":
                self.chunk(data(b"{"))
            if index == 1 and mode == "cut":
                self.close_connection = True
                return
            part = token()
            self.chunk(part[:7])  # an event in two pieces is one event
            self.chunk(part[7:])
        if mode == "usage":
            usage = {"prompt_tokens": num_prompt + 1, "completion_tokens": num_tokens}
            self.chunk(data({"choices": [], "usage": usage}))
        if mode != "no end":
            self.chunk(DONE)
        self.chunk(b"")

    def chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join(DEADLINE_S)
    server.server_close()


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    file = tmp_path / "work.json"
    requests = [{"prompt_token_ids": [1] * (2 + i), "prompt": "héllo", "max_tokens": 3 + i} for i in range(5)]
    file.write_text(json.dumps({"requests": requests}))
    return file


@pytest.fixture
def workload(workload_file: Path) -> Workload:
    return read_workload(workload_file)


def server_at(fake: FakeServer, **others: Any) -> Server:
    return Server(url=fake.url, model="m", **{"timeout_s": DEADLINE_S, **others})


def test_every_request_is_sent_once_and_counted(fake: FakeServer, workload: Workload) -> None:
    report = bench_http.run(server_at(fake, api_key="secret"), workload)
    assert (report.num_requests, report.num_short, report.output_tokens) == (5, 0, 3 + 4 + 5 + 6 + 7)
    assert report.prompt_tokens == 2 + 3 + 4 + 5 + 6 + 5, "what the server says goes before what was sent"
    assert 0 < (report.ttft_s.p50 or 0) < report.wall_s
    assert report.inter_token_s.p95 is not None
    assert (report.stages, report.load_s, report.cpu_s) == (None, None, None)
    first = min(fake.bodies, key=lambda body: body["max_tokens"])
    assert first == {
        "path": "/v1/completions", "model": "m", "prompt": [1, 1], "max_tokens": 3, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}


def test_without_usage_chunks_are_counted(fake: FakeServer, workload: Workload) -> None:
    fake.mode = "plain"
    report = bench_http.run(server_at(fake), workload)
    assert (report.prompt_tokens, report.output_tokens) == (2 + 3 + 4 + 5 + 6, 25)
    report = bench_http.run(server_at(fake, prompts="text"), workload)
    assert (report.prompt_tokens, report.output_tokens, report.total_tokens_per_s) == (None, 25, None)
    assert fake.bodies[-1]["prompt"] == "héllo"


@pytest.mark.parametrize("concurrency", [1, 2])
def test_concurrency_is_kept(fake: FakeServer, workload: Workload, concurrency: int) -> None:
    report = bench_http.run(server_at(fake), workload, concurrency=concurrency)
    assert report.concurrency == concurrency
    assert 1 <= fake.most_running <= concurrency
    assert len(fake.bodies) == 5


@pytest.mark.parametrize("url", ["/", "/completions", "/completions/"])
def test_the_endpoint(fake: FakeServer, url: str) -> None:
    assert Server(url=fake.url + url, model="m").endpoint == f"{fake.url}/completions"


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuse", "/v1/completions: status 400: max_tokens is too large"),
        ("crash", "/v1/completions: status 500: '<html>no</html>'"),
        ("no stream", "/v1/completions: no stream: Expected response with content type 'text/event-stream'"),
        ("error", ": the stream ended with an error: a rank is gone"),
        ("rubbish", ": the stream holds something else than a JSON object: '{'"),
        ("cut", ": the connection was cut: "),
        ("no end", "the stream was cut after 3 chunks: no 'data: [DONE]' came"),
    ],
)
def test_what_servers_do_wrong(fake: FakeServer, workload: Workload, mode: str, message: str) -> None:
    fake.mode = mode
    with pytest.raises(ServerError) as caught:
        bench_http.run(server_at(fake), workload, concurrency=1)
    assert str(caught.value).startswith("work.json: requests[0]: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(fake.bodies) == 1, "the first failure ends the run"


@pytest.mark.parametrize("mode", ["silent", "stall"])
def test_a_server_that_says_nothing_is_not_waited_for(fake: FakeServer, workload: Workload, mode: str) -> None:
    fake.mode = mode
    with pytest.raises(ServerError, match=r"requests\[\d\]: http:.*: no answer within 0.3 s \(--timeout\)$"):
        bench_http.run(server_at(fake, timeout_s=0.3), workload)


def test_nobody_there(workload: Workload) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerError, match=rf"^http://127.0.0.1:{port}/v1/completions: cannot connect: "):
        bench_http.run(Server(url=f"http://127.0.0.1:{port}/v1", model="m"), workload)


@pytest.mark.parametrize("url", ["localhost:1/v1", "ftp://127.0.0.1/v1", "http://127.0.0.1:port/v1"])
def test_what_is_no_url(workload: Workload, url: str) -> None:
    with pytest.raises(PippyError, match=rf"^--url {url}: ") as caught:
        bench_http.run(Server(url=url, model="m"), workload)
    assert isinstance(caught.value, ConfigError)


def test_from_the_command_line(
    fake: FakeServer, workload_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.logging, "basicConfig", lambda **options: None)
    arguments = ["bench", "--url", fake.url, "--model", "m", "--workload", str(workload_file), "--concurrency", "2"]
    assert cli.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert (found["output_tokens"], found["stages"], found["load_s"], found["concurrency"]) == (25, None, None, 2)
    assert cli.main([*arguments, "--prompts", "text"]) == 0
    assert "5 requests, 2 at a time" in capsys.readouterr().out
    fake.mode = "refuse"
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ts-pippy: error: work.json: requests[")
    assert captured.err.count("\n") == 1
