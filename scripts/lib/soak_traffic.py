"""Random requests for the soak: what each asks for, how its answer is read, and whether that is the right one.

A :class:`Task` says what to continue and what must come back; a :class:`Shot` sends it in one of three formats, whole
or streamed, perhaps damaged or given up. Knows one address and nothing of the server behind it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Format = Literal["plain", "completions", "chat"]
Ending = Literal["wait", "cancel", "leave"]
PATHS: dict[Format, str] = {"plain": "", "completions": "/1.0/v1/completions", "chat": "/1.0/v1/chat/completions"}
CANCEL_PATH = "/1.0/v1/cancel"
HALF_CHARACTER = "\ufffd"
_MALFORMED, _CANCELLED = 0.05, 0.05
_LONGEST = 48


@dataclass(frozen=True)
class Expected:
    """The one right answer to a task."""

    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Task:
    """Something to continue, in the plain contract's words, with or without its answer."""

    fields: Mapping[str, Any]
    expected: Expected | None = None

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation, which only two of the formats take."""
        return "messages" in self.fields


@dataclass(frozen=True)
class Shot:
    """One HTTP request."""

    format: Format
    body: bytes
    is_stream: bool = False
    ending: Ending = "wait"
    expected: Expected | None = None
    """None where it must be refused."""
    patience_s: float = 0.0
    """How long a client that leaves waits for a whole answer before it does."""


@dataclass
class Answer:
    """What came back."""

    end: Literal["whole", "cut", "left", "late"] = "whole"
    status: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    error: str | None = None
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """How a request ended, and what is wrong with that, if anything: ``wrong``, ``hung`` or ``lost``."""

    kind: str
    problem: str | None = None


def random_options(draw: random.Random) -> dict[str, Any]:
    """Return parameters whose outcome is decided by a seed."""
    options: dict[str, Any] = {"max_new_tokens": draw.randint(1, _LONGEST), "seed": draw.randrange(2**60)}
    options |= {"temperature": draw.choice([0.0, 0.7, 1.0, 3.0]), "ignore_eos": draw.random() < 0.5}
    if draw.random() < 0.5:
        options |= {
            "top_k": draw.choice([1, 5, 100]),
            "top_p": draw.choice([1.0, 0.8]),
            "min_p": draw.choice([0, 0.05]),
        }
    if draw.random() < 0.4:
        options |= {"repetition_penalty": draw.choice([0.9, 1.3]), "presence_penalty": draw.uniform(-1, 1)}
        options |= {"frequency_penalty": draw.uniform(-1, 1), "logit_bias": {str(draw.randrange(256)): 3.0}}
    if draw.random() < 0.3:
        options |= {"stop_token_ids": draw.sample(range(256), 5), "min_tokens": draw.randint(0, 3)}
    if draw.random() < 0.3:
        options["stop"] = draw.sample("aeiouy .", draw.randint(1, 3))
    return options


def random_shot(draw: random.Random, tasks: Sequence[Task], model: str) -> Shot:
    """Return the next request of a client."""
    task = draw.choice(tasks)
    if task.is_chat:
        form: Format = draw.choice(["plain", "chat"])
    else:
        form = draw.choice(["plain", "completions"])
    is_stream = draw.random() < 0.5
    fields = dict(task.fields)
    if form != "plain":
        fields |= {"model": model, "max_tokens": fields.pop("max_new_tokens")}
    if is_stream:
        fields["stream"] = True
    shot = Shot(form, json.dumps(fields).encode(), is_stream, expected=task.expected)
    chance = draw.random()
    if chance < _MALFORMED:
        return replace(shot, body=_damaged(draw, fields), is_stream=False, expected=None)
    if chance < _MALFORMED + _CANCELLED:
        # A whole answer tells its id only when it is too late to cancel it.
        ending: Ending = "cancel" if is_stream and draw.random() < 0.5 else "leave"
        return replace(shot, ending=ending, patience_s=draw.uniform(0, 0.2))
    return shot


def _damaged(draw: random.Random, fields: Mapping[str, Any]) -> bytes:
    """Return a body that asks for something that cannot be had, or is none."""
    good = json.dumps(fields).encode()
    limit = "max_tokens" if "max_tokens" in fields else "max_new_tokens"
    wrong: list[dict[str, Any]] = [
        {limit: 0},
        {limit: 10**9},
        {limit: "many"},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_k": 1.5},
        {"seed": -1},
        {"stop": [""]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": 1000}},
        {"stop_token_ids": [10**6]},
        {"prompt": 5},
        {"messages": "hello"},
        {"stream": "perhaps"},
        {"no such field": 1},
    ]
    bodies = [json.dumps({**fields, **change}).encode() for change in wrong]
    bodies += [good[: draw.randrange(len(good))], b"\xff" + good, b"[]", b"null", b'"text"', b"[" * 10_000]
    return draw.choice(bodies)


class Sender:
    """Sends shots to one model.

    Args:
        port: On loopback.
        model: Its name at TorchServe.
        headers: Further headers, such as a token.
        limit_s: How long a request may take before it counts as hung.
    """

    def __init__(self, port: int, model: str, headers: Mapping[str, str], limit_s: float) -> None:
        self._port = port
        self._base = f"/predictions/{model}"
        self._headers = {"Content-Type": "application/json", **headers}
        self._limit_s = limit_s

    def send(self, shot: Shot) -> Answer:
        """Send a request and read what comes, whatever it is."""
        answer = Answer()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._limit_s)
        with contextlib.closing(connection):
            try:
                connection.request("POST", self._base + PATHS[shot.format], shot.body, self._headers)
                if shot.ending == "leave" and not shot.is_stream:
                    time.sleep(shot.patience_s)
                    answer.end = "left"
                else:
                    self._read(connection.getresponse(), shot, answer)
            except TimeoutError:
                answer.end = "late"
            except (OSError, http.client.HTTPException, ValueError) as error:
                answer.end, answer.error = "cut", f"{type(error).__name__}: {error}"
        answer.ended_s = time.monotonic()
        return answer

    def post(self, path: str, fields: Any) -> tuple[int, Any]:
        """Send a small request and return the status and the parsed body.

        Raises:
            OSError, http.client.HTTPException, ValueError: If there is no such answer.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._limit_s)
        with contextlib.closing(connection):
            connection.request("POST", self._base + path, json.dumps(fields).encode(), self._headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def _read(self, response: http.client.HTTPResponse, shot: Shot, answer: Answer) -> None:
        answer.status = response.status
        if response.status != 200:
            answer.error = response.read().decode(errors="replace")[:300]
        elif shot.is_stream:
            self._read_stream(response, shot, answer)
        else:
            _take_whole(json.loads(response.read()), answer)

    def _read_stream(self, response: http.client.HTTPResponse, shot: Shot, answer: Answer) -> None:
        answer.token_ids = [] if shot.format == "plain" else None
        answer.end = "cut"  # until its last line has come
        for line in iter(response.readline, b""):
            if time.monotonic() - answer.started_s > self._limit_s:
                raise TimeoutError
            if shot.ending == "leave":
                answer.end = "left"
                return
            if _take_line(line, answer):
                answer.end = "whole"
            elif shot.ending == "cancel":
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    self.post(CANCEL_PATH, {"id": response.headers["x-request-id"]})
                shot = replace(shot, ending="wait")


def _take_whole(body: Any, answer: Answer) -> None:
    if "choices" in body:
        [choice] = body["choices"]
        answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
        answer.finish_reason = choice["finish_reason"]
    else:
        answer.text, answer.token_ids, answer.finish_reason = (
            body[key] for key in ("text", "token_ids", "finish_reason")
        )


def _take_line(line: bytes, answer: Answer) -> bool:
    """Add a line of a stream to an answer; return whether it was the last."""
    line = line.strip().removeprefix(b"data: ")
    if not line:
        return False
    if line == b"[DONE]":
        return True
    item = json.loads(line)
    if "error" in item:
        answer.error = item["error"]["message"]
        return True
    is_last = "usage" in item and "choices" not in item
    for part in item.get("choices", [item]):
        answer.text += part.get("text") or part.get("delta", {}).get("content") or ""
        answer.finish_reason = part.get("finish_reason") or answer.finish_reason
        if answer.token_ids is not None:
            answer.token_ids += part.get("token_ids", [])
    return is_last


def judge(shot: Shot, answer: Answer, *, during_fault: bool) -> Verdict:
    """Say how a request ended.

    Args:
        shot: What was sent.
        answer: What came back.
        during_fault: Whether a rank was down at any time between the two, which excuses an error or a cut.
    """
    if answer.end == "late":
        return Verdict("hung", "hung")
    if answer.end == "left":
        return Verdict("left")
    if answer.end == "cut":
        return Verdict("cut by a fault") if during_fault else Verdict("lost", "lost")
    if answer.status == 429:
        return Verdict("429")
    if answer.status >= 500:
        return Verdict("5xx by a fault") if during_fault else Verdict("5xx", "wrong")
    if shot.expected is None:
        return Verdict("4xx") if answer.status >= 400 else Verdict("accepted", "wrong")
    if answer.status != 200:
        return Verdict("refused", "wrong")
    if answer.error is not None:
        return Verdict("error by a fault") if during_fault else Verdict("error", "wrong")
    return _compare(shot, answer, shot.expected)


def _compare(shot: Shot, answer: Answer, expected: Expected) -> Verdict:
    kind = answer.finish_reason or "no finish reason"
    if kind == "abort":
        text = answer.text.rstrip(HALF_CHARACTER)  # the end may have been in the middle of a character
        tokens = answer.token_ids if answer.token_ids is not None else []
        is_right = expected.text.startswith(text) and tokens == expected.token_ids[: len(tokens)]
        return Verdict(kind, None if is_right and shot.ending == "cancel" else "wrong")
    is_right = (answer.text, kind) == (expected.text, expected.finish_reason)
    is_right &= answer.token_ids in (None, expected.token_ids)
    return Verdict(kind, None if is_right else "wrong")


def with_answers(tasks: Sequence[Task], sender: Sender) -> Iterator[Task]:
    """Ask the server for the answer of each task, one at a time and with nothing else running.

    Raises:
        RuntimeError: If it does not answer.
    """
    for task in tasks:
        answer = sender.send(Shot("plain", json.dumps(dict(task.fields)).encode()))
        if answer.status != 200 or answer.token_ids is None or answer.finish_reason is None:
            raise RuntimeError(f"{dict(task.fields)} was answered {answer}")
        yield replace(task, expected=Expected(answer.token_ids, answer.text, answer.finish_reason))
