"""One prompt being continued: tokens in from the engine, text out, as much as is certain by now.

Knows no HTTP, and of the engine only its events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from ts_pippy_handler.text import TextStream, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A finished continuation."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """New tokens, an end-of-sequence token included."""
    text: str | None
    """Their text without special tokens, cut before a stop string; None without a tokenizer."""
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, when asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What is new in a completion since it was last asked."""

    token_ids: list[int]
    text: str
    """Text that is certain by now; empty without a tokenizer."""
    finish_reason: FinishReason | None
    """Why the completion ended; None while it runs."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, when asked for."""


class Completion:
    """One prompt being continued. Filled on the engine's thread, read on others."""

    def __init__(self, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.done = threading.Event()
        self.number = -1
        """The engine's number of the request, once it has started."""
        self._tokenizer = tokenizer
        self._stream = None if tokenizer is None else TextStream(tokenizer, params.stop)
        self._token_ids: list[int] = []
        self._num_decoded = 0  # tokens the text stream has seen
        self._num_taken = 0
        self._taken_text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._error: Exception | None = None
        self._on_change: list[tuple[Callable[[], None], bool]] = []
        self._lock = threading.Lock()

    @property
    def has_news(self) -> bool:
        """Whether :meth:`progress` has something to tell, counting the end."""
        return self.has_unsent_tokens or self.done.is_set()

    def add_callback(self, callback: Callable[[], None], *, every_token: bool = False) -> None:
        """Call ``callback`` when the completion has finished, and before that after every token if asked.

        It is called on the engine's thread, or at once if the completion has finished already.
        """
        with self._lock:
            if not self.done.is_set():
                self._on_change.append((callback, every_token))
                return
        callback()

    def take(self, event: TokenEvent) -> bool:
        """Take the next event; return whether a stop string ends the completion here."""
        if self.done.is_set():
            return False
        is_stopped = False
        if event.token_id is not None:
            with self._lock:
                self._token_ids.append(event.token_id)
                if event.logprobs is not None:
                    self._logprobs.append(event.logprobs)
                if self.params.stop:  # else the text can wait until somebody wants it
                    is_stopped = self._decode()
        if is_stopped:
            self._finish(FinishReason.STOP, None)
        elif event.finish_reason is not None:
            self._finish(event.finish_reason, event.error)
        else:
            for callback, every_token in self._on_change:
                if every_token:
                    callback()
        return is_stopped and event.finish_reason is None

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far."""
        return self._token_ids

    @property
    def has_unsent_tokens(self) -> bool:
        """Whether tokens came since :meth:`progress` was last called."""
        return len(self._token_ids) > self._num_taken

    def progress(self, *, may_end: bool = True) -> Progress:
        """Return what came since the last call; the last one has a finish reason.

        Args:
            may_end: False keeps the finish reason, and text that only the end makes certain, for a later call.

        Raises:
            PippyError: If the pipeline failed.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            new = slice(self._num_taken, len(self._token_ids))
            self._num_taken = len(self._token_ids)
            reason = self._finish_reason if may_end else None
            return Progress(
                token_ids=self._token_ids[new],
                text=self._new_text(is_end=reason is not None),
                finish_reason=reason,
                logprobs=None if self.params.logprobs is None else self._logprobs[new],
            )

    def answer(self) -> Answer:
        """Return the finished answer.

        Raises:
            PippyError: If the pipeline failed.
        """
        assert self._finish_reason is not None, "answer() was called before the completion is done"
        if self._error is not None:
            raise self._error
        with self._lock:
            return Answer(
                prompt_token_ids=self.prompt_token_ids,
                token_ids=self._token_ids,
                text=self._whole_text(),
                finish_reason=self._finish_reason,
                logprobs=None if self.params.logprobs is None else self._logprobs,
            )

    @property
    def prompt_text(self) -> str:
        """The prompt as text; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(self.prompt_token_ids)

    def _decode(self) -> bool:
        """Feed new tokens to the text stream; return whether a stop string is complete."""
        assert self._stream is not None
        for token_id in self._token_ids[self._num_decoded :]:
            self._stream.add(token_id)
        self._num_decoded = len(self._token_ids)
        return self._stream.is_stopped

    def _whole_text(self) -> str | None:
        if self._tokenizer is None or self._stream is None:
            return None
        if not self.params.stop:
            return self._tokenizer.decode(self._token_ids)
        self._decode()
        return self._stream.whole()

    def _new_text(self, *, is_end: bool) -> str:
        if self._stream is None:
            return ""
        self._decode()
        piece = self._stream.take()
        if is_end:
            # A stream adds up to the whole answer, also with tokenizers that change earlier text for later tokens.
            sent, whole = "".join(self._taken_text) + piece, self._whole_text() or ""
            piece += whole[len(sent) :] if whole.startswith(sent) else self._stream.finish()
        self._taken_text.append(piece)
        return piece

    def _finish(self, reason: FinishReason, error: Exception | None) -> None:
        with self._lock:
            self._finish_reason, self._error = reason, error
            self.done.set()
            callbacks, self._on_change = self._on_change, []
        for callback, _ in callbacks:
            callback()
