"""Break one rank of a model that TorchServe serves, in every way and moment, and measure what clients see of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.client import NO_ANSWER
from tests.oracle import hf_generate
from tests.packages import Launch, Packages
from tests.processes import wait_until
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

FAULTS_FOLDER = Path(__file__).parent / "faults"
STAGES = 3
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
ORDERS = {"exception in step": "raise", "out of memory": "allocate", "stuck step": "hang"}
CUTS = {"connections closed": "close", "connections silent": "deafen"}
FAULTS = (*SIGNALS, *ORDERS, *CUTS)
MOMENTS = ("idle", "prefill", "streaming")
HEARTBEAT_TIMEOUT_S, STEP_TIMEOUT_S = 5.0, 4.0
_DELAY_S = 0.02
"""Of every step, so that a fault hits while a request is under way."""
_GIVE_UP_S = 25.0
"""Of a client: TorchServe never answers what ran on a rank 0 of spawn mode that is gone."""
_BACK_S = 90.0
SHORT: dict[str, Any] = {"prompt": "Hello", "max_new_tokens": 8, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": "Hello", "max_new_tokens": 90, "ignore_eos": True, "stream": True}
PREFILL: dict[str, Any] = {"prompt": "Hello, world! " * 34, "max_new_tokens": 8, "ignore_eos": True}


@dataclass(frozen=True)
class Outcome:
    """What became of a request that was under way."""

    seconds: float
    """From the fault until it ended."""
    status: int | None
    """None when there was none: the connection was cut, or the client gave up."""
    tokens: list[int]
    is_whole: bool
    """Whether the answer came to its end."""
    error: str = ""

    @property
    def kind(self) -> str:
        """The outcome in one word or two."""
        if self.is_whole:
            return "finished"
        if self.error:
            return self.error
        return "error in the stream" if self.status == 200 else str(self.status)


@dataclass(frozen=True)
class Cell:
    """What one fault did."""

    outcome: str
    """What became of the request that ran, or at idle when readiness turned false."""
    error_s: float
    """From the fault until then."""
    recovery_s: float
    """From the fault until a new request had its right answer."""
    orphans: int
    wrong: int
    """Answers with other tokens than a server without faults."""
    named: bool
    """Whether the log names the rank and the reason."""


class Breakable:
    """A TorchServe with one model of three stages, whose ranks obey orders to fail."""

    def __init__(self, packages: Packages, model: Path, launch: Launch, folder: Path) -> None:
        self.launch = launch
        self.orders = folder / "orders"
        self.orders.mkdir()
        limits = {"heartbeat_timeout": HEARTBEAT_TIMEOUT_S, "step_timeout": STEP_TIMEOUT_S, "max_batch_tokens": 32}
        limits |= {"threads_per_rank": 1, "prefix_caching": False}
        self.name = packages.changed(model, launch, {"stages": STAGES, "pippy": limits})
        faults = json.dumps({"delay_s": _DELAY_S, "folder": str(self.orders)})
        environment = {"PYTHONPATH": str(FAULTS_FOLDER), "TS_PIPPY_FAULTS": faults}
        self.server = TorchServe(packages.store, folder, [f"{self.name}.mar"], environment=environment)
        self._expected = {
            body["prompt"]: hf_generate(model, [byte_tokens(body["prompt"])], body["max_new_tokens"], ignore_eos=True)[
                0
            ].token_ids
            for body in (LONG, PREFILL)
        }

    def __enter__(self) -> Breakable:
        self.server.__enter__()
        self.server.wait_ready(self.name, _BACK_S)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.server.__exit__(*exception)

    def measure(self, fault: str, rank: int, moment: str) -> Cell:
        """Break a rank at a moment, wait until the model serves again, and return what happened."""
        before = self.server.rank_pids(self.name)
        assert len(before) == STAGES, before
        logged = len(self.server.log())
        with ThreadPoolExecutor(1) as pool:
            body = {"idle": None, "prefill": PREFILL, "streaming": LONG}[moment]
            running: Future[Outcome] | None = None
            if body is not None:
                running = pool.submit(self._ask, body)
                time.sleep(0.15 if moment == "prefill" else 0.8)
            started = time.monotonic()
            self._break(fault, rank, before[rank])
            if running is None and fault in ORDERS:
                running = pool.submit(self._ask, SHORT)  # an idle rank does not step
            outcome = self._outcome(running, started)
        wrong = int(not self._is_right(outcome))
        loses_rank_0 = self.launch == "spawn" and rank == 0
        if loses_rank_0 and not (outcome.is_whole or outcome.status == 503):
            self.server.wait_loaded_again(logged, _BACK_S)
        recovery_s = self._wait_back(started)
        after = self.server.rank_pids(self.name)
        wrong += int(not self._is_right(self._ask(SHORT)))
        wait_until(lambda: not set(self.server.alive(before)) - set(after), 5)
        orphans = set(self.server.alive(before)) - set(after)
        log = self.server.log()[logged:]
        return Cell(
            outcome.kind,
            round(outcome.seconds, 1),
            round(recovery_s, 1),
            len(orphans),
            wrong,
            f"rank {rank}" in log,
        )

    def _break(self, fault: str, rank: int, pid: int) -> None:
        if fault in SIGNALS:
            psutil.Process(pid).send_signal(SIGNALS[fault])
            return
        draft = self.orders / "draft"
        draft.write_text((ORDERS | CUTS)[fault])
        os.replace(draft, self.orders / f"rank-{rank}")

    def _outcome(self, running: Future[Outcome] | None, started: float) -> Outcome:
        if running is not None:
            done = running.result()
            return Outcome(time.monotonic() - started, done.status, done.tokens, done.is_whole, done.error)
        wait_until(lambda: not self._is_ready(), _BACK_S, 0.1)
        return Outcome(time.monotonic() - started, None, [], is_whole=False, error="not ready")

    def _is_ready(self) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            return self.server.health(self.name, timeout_s=3.0).status == 200
        return False

    def _wait_back(self, started: float) -> float:
        def answers() -> bool:
            found = self._ask(SHORT, timeout_s=10.0)
            return found.is_whole and self._is_right(found)

        assert wait_until(answers, _BACK_S, 0.2), self.server.failure("the model did not come back")
        return time.monotonic() - started

    def _is_right(self, outcome: Outcome) -> bool:
        """Whether what came is right as far as it goes."""
        return any(tokens[: len(outcome.tokens)] == outcome.tokens for tokens in self._expected.values())

    def _ask(self, body: dict[str, Any], timeout_s: float = _GIVE_UP_S) -> Outcome:
        """Send a request and return what became of it, however it ends."""
        status: int | None = None
        tokens: list[int] = []
        is_whole = False
        error = ""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.ports["inference"], timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                headers = {"Content-Type": "application/json", **self.server.authorization()}
                connection.request("POST", f"/predictions/{self.name}", json.dumps(body), headers)
                answer = connection.getresponse()
                status = answer.status
                for piece in _lines(answer):
                    if status != 200 or "token_ids" not in piece:  # an error in the place of a piece
                        break
                    tokens += piece["token_ids"]
                    is_whole = piece.get("finish_reason") is not None
                else:
                    error = "" if is_whole else "cut"
            except TimeoutError:
                error = "client gave up"
            except (*NO_ANSWER, ValueError):
                error = "cut"
        if is_whole and len(tokens) != body["max_new_tokens"]:
            is_whole, tokens = False, [-1]  # an end that claims to be one
        return Outcome(0.0, status, tokens, is_whole, error)


def _lines(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := answer.readline():
        if line.strip():
            yield json.loads(line)
