"""Ends serving gently: new requests are refused, running ones finish, up to a limit.

TorchServe has no such state. When a model is unregistered or TorchServe is stopped, it closes the worker's socket and
kills it a tenth of a second later, so a model has to be drained before. Knows the engine, and nothing of TorchServe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import DrainingError

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class Drain:
    """What becomes of one model's requests once it has been asked to drain.

    Args:
        engine: Where they run.
        limit_s: Seconds after which those that still run are aborted.
        num_unsent: Counts the answers that have not left yet, those of running requests included.
    """

    def __init__(self, engine: Engine, limit_s: float, num_unsent: Callable[[], int] = lambda: 0) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._num_unsent = num_unsent
        self._began: float | None = None
        self._num_aborted = 0

    def begin(self) -> None:
        """Refuse new requests from now on. Returns at once and waits for no lock, as signal handlers must."""
        if self._began is None:
            self._began = time.monotonic()
            threading.Thread(target=self._run, name="drain", daemon=True).start()

    def report(self) -> dict[str, Any] | None:
        """Return how far it is, None if it has not begun.

        ``unanswered`` 0 says that nothing is lost any more if the worker ends now. ``aborted`` counts the requests that
        had not finished at the limit.
        """
        if self._began is None:
            return None
        return {
            "seconds": round(time.monotonic() - self._began, 1),
            "limit": self._limit_s,
            "unanswered": max(self._engine.num_unfinished, self._num_unsent()),
            "aborted": self._num_aborted,
        }

    def _run(self) -> None:
        self._engine.refuse_new(DrainingError("the model is being drained and takes no new requests; try again later"))
        logger.info("draining: %d requests to finish within %g s", self._engine.num_unfinished, self._limit_s)
        end = time.monotonic() + self._limit_s
        while self._engine.num_unfinished and time.monotonic() < end:
            time.sleep(_POLL_S)
        self._num_aborted = self._engine.abort_all()
        if self._num_aborted:
            logger.warning("drained: %d requests had not finished and were aborted", self._num_aborted)
        else:
            logger.info("drained: no request runs any more")
