"""One HTTP request from its first token to its last byte: whole answers and streams, each in a client's own format.

A :class:`Call` says what to run and how its answer is written; a :class:`Reply` follows the completions it started and
says what can be sent by now. Knows no TorchServe, which the handler puts around it, and no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ts_pippy_handler.completion import Answer, Completion, Progress
from ts_pippy_handler.errors import InvalidRequestError, PippyError
from ts_pippy_handler.generator import Generator, Prompt, Wishes
from ts_pippy_handler.unexpected import unexpected

JSON = "application/json"
_REASONS = {
    400: "Bad Request",
    404: "Not Found",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Format(Protocol):
    """How a client wants its answer written."""

    stream_content_type: str

    def whole(self, completions: Sequence[Completion]) -> tuple[Any, str]:
        """Return the body of a finished answer, one entry per choice, and its content type.

        Raises:
            PippyError: If the pipeline failed.
        """

    def first(self, completions: Sequence[Completion]) -> str:
        """Return what a stream starts with."""

    def piece(self, choice: int, progress: Progress) -> str:
        """Return what one choice has new."""

    def last(self, completions: Sequence[Completion]) -> str:
        """Return what a stream ends with."""

    def error(self, error: PippyError) -> dict[str, Any]:
        """Return the body that tells an error."""

    def streamed_error(self, error: PippyError) -> str:
        """Return how a stream that has begun tells an error; nothing follows it."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A checked request."""

    prompts: list[Prompt]
    wishes: Wishes
    format: Format
    model: str | None = None
    """The model that was asked for by name, if any."""
    num_choices: int = 1
    """Continuations of each prompt."""
    is_stream: bool = False


@dataclass(frozen=True, kw_only=True)
class Output:
    """Something to send."""

    body: str
    content_type: str = JSON
    status: int = 200
    is_chunk: bool = False
    """Whether it is part of a stream."""
    is_last: bool = True

    @property
    def reason(self) -> str:
        """The status line's phrase."""
        return _REASONS.get(self.status, "Error")


