"""One TorchServe on loopback: start it, wait until it answers, stop everything it started.

What was started is recorded before it runs, with a mark in its environment that all its descendants inherit. So it
can be found again and ended, whoever was killed in between, and nothing else ever is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from java import java_environment
from steps import StepError, Steps

_MARK = "TS_PIPPY_QUICKSTART_ID"
_KILL_S = 10.0
_POLL_S = 0.25

# Loopback traffic must not go through a proxy that the environment names.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Record:
    """What is known of a started server; kept in ``server.json`` while it may run."""

    mark: str
    settings: dict[str, Any]
    temporary: str
    """TorchServe's temporary folder: its pid file, its workers' sockets, the unpacked archive."""
    inference_port: int
    management_port: int
    pid: int | None = None


def free_ports(count: int) -> list[int]:
    """Return ports that the operating system says are free on loopback."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def request(url: str, body: bytes | None = None, *, timeout_s: float) -> tuple[int, bytes]:
    """Send a GET, or a POST of JSON, and return the status and the body, whatever the status is.

    Raises:
        OSError: When there is no answer.
    """
    message = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with _opener.open(message, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class Server:
    """The server whose state lies in a folder."""

    def __init__(self, state: Path, model: str) -> None:
        self.state = state
        self.model = model
        self.log = state / "torchserve.log"
        self._file = state / "server.json"
        self._child: subprocess.Popen[bytes] | None = None
        self.record: Record | None = None
        with contextlib.suppress(OSError, ValueError, TypeError):
            self.record = Record(**json.loads(self._file.read_text()))

    @property
    def url(self) -> str:
        """Where prompts are sent."""
        assert self.record is not None
        return f"http://127.0.0.1:{self.record.inference_port}/predictions/{self.model}"

    def serves(self, settings: Mapping[str, Any]) -> bool:
        """Whether it runs with these settings and its model is ready."""
        if self.record is None or self.record.settings != settings or not self._frontend_runs():
            return False
        return self._worker_state() == "READY"

    def start(self, archive: str, settings: dict[str, Any]) -> None:
        """Start TorchServe with one model of the state folder's ``store``."""
        inference, management, metrics, grpc_inference, grpc_management = free_ports(5)
        # A folder of its own, with a short path: two TorchServes in one temporary folder meet each other's sockets.
        temporary = tempfile.mkdtemp(prefix="ts-pippy-")
        self.record = Record(uuid.uuid4().hex, settings, temporary, inference, management)
        self._save()
        config = self.state / "config.properties"
        config.write_text(
            f"""# Written by scripts/quickstart for one server on this machine.
inference_address=http://127.0.0.1:{inference}
management_address=http://127.0.0.1:{management}
metrics_address=http://127.0.0.1:{metrics}
grpc_inference_address=127.0.0.1
grpc_inference_port={grpc_inference}
grpc_management_address=127.0.0.1
grpc_management_port={grpc_management}
# Acceptable on loopback only. Anywhere else leave this out: TorchServe then asks every client for a token.
disable_token_authorization=true
disable_system_metrics=true
load_models={archive}
"""
        )
        environment = java_environment(Path(sys.executable).parent)
        environment.update({_MARK: self.record.mark, "TEMP": temporary, "TMPDIR": temporary})
        command = ["torchserve", "--foreground", "--ncs", "--ts-config", str(config)]
        command += ["--model-store", str(self.state / "store")]
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                cwd=self.state,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.record.pid = self._child.pid
        self._save()

    def wait_ready(self, steps: Steps, timeout_s: float) -> None:
        """Wait until a tiny prompt is answered; a healthy ``/ping`` says nothing about the model.

        Raises:
            StepError: As soon as the server or its worker dies, or after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self._worker_state() != "READY":
            if self._child is not None and self._child.poll() is not None:
                raise self._failure(steps, f"TorchServe ended with status {self._child.returncode}")
            if reason := self._load_failure():
                raise self._failure(steps, f"the model cannot be loaded: {reason}")
            if time.monotonic() > deadline:
                raise self._failure(steps, f"not ready after {timeout_s:.0f} s")
            steps.tick("loading the model")
            time.sleep(_POLL_S)
        probe = json.dumps({"prompt": "Hello", "max_new_tokens": 1}).encode()
        try:
            status, body = request(self.url, probe, timeout_s=max(deadline - time.monotonic(), 1))
        except OSError as error:
            raise self._failure(steps, f"no answer to the first prompt ({error})") from None
        if status != 200:
            raise self._failure(steps, f"the first prompt got status {status}: {body.decode(errors='replace')}")

    def stop(self, grace_s: float = 10.0) -> bool:
        """End everything the server started. Returns whether there was anything.

        Args:
            grace_s: Seconds the server has to end by itself before it is killed.

        Raises:
            StepError: When a process is still there after being killed.
        """
        if self.record is None:
            return False
        processes = self._processes()
        found = bool(processes)
        for process in processes:
            # The frontend ends its workers and then torchserve itself; ended the other way round it would stay.
            if _is_frontend(process):
                _signal(process, psutil.Process.terminate)
        self._await_end(grace_s)
        deadline = time.monotonic() + _KILL_S
        while (processes := self._processes()) and time.monotonic() < deadline:
            for process in processes:
                _signal(process, psutil.Process.kill)
            self._await_end(1)
        if processes:
            raise StepError(f"Processes {[process.pid for process in processes]} could not be ended.")
        shutil.rmtree(self.record.temporary, ignore_errors=True)
        self._file.unlink(missing_ok=True)
        self.record = None
        return found

    def _save(self) -> None:
        assert self.record is not None
        self._file.write_text(json.dumps(asdict(self.record), indent=2) + "\n")

    def _frontend_runs(self) -> bool:
        return any(_is_frontend(process) for process in self._processes())

    def _worker_state(self) -> str | None:
        assert self.record is not None
        url = f"http://127.0.0.1:{self.record.management_port}/models/{self.model}"
        try:
            status, body = request(url, timeout_s=5)
            workers = json.loads(body)[0]["workers"] if status == 200 else []
        except (OSError, ValueError, LookupError):
            return None
        return workers[0]["status"] if workers else None

    def _load_failure(self) -> str | None:
        """Return why the worker gave up, once it has: TorchServe itself would retry for minutes."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        if not re.search(r"Retry worker: |Failed to (start|load) |Failed to start workers", text):
            return None
        errors = re.findall(r"MODEL_LOG - ((?:[\w.]+\.)?\w*(?:Error|Exception)\b: .*)", text)
        return next((error for error in errors if "Unknown exception" not in error), "its worker ended")

    def _failure(self, steps: Steps, reason: str) -> StepError:
        """Return the error for a failed start, with what the worker said up to its first end."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        ends = (n for n, line in enumerate(lines) if re.search("Backend worker process died|Retry worker: ", line))
        said = [line.partition("MODEL_LOG - ")[2] for line in lines[: next(ends, len(lines))]]
        telling = [line for line in said if line and "torch/distributed/" not in line]
        return steps.failure(reason, "\n".join(telling[-25:]), self.log)

    def _processes(self) -> list[psutil.Process]:
        assert self.record is not None
        return list(_marked(self.record.mark))

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._processes() and time.monotonic() < deadline:
            if self._child is not None:
                self._child.poll()
            time.sleep(_POLL_S)


def _marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the live processes that carry the mark, this one excepted."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if process.environ().get(_MARK) == mark:
                yield process


def _is_frontend(process: psutil.Process) -> bool:
    try:
        return "org.pytorch.serve.ModelServer" in process.cmdline()
    except psutil.Error:
        return False


def _signal(process: psutil.Process, send: Any) -> None:
    with contextlib.suppress(psutil.Error):
        send(process)
