"""``ts-pippy drain``: let a served model finish what it has accepted, before it is unregistered or TorchServe stopped.

The model's rank 0 is found through ``v1/health`` and told by a signal, which only its own user on its own host can
send: no client of the inference address can end the service.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ts_pippy_handler import process
from ts_pippy_handler.errors import ConfigError, ServerError, one_line

_POLL_S = 0.5
_ANSWER_S = 30.0
_GRACE_S = 30.0
"""How much longer than the model's own limit it may take until its last answer has left."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", metavar="MODEL", help="name of the model at TorchServe")
    parser.add_argument("--model-version", default="1.0", metavar="V")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8080", help="TorchServe's inference address on this host: %(default)s"
    )
    parser.add_argument("--api-key", metavar="KEY", help="TorchServe's inference key")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="where to read it: key_file.json, if there is one here"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers of the model: %(default)s")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def drain(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Drain every worker of a model and wait until nothing is left to be answered.

    Args:
        options: See :func:`add_options`.
        say: Takes a line of progress.

    Raises:
        ConfigError: If the options do not name a model whose rank 0 runs on this host.
        ServerError: If it does not answer, or requests had to be aborted.
    """
    if options.workers < 1:
        raise ConfigError(f"--workers: must be at least 1, got {options.workers}")
    _check_local(options.url)
    model = _Model(options.url, options.name, options.model_version, _key(options))
    states: dict[int, dict[str, Any]] = {}
    while True:
        pid, state = model.ask()
        if state is None:
            _tell(pid)
            say(f"process {pid}: told to drain")
        else:
            if pid not in states or states[pid]["unanswered"] != state["unanswered"]:
                say(f"process {pid}: {state['unanswered']} left, {state['seconds']:g} of at most {state['limit']:g} s")
            states[pid] = state
            if state["seconds"] > state["limit"] + _GRACE_S:
                raise ServerError(f"process {pid}: {state['unanswered']} requests do not end")
            # With several workers each answer is of any of them.
            drained = [each for each in states.values() if not each["unanswered"]]
            if len(drained) == max(options.workers, len(states)):
                break
        time.sleep(_POLL_S)
    if aborted := sum(each["aborted"] for each in drained):
        raise ServerError(f"{aborted} requests had not finished at the limit (handler.drain_timeout) and were aborted")
    say("drained: the model can be unregistered, or TorchServe stopped")


@dataclass(frozen=True, slots=True)
class _Model:
    """A model at TorchServe."""

    url: str
    name: str
    version: str
    key: str | None

    def ask(self) -> tuple[int, dict[str, Any] | None]:
        """Return the process of a worker's rank 0 and what it says of draining, None before it has begun.

        Raises:
            ServerError: If TorchServe or the model do not answer.
            ConfigError: If the model is not served by this package.
        """
        path = "/".join(urllib.parse.quote(part, safe="") for part in (self.name, self.version))
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/predictions/{path}/v1/health", b"{}", headers, method="POST"
        )
        # Loopback needs no proxy, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_ANSWER_S) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:  # 503 is how a draining model answers
            with error:
                status, body = error.code, error.read()
        except OSError as error:
            raise ServerError(f"{self.url} does not answer: {one_line(error)}") from error
        return self._read(status, body)

    def _read(self, status: int, body: bytes) -> tuple[int, dict[str, Any] | None]:
        try:
            health = json.loads(body)
        except ValueError:
            health = None
        if isinstance(health, dict) and "drain" in health:
            rank = health["ranks"][0]
            if rank["pid"] is None:
                raise ServerError(f"{self.name}: rank 0 is {rank['state']}")
            return rank["pid"], health["drain"]
        reason = health.get("message") if isinstance(health, dict) else None
        if status == 200:
            raise ConfigError(f"{self.name} is not served by ts_pippy_handler: its v1/health says something else")
        raise ServerError(f"{self.name}: status {status}: {one_line(Exception(str(reason or body[:200])))}")


def _check_local(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if parts.scheme not in ("http", "https") or not is_local:
        raise ConfigError(
            f"--url: must be an http address on loopback, got {url!r}: a model is told by a signal, on its own host"
        )


def _key(options: argparse.Namespace) -> str | None:
    """Return TorchServe's inference key, None where it asks for none.

    Raises:
        ConfigError: If the key file does not hold one.
    """
    if options.api_key is not None:
        return str(options.api_key)
    file = options.key_file or Path("key_file.json")
    if options.key_file is None and not file.exists():
        return None
    try:
        return str(json.loads(file.read_text("utf-8"))["inference"]["key"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not a key file of TorchServe: {type(error).__name__}: {one_line(error)}") from error


def _tell(pid: int) -> None:
    """Signal rank 0.

    Raises:
        ConfigError: If the process is not here, not ours, or would not survive the signal.
    """
    if not process.catches(pid, signal.SIGUSR1):
        raise ConfigError(
            f"process {pid}, where rank 0 runs, does not listen for SIGUSR1 here; "
            "run this command in the container that runs TorchServe"
        )
    try:
        os.kill(pid, signal.SIGUSR1)
    except OSError as error:
        raise ConfigError(f"process {pid}, where rank 0 runs, cannot be told: {one_line(error)}") from error
