"""Malformed requests: every field with every kind of wrong value, and bodies that are no request at all.

Each has the path under the model, the body, its content type, and a text that the refusal must contain.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

JSON, TEXT, FORM = "application/json", "text/plain", "application/x-www-form-urlencoded"
MODEL = "MODEL"
"""Stands in the bodies for the model's name."""
PATHS = {"plain": "", "completions": "v1/completions", "chat": "v1/chat/completions"}


@dataclass(frozen=True)
class Malformed:
    """A request that must be refused."""

    path: str
    body: bytes
    content_type: str
    named: str


class Raw(str):
    """JSON as it stands, for what Python would not write."""


_HUGE = Raw("1" + "0" * 400)
_DEEP = Raw("[" * 200 + "]" * 200)
_NO_NUMBER: list[Any] = ["a", "", "5", [], [1], {}, {"a": 1}, True, Raw("NaN"), "\ud83d\ude00", _DEEP]
_NO_WHOLE: list[Any] = [*_NO_NUMBER, 1.5, Raw("Infinity"), Raw("1e400")]
_NO_SWITCH: list[Any] = ["yes", "", 0, 1, 2.5, [], {}, Raw("NaN"), _DEEP]
_NO_TEXT: list[Any] = [0, 1.5, True, {}, {"a": "b"}, [[]], [1.5], [""], "", Raw("NaN")]

_COMMON: dict[str, list[Any]] = {
    "temperature": [*_NO_NUMBER, -0.1, Raw("Infinity")],
    "top_p": [*_NO_NUMBER, 0, -1, 1.1, _HUGE],
    "top_k": [*_NO_WHOLE, -1, 2**31, _HUGE],
    "min_p": [*_NO_NUMBER, -0.1, 1.1],
    "repetition_penalty": [*_NO_NUMBER, 0, -1, Raw("Infinity")],
    "presence_penalty": [*_NO_NUMBER, -2.1, 2.1],
    "frequency_penalty": [*_NO_NUMBER, -2.1, 2.1],
    "logit_bias": ["a", 5, [], [1], True, {"a": 1}, {"1": "a"}, {"1": 101}, {"1": -101}, {"-1": 0}, {"1": [1]}],
    "seed": [*_NO_WHOLE, -1, 2**63, _HUGE],
    "stop": [0, True, {}, "", [""], [1], [["a"]], ["a"] * 65],
    "stop_token_ids": ["a", 5, {}, [1.5], ["a"], [True], [[1]], [1] * 65],
    "ignore_eos": _NO_SWITCH,
    "timeout": [*_NO_NUMBER, 0, -1, Raw("Infinity")],
    "min_tokens": [*_NO_WHOLE, -1],
    "stream": _NO_SWITCH,
}
_MESSAGES: list[Any] = [
    *("a", 5, {}, [], [1], ["a"], [{}], [[]], True),
    *([{"content": "a"}], [{"role": 1, "content": "a"}], [{"role": "user", "content": 5}]),
]
_OWN: dict[str, dict[str, list[Any]]] = {
    "plain": {
        "prompt": [*_NO_TEXT, ["a", 5], [None], ["a"] * 300],
        "input_ids": ["a", 5, {}, [], [1.5], ["a"], [True], [[]], [[1], []], [[1], 2], [[[1]]]],
        "messages": _MESSAGES,
        "max_new_tokens": [*_NO_WHOLE, 0, -1],
        "logprobs": [*_NO_WHOLE, -1, 21],
    },
    "completions": {
        "prompt": [*_NO_TEXT, [], ["a", 5], [1, "a"], [None], ["a"] * 300],
        "max_tokens": [*_NO_WHOLE, 0, -1],
        "logprobs": [*_NO_WHOLE, -1, 21],
        "n": [*_NO_WHOLE, 0, -1, 129],
        "best_of": [*_NO_WHOLE, 0, 2],
        "echo": _NO_SWITCH,
        "stream_options": ["a", 5, [], {"a": 1}, {"include_usage": "yes"}],
        "suffix": ["a", 5, [1]],
        "response_format": [{"type": "json_object"}, "json"],
        "user": [5, [], {}],
        "metadata": [5, "a", {"a": 1}],
        "store": [True, "yes", 5],
    },
    "chat": {
        "messages": [*_MESSAGES, [{"role": "user", "content": [{"type": "image_url"}]}]],
        "max_tokens": [*_NO_WHOLE, 0, -1],
        "max_completion_tokens": [*_NO_WHOLE, 0, -1],
        "n": [*_NO_WHOLE, 0, -1, 129],
        "logprobs": [*_NO_SWITCH],
        "top_logprobs": [*_NO_WHOLE, -1, 21, 5],
        "tools": ["a", 5, {}, [1], [{}] * 129],
        "tool_choice": ["required", 5, {"type": "function"}],
        "functions": [[{"name": "f"}]],
        "reasoning_effort": ["high"],
        "modalities": [["audio"]],
    },
}
_GOOD: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "x", "max_new_tokens": 1},
    "completions": {"model": MODEL, "prompt": "x", "max_tokens": 1},
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


