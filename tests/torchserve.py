"""The real TorchServe, for tests: started on free loopback ports, watched, and gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.client import NO_ANSWER, Client
from tests.java import require_java
from tests.processes import Footprint, wait_until

BIN = Path(sys.executable).parent
_POLL_S = 0.2
_STOP_S = 30.0
_LOST_S = 10.0
_ORPHAN_S = 60.0  # torchrun starts its ranks once more, and TorchServe's worker waits 30 s for a connection
_TAIL_LINES = 80
_LOG_FOLLOWS = "--- TorchServe's log, last lines ---"
_NOISE = re.compile(
    r" (TS_METRICS|MODEL_METRICS|ACCESS_LOG) - |result=\[METRICS\]|I\d{4} .* torch/|"
    r"(Flushing req|Looping backend|Backend response|Getting requests)"
)


class ServerError(AssertionError):
    """TorchServe or a worker did not do what the test waits for; the message ends with its log."""


class TorchServe(Client):
    """One TorchServe. As a context manager it is stopped at the end, and nothing may remain of it.

    Args:
        model_store: Folder of archives.
        folder: Existing folder for its configuration and logs, its own.
        models: Archives of the store to load at start: ``"name.mar"`` or ``"name=file"``.
        token_auth: Whether clients must show a token (TorchServe's default); this one does.
        model_api: Whether models can be registered while it runs.
        properties: Further lines of config.properties.
        environment: Further environment variables.
    """

    def __init__(
        self,
        model_store: Path,
        folder: Path,
        models: Sequence[str] = (),
        *,
        token_auth: bool = True,
        model_api: bool = True,
        properties: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder / "key_file.json" if token_auth else None)
        self.folder = folder
        self.footprint = Footprint()
        self._options = ["--model-store", str(model_store)]
        self._options += [] if token_auth else ["--disable-token-auth"]
        self._options += ["--enable-model-api"] if model_api else []
        self._options += ["--models", *models] if models else []
        self._properties = {"disable_system_metrics": "true"} | dict(properties or {})
        self._environment = self.footprint.environment() | dict(environment or {})
        # TorchServe calls torchrun by its name.
        self._environment["PATH"] = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
        self._process: subprocess.Popen[bytes] | None = None
        self._registered: dict[str, int] = {}  # how long the log was then

    # Start and stop

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.footprint.erase()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self.stop()
        except ServerError as failure:
            if error is None:
                raise
            error.add_note(f"Then, {str(failure).partition(_LOG_FOLLOWS)[0]}")
        finally:
            self.footprint.erase()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start it and wait until it takes requests; models may still be loading."""
        require_java()
        for _ in range(3):
            self._launch()
            up = wait_until(lambda: not self._runs() or self._listens(), timeout_s, _POLL_S)
            if self._runs():
                if not up:
                    raise self.failure(f"TorchServe does not listen after {timeout_s:.0f} s")
                return
            if "Address already in use" not in self.log():
                break
        raise self.failure("TorchServe ended while starting")

    def stop(self) -> None:
        """End it gently and check that nothing of it remains: process, port, socket, shared memory.

        Raises:
            ServerError: Naming what remains.
        """
        if (frontend := self.frontend()) is not None:
            # The torchserve command waits for the frontend; ended first, it would leave it alone.
            frontend.terminate()
        self._expect_gone("stop")

    def kill_frontend(self) -> None:
        """Kill TorchServe itself, not the workers, and check that those leave by themselves.

        Sockets may remain: nobody is left who could have removed those of a worker that was just starting.
        """
        if (frontend := self.frontend()) is not None:
            frontend.kill()
        self._expect_gone("kill -9 of the frontend", timeout_s=_ORPHAN_S, sockets=False)

    def frontend(self) -> psutil.Process | None:
        """Return the Java process."""
        for process in self.footprint.processes():
            with contextlib.suppress(psutil.Error):
                if "org.pytorch.serve.ModelServer" in process.cmdline():
                    return process
        return None

    def _launch(self) -> None:
        ports = free_ports(5)
        self.ports = {"inference": ports[0], "management": ports[1], "grpc": ports[3]}
        names = ("inference_address", "management_address", "metrics_address")
        settings = {name: f"http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)}
        settings |= {"grpc_inference_address": "127.0.0.1", "grpc_inference_port": str(ports[3])}
        settings |= {"grpc_management_address": "127.0.0.1", "grpc_management_port": str(ports[4])}
        config = self.folder / "config.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in (settings | self._properties).items()))
        with (self.folder / "console.log").open("wb") as console:
            self._process = subprocess.Popen(
                [BIN / "torchserve", "--foreground", "--ncs", "--ts-config", config, *self._options],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _listens(self) -> bool:
        if self.key_file is not None and not self.key_file.exists():
            return False
        try:
            return self.request("inference", "GET", "/ping", timeout_s=5).status == 200
        except (*NO_ANSWER, ValueError):
            return False

    def _expect_gone(self, what: str, *, timeout_s: float = 10.0, sockets: bool = True) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        ended = wait_until(lambda: process.poll() is not None, _STOP_S)
        remaining = self.footprint.leftovers(timeout_s if ended else 0.0, sockets=sockets)
        for api, port in self.ports.items():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                remaining.append(f"{api} port {port}")
        if remaining:
            failure = self.failure(f"{what} left behind:\n" + "\n".join(remaining))
            self.footprint.end_processes()
            process.wait(10)
            raise failure

    # Models

    def register(self, name: str, archive: str, *, wait_s: float = 180.0, probe: Any = None) -> None:
        """Load an archive of the store under a name, and wait until it answers."""
        self._registered[name] = len(self.log())
        answer = self.manage("POST", f"/models?url={archive}&model_name={name}&initial_workers=1&synchronous=false")
        if answer.status not in (200, 202):
            raise self.failure(f"registering {name} was answered {answer.status}: {answer.body!r}")
        self.wait_ready(name, wait_s, probe=probe)

    def unregister(self, name: str) -> None:
        """Take a model away, and wait until its processes are gone."""
        pids = self.worker_pids(name)
        answer = self.manage("DELETE", f"/models/{name}")
        if answer.status != 200:
            raise self.failure(f"unregistering {name} was answered {answer.status}: {answer.body!r}")
        if not wait_until(lambda: not self.alive(pids), _STOP_S):
            raise self.failure(f"processes {self.alive(pids)} of {name} remain after it was unregistered")

    def wait_ready(self, name: str, timeout_s: float = 180.0, *, probe: Any = None, may_retry: bool = False) -> None:
        """Wait until the model really answers: TorchServe's own states say it too early.

        Args:
            name: The model.
            timeout_s: How long, in all.
            probe: Body of the request that must be answered with 200; by default a prompt of one letter.
            may_retry: Whether the worker may fail and be started again meanwhile; else that is an error at once.
        """
        body = {"prompt": "a", "max_new_tokens": 1} if probe is None else probe
        last: list[Any] = []

        def settled() -> bool:
            if not self._runs():
                raise self.failure("TorchServe ended")
            if not may_retry:
                if self._has_failed(name):
                    raise self.failure(f"the worker of {name} failed")
                if {worker["status"] for worker in self.workers(name)} != {"READY"}:
                    return False
            # A worker that is started again may never be called ready again (asyncCommunication), and may have lost
            # this request on its way.
            with contextlib.suppress(*NO_ANSWER):
                last[:] = [self.post(name, body, timeout_s=min(timeout_s, _LOST_S) if may_retry else timeout_s)]
                return last[0].status == 200 or not may_retry
            return False

        if not wait_until(settled, timeout_s, _POLL_S):
            raise self.failure(f"{name} is not ready after {timeout_s:.0f} s; last answer {last}")
        if last[0].status != 200:
            raise self.failure(f"the first request to {name} was answered {last}")

    def wait_loaded_again(self, logged: int, timeout_s: float) -> None:
        """Wait until the log, after its first ``logged`` characters, says that rank 0 has loaded its stage.

        With asyncCommunication TorchServe 0.12 forgets to wait for a restarted worker: a request that comes while it
        loads makes the frontend end it again, and its state is never READY. So nothing may be sent before.
        """
        if not wait_until(
            lambda: re.search(r"rank 0: stage 0 of", self.log()[logged:]) is not None, timeout_s, _POLL_S
        ):
            raise self.failure(f"no rank 0 has loaded again after {timeout_s:.0f} s")

    def _has_failed(self, name: str) -> bool:
        log = self.log()[self._registered.get(name, 0) :]
        return re.search(rf"W-\d+-{re.escape(name)}_\S+ .*Retry worker", log) is not None

    def workers(self, name: str) -> list[dict[str, Any]]:
        """Return what TorchServe says of the model's workers."""
        answer = self.manage("GET", f"/models/{name}", timeout_s=30)
        return answer.json()[0]["workers"] if answer.status == 200 else []

    def worker_pids(self, name: str) -> list[int]:
        """Return all processes of the model's workers, oldest first: torchrun, every rank, and their children."""
        sockets = tuple(f".ts.sock.{worker['id']}" for worker in self.workers(name))
        if (frontend := self.frontend()) is None:
            raise self.failure("TorchServe ended")
        found: dict[int, float] = {}
        for child in frontend.children():
            with contextlib.suppress(psutil.Error):
                if sockets and any(part.endswith(sockets) for part in child.cmdline()):
                    found |= {each.pid: each.create_time() for each in [child, *child.children(recursive=True)]}
        return sorted(found, key=lambda pid: found[pid])

    def rank_pids(self, name: str) -> list[int]:
        """Return the processes that compute, in the order of their ranks: told by environment, else by age."""
        ranks = []
        for number, pid in enumerate(self.worker_pids(name)):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if not re.search(r"torchrun|resource_tracker|forkserver", " ".join(process.cmdline())):
                    ranks.append((int(process.environ().get("RANK", number)), pid))
        return [pid for _, pid in sorted(ranks)]

    def alive(self, pids: Sequence[int]) -> list[int]:
        """Return those of the server's processes that still run."""
        live = {process.pid for process in self.footprint.processes()}
        return [pid for pid in pids if pid in live]

    # Logs

    def log(self) -> str:
        """Return everything TorchServe and its workers wrote."""
        path = self.folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Return the end of the log, without the noise of metrics and accesses."""
        telling = [line for line in self.log().splitlines() if not _NOISE.search(line)]
        return "\n".join(telling[-lines:])

    def failure(self, message: str) -> ServerError:
        """Return an error that carries the end of the log."""
        return ServerError(f"{message}\n{_LOG_FOLLOWS}\n{self.log_tail()}")


def free_ports(count: int) -> list[int]:
    """Return ports that the operating system says are free on loopback."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
