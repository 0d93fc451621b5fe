"""Whatever a body holds, it is a request or it is refused: nothing else comes out of it."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ts", reason="TorchServe is not installed")

from tests.corpus import JSON, MODEL, PATHS, Malformed, corpus
from tests.unit.fakes import FakeContext
from tests.unit.test_text_generation_handler import GOOD, Answering, body, call, make
from ts_pippy_handler import openai
from ts_pippy_handler.errors import InvalidRequestError
from ts_pippy_handler.payload import parse_request

CORPUS = corpus()


def item(malformed: Malformed) -> dict[str, Any]:
    """What the frontend makes of a body: form fields for a form, else the body, or its value where it parses JSON."""
    if "form" in malformed.content_type:
        pairs = (pair.partition("=") for pair in malformed.body.decode().split("&"))
        return {name: value.encode() for name, _, value in pairs}
    return {"body": malformed.body.replace(MODEL.encode(), b"fake")}


def test_the_corpus_is_large_and_without_repetition() -> None:
    assert len(CORPUS) == len({(each.path, each.body, each.content_type) for each in CORPUS}) >= 500


def test_every_malformed_body_is_refused_with_a_reason(model_dir: Path) -> None:
    handler = make(model_dir, Answering(), "continuous")
    wrong = []
    for each in CORPUS:
        ctx = FakeContext({}, ["request"])
        ctx.request_headers[0] = {"url_path": each.path, "content-type": each.content_type}
        handler._answered.clear()
        [answer] = call(handler, [item(each)], ctx)
        status = ctx.statuses.get(0, (200, ""))[0]
        if status != 400 or each.named not in answer["error"]["message"]:
            wrong.append((each.path, each.body[:80], status, answer))
    assert not wrong


def test_a_good_request_is_none_of_them(model_dir: Path) -> None:
    assert call(make(model_dir, Answering()), [GOOD], FakeContext({}, ["a"])) == [body("ab", 3)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({*openai.CompletionRequest.model_fields, *openai.ChatRequest.model_fields, "prompt", "input_ids"})
BODIES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=5)


@given(fields=BODIES, kind=st.sampled_from(sorted(PATHS)))
def test_any_fields_are_a_request_or_are_refused(fields: dict[str, Any], kind: str) -> None:
    data = {"body": json.dumps(fields).encode()}
    parse: Any = {
        "plain": lambda: parse_request(data, JSON).call(),
        "completions": lambda: openai.parse_completion(data, "1", None),
        "chat": lambda: openai.parse_chat(data, "1", None),
    }[kind]
    with contextlib.suppress(InvalidRequestError):
        parse()


@given(raw=st.binary(max_size=60), kind=st.sampled_from([JSON, "text/plain", "", "x"]))
def test_any_bytes_are_a_request_or_are_refused(raw: bytes, kind: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert parse_request({"body": raw}, kind).call().prompts


@pytest.mark.parametrize("mode", ["batch", "continuous", "async"])
def test_an_unexpected_error_is_one_request_s_alone(
    model_dir: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ts_pippy_handler.text_generation_handler.finish_async", lambda answers, ctx, **_: answers)
    handler = make(model_dir, Answering(), mode)
    assert handler.generator is not None
    encode = handler.generator._encode

    def defective(prompt: Any) -> list[int]:
        if prompt.text == "secret":
            raise KeyError(prompt.text)
        return encode(prompt)

    monkeypatch.setattr(handler.generator, "_encode", defective)
    ctx = FakeContext({}, ["0", "1", "2"])
    with caplog.at_level(logging.ERROR):
        answers = call(handler, [GOOD, {"body": {"prompt": "secret"}}, GOOD], ctx)
    assert answers[0] == answers[2] == body("ab", 3)
    assert ctx.statuses == {1: (500, "Internal Server Error")}
    message = answers[1]["error"]["message"]
    number = message.split(",")[1].split(":")[0].strip()
    assert number in caplog.text
    assert "KeyError" in caplog.text
    assert "defective" in caplog.text
    assert "secret" not in caplog.text + message
