"""The three ways TorchServe calls a handler; a bad request among good ones costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ts", reason="TorchServe is not installed")

from tests.models import byte_tokenizer
from tests.unit.fakes import FakeContext, FakeEngine, continuation
from ts_pippy_handler import TextGenerationHandler, base_pippy_handler, text_generation_handler
from ts_pippy_handler.config import HandlerConfig
from ts_pippy_handler.errors import OverloadedError, PipelineError, PippyError
from ts_pippy_handler.generator import Generator
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent
from ts_pippy_handler.text import Tokenizer

GOOD = {"body": {"prompt": "ab", "max_new_tokens": 3}}
BAD = {"body": {"prompt": "ab", "max_new_tokens": -1}}
PLAIN = {"body": b"abc"}


@pytest.fixture(autouse=True)
def answers_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous answers go out over TorchServe's socket, which the end-to-end tests have."""
    monkeypatch.setattr("ts_pippy_handler.text_generation_handler.finish_async", lambda answers, ctx, **_: answers)


class Answering(FakeEngine):
    """Answers each request as soon as it has been submitted."""

    def submit(self, *arguments: Any, **others: Any) -> int:
        number = super().submit(*arguments, **others)
        self.answer_all()
        return number


def make(model_dir: Path, engine: FakeEngine, mode: str = "batch", **settings: Any) -> TextGenerationHandler:
    """Return a handler as ``initialize`` leaves it on rank 0."""
    handler = TextGenerationHandler()
    config = HandlerConfig(model_path=str(model_dir), max_new_tokens=4, **settings)
    handler.generator = Generator(engine, Tokenizer(byte_tokenizer()), config)  # type: ignore[arg-type]
    handler._is_async = mode == "async"
    handler._is_continuous = mode == "continuous"
    handler._model_name = "fake"
    return handler


def context(num: int) -> FakeContext:
    return FakeContext({}, [f"request-{index}" for index in range(num)])


def call(handler: TextGenerationHandler, data: list[dict[str, Any]], ctx: FakeContext) -> list[Any]:
    """Return what a client reads: JSON where the answer says that it is."""
    answers: Any = handler.handle(data, ctx)
    if asyncio.iscoroutine(answers):
        answers = asyncio.run(answers)
    return [read(answer, ctx, index) for index, answer in enumerate(answers)]


def read(answer: str, ctx: FakeContext, index: int = 0) -> Any:
    return json.loads(answer) if ctx.content_types.get(index) == "application/json" else answer


def body(prompt: str, num: int) -> dict[str, Any]:
    tokens, _ = continuation(list(prompt.encode()), SamplingParams(max_new_tokens=num), eos=())
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num, "total_tokens": len(prompt) + num}
    text = byte_tokenizer().decode(tokens)
    return {"text": text, "token_ids": tokens, "finish_reason": "length", "usage": usage}


@pytest.mark.parametrize("mode", ["batch", "continuous", "async"])
def test_good_bad_good(model_dir: Path, mode: str) -> None:
    engine = Answering()
    ctx = context(4)
    answers = call(make(model_dir, engine, mode), [GOOD, BAD, PLAIN, GOOD], ctx)
    assert answers[0] == answers[3] == body("ab", 3)
    assert answers[1] == {
        "error": {"code": "invalid_request", "message": "max_new_tokens: must be a whole number, at least 1, got -1"}
    }
    assert answers[2] == body("abc", 4)["text"]
    assert ctx.statuses == {1: (400, "Bad Request")}
    assert ctx.content_types == {
        0: "application/json",
        1: "application/json",
        2: "text/plain; charset=utf-8",
        3: "application/json",
    }
    assert ctx.headers == {}
    assert list(ctx.request_ids) == [0, 1, 2, 3]
    assert len(engine.submitted) == 3
    assert json.dumps(answers)


