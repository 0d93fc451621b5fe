"""Answers to requests that run nothing on the pipeline, in the shape of :class:`~ts_pippy_handler.replies.Reply`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.replies import Output, failure
from ts_pippy_handler.unexpected import unexpected


class Answered:
    """A request whose answer is known at once: an error, or a list of models."""

    is_stream = False

    def __init__(self, output: Output) -> None:
        self._output = output

    @property
    def has_output(self) -> bool:
        """Whether :meth:`next` would return something."""
        return True

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Nothing will change."""

    def cancel(self) -> None:
        """Nothing runs."""

    def next(self) -> Output | None:
        """Return the answer."""
        return self._output


class Computed(Answered):
    """An answer that a thread of its own finds: other requests go on, and need not wait for it."""

    def __init__(self, compute: Callable[[], Output]) -> None:
        self._done = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(compute,), name="answer", daemon=True).start()

    @property
    def has_output(self) -> bool:
        """Whether the answer has been found."""
        return self._done.is_set()

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when the answer is there, at once if it is."""
        with self._lock:
            if not self._done.is_set():
                self._wakers.append(wake)
                return
        wake()

    def next(self) -> Output | None:
        """Return the answer, if it has been found."""
        return self._output if self._done.is_set() else None

    def _run(self, compute: Callable[[], Output]) -> None:
        try:
            self._output = compute()
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has to be answered
            reason = error if isinstance(error, PippyError) else unexpected(error)
            self._output = failure(reason, reason.as_dict())
        with self._lock:
            self._done.set()
        for wake in self._wakers:
            wake()