def corpus() -> list[Malformed]:
    """Return all malformed requests, no two the same."""
    return list(dict.fromkeys([*_fields(), *_bodies(), *_texts()]))


def _fields() -> Iterator[Malformed]:
    for kind, path in PATHS.items():
        for field, values in (_COMMON | _OWN[kind]).items():
            good = {name: value for name, value in _GOOD[kind].items() if name != field}
            if kind == "plain" and field in ("input_ids", "messages"):
                del good["prompt"]
            for value in values:
                yield Malformed(path, _written(good | {field: value}), JSON, field)
        for field in ("promt", "x", "", "é", "__class__", "a" * 5000):
            yield Malformed(path, _written(_GOOD[kind] | {field: 1}), JSON, field[:100] or "unknown")
        for field in _GOOD[kind]:
            if not field.startswith("max"):
                rest = {name: value for name, value in _GOOD[kind].items() if name != field}
                yield Malformed(path, _written(rest), JSON, field)


def _written(fields: dict[str, Any]) -> bytes:
    parts = (
        f"{json.dumps(name)}: {value if isinstance(value, Raw) else json.dumps(value)}"
        for name, value in fields.items()
    )
    return ("{" + ", ".join(parts) + "}").encode()


def _bodies() -> Iterator[Malformed]:
    """JSON that is broken, or is no object."""
    broken = (b"{", b"{]", b'{"prompt": "x"', b'{"prompt": "x"}}', b"{'prompt': 'x'}", b"nul", b"\x00", b'"\\ud8"')
    nested = (b"[" * 100_000, b'{"a":' * 50_000)
    for path in PATHS.values():
        for body in (*broken, *nested):
            yield Malformed(path, body, JSON, "not valid JSON")
        for body in (b"null", b"5", b"true", b'"x"', b"[]", b'[{"prompt": "x"}]', b"NaN"):
            yield Malformed(path, body, JSON, "object")
        for body in (b"\xff\xfe{\x00}\x00", b'{"prompt": "\xff"}', b"\xc0\x80", b"\xed\xa0\x80"):
            yield Malformed(path, body, JSON, "UTF-8")


def _texts() -> Iterator[Malformed]:
    """Bodies that are said to be text or a form."""
    for body in (b"\xff", b"good \xc3", b"\xf5\x80\x80\x80", "é".encode("utf-16"), "é".encode("latin-1")):
        yield Malformed("", body, TEXT, "UTF-8")
    for field, value in {
        "max_new_tokens": "0",
        "temperature": "hot",
        "top_k": "-1",
        "seed": "1_0",
        "stream": "2",
    }.items():
        yield Malformed("", f"prompt=x&{field}={value}".encode(), FORM, field)
    for path in ("v1/completions", "v1/chat/completions"):
        yield Malformed(path, b"prompt=x", FORM, "JSON")
