"""Run the steps of a script so that a person sees what happens: a title, a ticking clock, the time it took.

Commands write to a log file; only when one fails is the end of it shown. Standard library only: this runs before
anything is installed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_NOISE = re.compile(r"is ignored: it is (neither|either)|^\[notice\]|^\s*$|━|Looking in (links|indexes)")
_PLAIN_INTERVAL_S = 20.0


class StepError(Exception):
    """A step failed; the text says which, why, and where the whole log is."""


def tail(path: Path, num_lines: int = 25) -> str:
    """Return the last telling lines of a log, without pip's notices about its own configuration."""
    if not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in lines if not _NOISE.search(line)][-num_lines:])


class Steps:
    """Prints progress, in place on a terminal and line by line elsewhere."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self._in_place = sys.stdout.isatty()
        self._title = ""
        self._start = 0.0
        self._last_plain = 0.0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show ``title`` while the block runs, then the seconds it took."""
        self._title, self._start = title, time.monotonic()
        self._last_plain = self._start
        print(f"==> {title}", end="" if self._in_place else "\n", flush=True)
        try:
            yield
        except BaseException:
            print("\n" if self._in_place else "", end="", flush=True)
            raise
        took = f"{time.monotonic() - self._start:.0f} s"
        print(f"\r\033[K==> {title}: {took}" if self._in_place else f"    done in {took}", flush=True)

    def tick(self, detail: str = "") -> None:
        """Show that the current step is alive, and what it is at."""
        now = time.monotonic()
        seconds = f"{now - self._start:.0f} s"
        if self._in_place:
            width = max(os.get_terminal_size().columns - 1, 20)
            print(f"\r\033[K{f'==> {self._title}: {seconds}  {detail}'[:width]}", end="", flush=True)
        elif now - self._last_plain >= _PLAIN_INTERVAL_S:
            self._last_plain = now
            print(f"    {seconds}  {detail}"[:120].rstrip(), flush=True)

    def run(self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> None:
        """Run a command of the current step, its output going to the log.

        Raises:
            StepError: When it fails or takes longer than ``timeout_s``; then it and its children are gone.
        """
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            # A session of its own, so that what it starts can be ended together with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
            try:
                status = self._wait(process, timeout_s)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status is None:
            raise self.failure(f"took longer than {timeout_s:.0f} s")
        if status != 0:
            raise self.failure(f"exit status {status}")

    def failure(self, reason: str, said: str | None = None, log: Path | None = None) -> StepError:
        """Return the error that reports the failed step, with what was said last and where all of it is."""
        log = log or self.log
        return StepError(f"{self._title}: failed, {reason}\n--- {log}\n{said or tail(log)}\n---")

    def _wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                last = tail(self.log, 1).strip()
                self.tick("" if last.startswith("$ ") else last)
        return None