class Reply:
    """The answer to one HTTP request, in the making."""

    def __init__(self, generator: Generator, call: Call) -> None:
        """Start the completions of a call.

        Raises:
            PippyError: If one cannot be honoured; none is left running then.
        """
        self._generator = generator
        self._call = call
        self.completions = generator.submit_all(call.prompts, call.wishes, num_choices=call.num_choices)
        self._has_begun = False
        self._ended: set[int] = set()

    @property
    def is_stream(self) -> bool:
        """Whether the answer is sent in pieces."""
        return self._call.is_stream

    @property
    def has_output(self) -> bool:
        """Whether :meth:`next` would return something."""
        if self.is_stream:
            return any(each.has_news for number, each in enumerate(self.completions) if number not in self._ended)
        return all(completion.done.is_set() for completion in self.completions)

    def add_waker(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever there may be output."""
        for completion in self.completions:
            completion.add_callback(wake, every_token=self.is_stream)

    def cancel(self) -> None:
        """End it early: the client is gone or does not want it any more."""
        self._generator.cancel(self.completions)

    def next(self) -> Output | None:
        """Return what can be sent by now, if anything; the last output says so."""
        if not self.has_output:
            return None
        try:
            return self._next_chunk() if self.is_stream else self._whole()
        except PippyError as error:
            return self._failed(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the other requests
            return self._failed(unexpected(error))

    def _failed(self, error: PippyError) -> Output:
        self.cancel()
        form = self._call.format
        if not self._has_begun:
            return failure(error, form.error(error))
        self._ended = set(range(len(self.completions)))
        return self._chunk(form.streamed_error(error), is_last=True)

    def _whole(self) -> Output:
        body, content_type = self._call.format.whole(self.completions)
        output = Output(body=body if isinstance(body, str) else json.dumps(body), content_type=content_type)
        self._check_size(output)
        return output

    def _check_size(self, output: Output) -> None:
        """Refuse to send what would end the worker.

        Raises:
            InvalidRequestError: Saying how large the answer is and how large it may be.
        """
        size, most = len(output.body.encode()), self._generator.max_response_size
        if size > most:
            raise InvalidRequestError(
                f"the answer has {size} bytes, but at most {most} can be sent (handler.max_response_size); "
                "ask for fewer prompts, choices, tokens or logprobs at once"
            )

    def _next_chunk(self) -> Output | None:
        form = self._call.format
        pieces = [self._piece(number, each) for number, each in enumerate(self.completions)]
        self._check_size(self._chunk("".join(pieces), is_last=False))
        body = "".join(pieces)
        if not self._has_begun:
            # TorchServe sends headers with the first chunk unless it is the last one too; the end can wait a turn.
            self._has_begun = True
            return self._chunk(form.first(self.completions) + body, is_last=False)
        if len(self._ended) == len(self.completions):
            return self._chunk(body + form.last(self.completions), is_last=True)
        return self._chunk(body, is_last=False) if body else None

    def _piece(self, number: int, completion: Completion) -> str:
        if number in self._ended or not completion.has_news:
            return ""
        if not self._has_begun and not completion.has_unsent_tokens:  # only the end is new, and may not come first
            return ""
        progress = completion.progress(may_end=self._has_begun)
        if progress.finish_reason is not None:
            self._ended.add(number)
        return self._call.format.piece(number, progress)

    def _chunk(self, body: str, *, is_last: bool) -> Output:
        content_type = self._call.format.stream_content_type
        return Output(body=body, content_type=content_type, is_chunk=True, is_last=is_last)


def failure(error: PippyError, body: dict[str, Any]) -> Output:
    """Return the output that tells an error instead of an answer, in the client's format."""
    return Output(body=json.dumps(body), status=error.status)


def usage(completions: Sequence[Completion], num_choices: int = 1) -> dict[str, int]:
    """Count tokens; prompts that several choices share are counted once."""
    num_prompt = sum(len(each.prompt_token_ids) for each in completions[::num_choices])
    num_new = sum(len(each.token_ids) for each in completions)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


class PlainFormat:
    """TorchServe's plain contract: one JSON object per prompt; a stream has one JSON object per line."""

    stream_content_type = "application/x-ndjson"

    def __init__(self, *, is_list: bool = False) -> None:
        self._is_list = is_list

    def whole(self, completions: Sequence[Completion]) -> tuple[Any, str]:
        """Return one object, or a list of them if a list was sent."""
        bodies = []
        for completion in completions:
            answer = completion.answer()
            body = {
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason.value,
                "usage": usage([completion]),
            }
            bodies.append(body | _logprobs(answer))
        return (bodies if self._is_list else bodies[0]), JSON

    def first(self, completions: Sequence[Completion]) -> str:  # noqa: ARG002 - others need them
        """Return nothing: the first line is the first tokens."""
        return ""

    def piece(self, choice: int, progress: Progress) -> str:
        """Return a line with the new text and tokens; the last one of a prompt has its finish reason."""
        line: dict[str, Any] = {"text": progress.text, "token_ids": progress.token_ids} | _logprobs(progress)
        if self._is_list:
            line = {"index": choice} | line
        if progress.finish_reason is not None:
            line["finish_reason"] = progress.finish_reason.value
        return _line(line)

    def last(self, completions: Sequence[Completion]) -> str:
        """Return a line with the token counts."""
        return _line({"usage": usage(completions)})

    def error(self, error: PippyError) -> dict[str, Any]:
        """Return the error as an object."""
        return error.as_dict()

    def streamed_error(self, error: PippyError) -> str:
        """Return the error as a line."""
        return _line(error.as_dict())


class TextFormat(PlainFormat):
    """A bare prompt is answered with bare text."""

    def whole(self, completions: Sequence[Completion]) -> tuple[Any, str]:
        """Return the text alone."""
        return completions[0].answer().text or "", "text/plain; charset=utf-8"


def _logprobs(source: Answer | Progress) -> dict[str, Any]:
    """Return the entry with log-probabilities, when they were asked for."""
    if source.logprobs is None:
        return {}
    entries = [
        {
            "token_id": token_id,
            "logprob": logprobs.logprob,
            "top": [{"token_id": other, "logprob": logprob} for other, logprob in logprobs.top],
        }
        for token_id, logprobs in zip(source.token_ids, source.logprobs, strict=True)
    ]
    return {"logprobs": entries}


def _line(item: Any) -> str:
    return json.dumps(item, ensure_ascii=False) + "\n"