@pytest.mark.parametrize("mode", ["batch", "continuous", "async"])
@pytest.mark.parametrize(
    ("error", "status"),
    [(OverloadedError("too many"), (429, "Too Many Requests")), (PipelineError("gone"), (503, "Service Unavailable"))],
)
def test_statuses_of_refusals(model_dir: Path, mode: str, error: PippyError, status: tuple[int, str]) -> None:
    engine = Answering()
    engine.refusal = error
    ctx = context(1)
    assert call(make(model_dir, engine, mode), [GOOD], ctx) == [error.as_dict()]
    assert ctx.statuses == {0: status}
    assert ctx.headers == {0: {"Retry-After": "1"}}
    assert ctx.content_types == {0: "application/json"}


@pytest.mark.parametrize("mode", ["batch", "continuous", "async"])
def test_a_pipeline_that_fails_meanwhile(model_dir: Path, mode: str) -> None:
    class Failing(FakeEngine):
        def submit(self, prompt: Any, params: Any, on_event: Any, **_: Any) -> int:
            error = PipelineError("rank 1 is gone")
            on_event(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error))
            return 0

    ctx = context(1)
    answers = call(make(model_dir, Failing(), mode), [GOOD], ctx)
    assert answers == [{"error": {"code": "pipeline_failed", "message": "rank 1 is gone"}}]
    assert ctx.statuses == {0: (503, "Service Unavailable")}


def test_logprobs_when_asked(model_dir: Path) -> None:
    sent = {"body": {"prompt": "ab", "max_new_tokens": 2, "logprobs": 1}}
    (answer,) = call(make(model_dir, Answering()), [sent], context(1))
    assert answer == body("ab", 2) | {
        "logprobs": [
            {"token_id": token, "logprob": -float(index), "top": [{"token_id": token, "logprob": -0.5}]}
            for index, token in enumerate(body("ab", 2)["token_ids"])
        ]
    }


def test_several_prompts_give_a_list(model_dir: Path) -> None:
    ctx = context(1)
    answers = call(make(model_dir, Answering()), [{"body": {"prompt": ["ab", "c"], "max_new_tokens": 2}}], ctx)
    assert answers == [[body("ab", 2), body("c", 2)]]


@pytest.mark.parametrize("mode", ["batch", "continuous", "async"])
def test_an_answer_too_large_to_send_becomes_an_error(model_dir: Path, mode: str) -> None:
    large = {"body": {"prompt": ["ab"] * 256, "max_new_tokens": 10, "logprobs": 20}}
    ctx = context(3)
    handler = make(model_dir, Answering(), mode, max_response_size=100_000)
    answers = call(handler, [GOOD, large, GOOD], ctx)
    assert answers[0] == answers[2] == body("ab", 3)
    message = answers[1]["error"]["message"]
    assert re.match(
        r"the answer has \d{7} bytes, but at most 100000 can be sent \(handler.max_response_size\)", message
    )
    assert ctx.statuses == {1: (400, "Bad Request")}


def test_json_is_recognised_by_its_content_type(model_dir: Path) -> None:
    ctx = context(3)
    sent = json.dumps(GOOD["body"]).encode()
    types = ("Content-Type", "application/json"), ("content-type", "application/json"), ("content-type", "text/plain")
    ctx.request_headers = {index: {name: value} for index, (name, value) in enumerate(types)}
    answers = call(make(model_dir, Answering()), [{"body": sent}] * 3, ctx)
    assert answers[0] == answers[1] == body("ab", 3)
    assert answers[2] == body(sent.decode(), 4)["text"]


def test_a_batch_is_complete_before_it_is_answered(model_dir: Path) -> None:
    engine = FakeEngine()
    handler = make(model_dir, engine)
    answers: list[list[Any]] = []
    calling = threading.Thread(target=lambda: answers.append(call(handler, [GOOD, PLAIN], context(2))))
    calling.start()
    for _ in range(2):
        while not engine._pending:
            calling.join(0.001)
        assert not answers
        engine.answer_oldest()
    calling.join(20)
    assert answers == [[body("ab", 3), body("abc", 4)["text"]]]


