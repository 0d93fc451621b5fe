"""Our answers as OpenAI's objects and server-sent events. Knows no engine and no TorchServe.

Source of the shapes: OpenAI's API reference, "Completions" and "Chat".
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from ts_pippy_handler.completion import Answer, Completion, Progress
from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.replies import JSON, usage
from ts_pippy_handler.text import HALF_CHARACTER, TextStream, Tokenizer


def error_body(error: PippyError) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "code": error.code, "param": None}}


class OpenAIFormat:
    """Writes answers as one kind of OpenAI object.

    Args:
        request_id: Of the HTTP request.
        model: As the client named it.
        num_choices: Continuations of each prompt.
        tokenizer: Names tokens; None names them by their ids.
        with_usage: Whether a stream tells the token counts.
    """

    stream_content_type = "text/event-stream; charset=utf-8"
    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(
        self, request_id: str, model: str, num_choices: int, tokenizer: Tokenizer | None, *, with_usage: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._num_choices = num_choices
        self._with_usage = with_usage
        self._frame = {"id": f"{self.id_prefix}-{request_id}", "created": int(time.time()), "model": model}

    def whole(self, completions: Sequence[Completion]) -> tuple[Any, str]:
        """Return the finished object."""
        choices = [self.choice(number, completion) for number, completion in enumerate(completions)]
        body = {"object": self.whole_object, "choices": choices, "usage": usage(completions, self._num_choices)}
        return self._frame | body, JSON

    def first(self, completions: Sequence[Completion]) -> str:  # noqa: ARG002 - others need them
        """Return nothing; chats begin with the role."""
        return ""

    def piece(self, choice: int, progress: Progress) -> str:
        """Return an event with the new text of a choice."""
        reason = None if progress.finish_reason is None else progress.finish_reason.value
        if not progress.text and not progress.token_ids and reason is None:
            return ""
        return self.event([self.part(choice, progress, reason)])

    def last(self, completions: Sequence[Completion]) -> str:
        """Return the usage, if it was asked for, and the end mark."""
        counted = self.event([], usage(completions, self._num_choices)) if self._with_usage else ""
        return counted + _DONE

    def error(self, error: PippyError) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        return error_body(error)

    def streamed_error(self, error: PippyError) -> str:
        """Return the error as an event, and the end mark."""
        return _event(error_body(error)) + _DONE

    def event(self, choices: list[dict[str, Any]], counts: dict[str, int] | None = None) -> str:
        """Return one server-sent event."""
        body: dict[str, Any] = self._frame | {"object": self.chunk_object, "choices": choices}
        return _event(body | ({"usage": counts} if self._with_usage else {}))

    def name_of(self, token_id: int) -> str:
        r"""Return the text of a token; one that holds part of a character is named by its bytes: ``bytes:\xe2``."""
        if self._tokenizer is None:
            return str(token_id)
        text = self._tokenizer.token_text(token_id)
        own = self._tokenizer.token_bytes(token_id) if HALF_CHARACTER in text else None
        return text if own is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def choice(self, number: int, completion: Completion) -> dict[str, Any]:
        """Return one entry of ``choices`` of a finished object."""
        raise NotImplementedError

    def part(self, number: int, progress: Progress, reason: str | None) -> dict[str, Any]:
        """Return one entry of ``choices`` of a chunk."""
        raise NotImplementedError


class CompletionFormat(OpenAIFormat):
    """``text_completion`` objects."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        request_id: str,
        model: str,
        num_choices: int,
        tokenizer: Tokenizer | None,
        *,
        with_usage: bool,
        with_prompt: bool,
    ) -> None:
        super().__init__(request_id, model, num_choices, tokenizer, with_usage=with_usage)
        self._with_prompt = with_prompt
        self._offsets: dict[int, _Offsets] = {}

    def first(self, completions: Sequence[Completion]) -> str:
        """Return an event with the prompt of each choice, if it shall be repeated."""
        if not self._with_prompt:
            return ""
        parts = (self._entry(number, each.prompt_text, None, None) for number, each in enumerate(completions))
        return "".join(self.event([part]) for part in parts)

    def choice(self, number: int, completion: Completion) -> dict[str, Any]:
        """Return one entry of ``choices``."""
        answer = completion.answer()
        prompt = completion.prompt_text if self._with_prompt else ""
        return self._entry(number, prompt + (answer.text or ""), answer, answer.finish_reason.value)

    def part(self, number: int, progress: Progress, reason: str | None) -> dict[str, Any]:
        """Return one entry of ``choices``."""
        return self._entry(number, progress.text, progress, reason)

    def _entry(self, number: int, text: str, source: Answer | Progress | None, reason: str | None) -> dict[str, Any]:
        logprobs = None if source is None or source.logprobs is None else self._logprobs(number, source)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, number: int, source: Answer | Progress) -> dict[str, Any]:
        offsets = self._offsets.setdefault(number, _Offsets(self._tokenizer))
        rows = source.logprobs or []
        return {
            "tokens": [self.name_of(token_id) for token_id in source.token_ids],
            "token_logprobs": [each.logprob for each in rows],
            "top_logprobs": [
                self._alternatives([(token_id, each.logprob), *each.top])
                for token_id, each in zip(source.token_ids, rows, strict=True)
            ],
            "text_offset": [offsets.next(token_id) for token_id in source.token_ids],
        }

    def _alternatives(self, tokens: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by token; a second token of the same text is named by its id."""
        ids: dict[str, int] = {}
        logprobs: dict[str, float] = {}
        for token_id, logprob in tokens:
            name = self.name_of(token_id)
            if ids.setdefault(name, token_id) != token_id:
                name = f"token_id:{token_id}"
            logprobs[name] = logprob
        return logprobs


class _Offsets:
    """Where each token of one answer begins in its text, in characters."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._length = 0

    def next(self, token_id: int) -> int:
        start = self._length
        if self._stream is not None:
            self._stream.add(token_id)
            self._length += len(self._stream.take())
        return start


class ChatFormat(OpenAIFormat):
    """``chat.completion`` objects."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first(self, completions: Sequence[Completion]) -> str:
        """Return an event for each choice that says who speaks."""
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return "".join(self.event([{"index": number} | start]) for number in range(len(completions)))

    def choice(self, number: int, completion: Completion) -> dict[str, Any]:
        """Return one entry of ``choices``."""
        answer = completion.answer()
        message = {"role": "assistant", "content": answer.text}
        logprobs = self._logprobs(answer)
        return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason.value}

    def part(self, number: int, progress: Progress, reason: str | None) -> dict[str, Any]:
        """Return one entry of ``choices``."""
        delta = {"content": progress.text} if progress.text or reason is None else {}
        return {"index": number, "delta": delta, "logprobs": self._logprobs(progress), "finish_reason": reason}

    def _logprobs(self, source: Answer | Progress) -> dict[str, Any] | None:
        if source.logprobs is None:
            return None
        content = [
            self._token(token_id, each.logprob)
            | {"top_logprobs": [self._token(other, logprob) for other, logprob in each.top]}
            for token_id, each in zip(source.token_ids, source.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, own = str(token_id), None
        if self._tokenizer is not None:
            text = self._tokenizer.token_text(token_id)
            own = text.encode() if HALF_CHARACTER not in text else self._tokenizer.token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": None if own is None else list(own)}


_DONE = "data: [DONE]\n\n"


def _event(body: Any) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