def test_asynchronous_requests_do_not_wait_for_each_other(model_dir: Path) -> None:
    engine = FakeEngine()
    handler = make(model_dir, engine, "async")

    async def both() -> tuple[list[Any], list[Any]]:
        slow = asyncio.create_task(handler.handle([GOOD], context(1)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        quick = asyncio.create_task(handler.handle([PLAIN], context(1)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        first, second = engine._pending
        threading.Thread(target=second).start()  # the engine answers on a thread of its own
        answer = await asyncio.wait_for(quick, 20)
        assert not slow.done()
        threading.Thread(target=first).start()
        return await asyncio.wait_for(slow, 20), answer

    [whole], [text] = asyncio.run(both())
    assert json.loads(whole) == body("ab", 3)
    assert text == body("abc", 4)["text"]


class Frontend:
    """Calls a handler as TorchServe's frontend does: again and again with all requests that are open."""

    def __init__(self, handler: TextGenerationHandler) -> None:
        self.handler = handler
        self.open: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, Any] = {}
        self.streams: dict[str, list[str]] = {}
        self.paths: dict[str, str] = {}
        self.context: FakeContext | None = None

    def turn(self) -> list[str]:
        """Call once; return the requests that were answered."""
        names = list(self.open)
        self.context = FakeContext({}, names)
        self.context.request_headers = {
            index: {"url_path": self.paths.get(name, "")} for index, name in enumerate(names)
        }
        answers = self.handler.handle(list(self.open.values()), self.context)
        assert len(answers) == len(names)
        done = []
        for index in self.context.request_ids:
            end = self.context.stopping_criteria[index](answers[index])  # type: ignore[index]
            if end is None:
                self.answers[names[index]] = read(answers[index], self.context, index)
            else:
                self.streams.setdefault(names[index], []).append(answers[index])
            if end is None or end:
                del self.open[names[index]]
                done.append(names[index])
        return done


@pytest.mark.parametrize(("mode", "allowed"), [("batch", True), ("continuous", True), ("async", False)])
def test_a_grpc_stream_that_the_frontend_could_not_carry_is_refused(model_dir: Path, mode: str, allowed: bool) -> None:
    handler = make(model_dir, Answering(), mode)
    handler._allows_grpc_streams = allowed
    ctx = context(1)
    ctx.is_grpc = True
    [answer] = call(handler, [{"data": b'{"prompt": "a", "stream": true}'}], ctx)
    assert answer["error"]["message"].startswith("stream: ")
    if mode == "continuous":
        assert ctx.stopping_criteria[0](answer) is True  # type: ignore[index]
    elif mode == "batch":
        assert ctx.headers[0]["ts_stream_next"] == "false"


@pytest.mark.parametrize("is_grpc", [False, True])
def test_an_asynchronous_grpc_call_gets_one_message(monkeypatch: pytest.MonkeyPatch, is_grpc: bool) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(base_pippy_handler, "_send_item", lambda body, *args, **kwargs: sent.append(body))
    ctx = context(1)
    ctx.is_grpc = is_grpc
    rest = base_pippy_handler.finish_async(["answer"], ctx)
    assert (sent, rest) == (([], ["answer"]) if is_grpc else (["answer"], [""]))
    assert ctx.headers[0]["ts_stream_next"] == "true", "which TorchServe's encoder turns to false: the last"


def test_continuous_batching_answers_what_has_finished(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous"))
    frontend.open = {"a": GOOD, "b": PLAIN}
    assert frontend.turn() == []
    frontend.open["c"] = BAD
    frontend.open["d"] = GOOD
    assert frontend.turn() == ["c"]
    assert frontend.context is not None
    assert frontend.context.statuses == {2: (400, "Bad Request")}
    assert len(engine.submitted) == 3, "open requests are not started again"
    engine._pending.pop(1)()
    assert frontend.turn() == ["b"]
    engine.answer_all()
    assert frontend.turn() == ["a", "d"]
    assert frontend.answers["a"] == frontend.answers["d"] == body("ab", 3)
    assert frontend.answers["b"] == body("abc", 4)["text"]
    assert frontend.handler._replies == {}


def test_a_request_is_answered_once_though_the_frontend_is_a_reply_behind(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous"))
    frontend.open = {"a": GOOD}
    frontend.turn()
    engine.answer_all()
    assert frontend.turn() == ["a"]
    frontend.open = {"a": GOOD, "b": GOOD}
    assert frontend.turn() == []
    engine.answer_all()
    assert frontend.turn() == ["b"]
    assert len(engine.submitted) == 2


def test_a_turn_ends_as_soon_as_something_finishes(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 60)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous"))
    frontend.open = {"a": GOOD, "b": GOOD}
    answered: list[list[str]] = []
    calling = threading.Thread(target=lambda: answered.append(frontend.turn()))
    calling.start()
    while len(engine._pending) < 2:
        calling.join(0.001)
    engine.answer_oldest()
    calling.join(20)
    assert answered == [["a"]]


def test_a_request_that_the_frontend_dropped_is_cancelled(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous"))
    frontend.open = {"gone": GOOD, "kept": GOOD}
    frontend.turn()
    del frontend.open["gone"]
    frontend.turn()
    assert engine.aborted == [0]
    assert list(frontend.handler._replies) == ["kept"]
    engine.answer_all()
    assert frontend.turn() == ["kept"]


def test_when_the_frontend_falls_silent_nobody_waits(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    monkeypatch.setattr(text_generation_handler, "_SILENCE_S", 0.05)
    engine = FakeEngine()
    handler = make(model_dir, engine, "continuous")
    frontend = Frontend(handler)
    frontend.open = {"gone": GOOD}
    frontend.turn()
    threading.Thread(target=handler._watch_frontend, daemon=True).start()
    deadline = time.monotonic() + 20
    while not engine.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.aborted == [0]


def test_a_stream_arrives_in_pieces(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous"))
    frontend.open = {"a": {"body": {"prompt": "ab", "max_new_tokens": 3, "stream": True}}, "b": GOOD}
    assert frontend.turn() == []
    engine.answer_all()
    assert frontend.turn() == ["b"], "headers go with a first piece that is not the last"
    assert frontend.turn() == ["a"]
    lines = [json.loads(line) for line in "".join(frontend.streams["a"]).splitlines()]
    whole = body("ab", 3)
    assert len(frontend.streams["a"]) == 2
    assert "".join(line.get("text", "") for line in lines) == whole["text"]
    assert [each for line in lines for each in line.get("token_ids", [])] == whole["token_ids"]
    assert [line["finish_reason"] for line in lines if "finish_reason" in line] == ["length"]
    assert lines[-1] == {"usage": whole["usage"]}


def test_a_stream_with_a_piece_too_large_to_send_ends_with_an_error(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous", max_response_size=70_000))
    wanted = {"prompt": ["ab"] * 100, "max_new_tokens": 10, "logprobs": 20, "stream": True}
    frontend.open["a"] = {"body": wanted}
    frontend.turn()
    engine.answer_all()
    assert frontend.turn() == ["a"]
    assert frontend.answers["a"]["error"]["code"] == "invalid_request"
    assert set(engine.aborted) == set(range(100))


def test_a_batch_cannot_stream(model_dir: Path) -> None:
    ctx = context(1)
    [answer] = call(make(model_dir, Answering()), [{"body": {"prompt": "ab", "stream": True}}], ctx)
    assert ctx.statuses == {0: (400, "Bad Request")}
    assert answer["error"]["message"].startswith("stream: this model cannot stream")


def test_ranks_above_0_answer_nothing() -> None:
    assert TextGenerationHandler().handle([GOOD, BAD], context(2)) == ["", ""]
