"""OpenAI's paths: shapes, streams, refusals; the real client is in the end-to-end tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("ts", reason="TorchServe is not installed")

from tests.models import byte_tokenizer
from tests.unit.fakes import FakeContext, FakeEngine, continuation
from tests.unit.test_text_generation_handler import Answering, Frontend, call, make
from ts_pippy_handler import text_generation_handler
from ts_pippy_handler.completion import Completion
from ts_pippy_handler.errors import CheckpointError, OverloadedError, PipelineError, PippyError
from ts_pippy_handler.openai_formats import ChatFormat, CompletionFormat
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from ts_pippy_handler.text import Tokenizer

COMPLETION = {"model": "fake", "prompt": "ab", "max_tokens": 3, "temperature": 0}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


def ask(model_dir: Path, path: str, body: Any, engine: FakeEngine | None = None) -> tuple[int, Any, FakeContext]:
    """Send one request to a path; return status, body and context."""
    ctx = FakeContext({}, ["request-0"])
    ctx.request_headers[0] = {"url_path": path}
    data = {} if body is None else {"body": body}
    [answer] = call(make(model_dir, engine or Answering()), [data], ctx)
    return ctx.statuses.get(0, (200, ""))[0], answer, ctx


def new_text(prompt: str, num: int) -> str:
    tokens, _ = continuation(list(prompt.encode()), SamplingParams(max_new_tokens=num), eos=())
    return byte_tokenizer().decode(tokens)


def refusal(model_dir: Path, path: str, body: Any) -> str:
    status, answer, _ = ask(model_dir, path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    return str(answer["error"]["message"])


def test_a_completion(model_dir: Path) -> None:
    status, answer, ctx = ask(model_dir, "v1/completions", COMPLETION)
    assert status == 200
    assert ctx.content_types[0] == "application/json"
    created = answer.pop("created")
    assert isinstance(created, int)
    assert answer == {
        "id": "cmpl-request-0",
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": new_text("ab", 3), "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }


def test_a_chat(model_dir: Path) -> None:
    status, answer, _ = ask(model_dir, "v1/chat/completions", CHAT)
    assert status == 200
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    num_prompt = len(byte_tokenizer()(prompt)["input_ids"])
    assert answer["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 3, "total_tokens": num_prompt + 3}


def test_content_in_parts_is_joined(model_dir: Path) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    whole = ask(model_dir, "v1/chat/completions", CHAT)[1]
    joined = ask(model_dir, "v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": parts}]})[1]
    assert joined["choices"] == whole["choices"]


def test_several_prompts_and_choices(model_dir: Path) -> None:
    status, answer, _ = ask(model_dir, "v1/completions", COMPLETION | {"prompt": ["ab", "abc"], "n": 2})
    assert status == 200
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, new_text("ab", 3)), (1, new_text("ab", 3)), (2, new_text("abc", 3)), (3, new_text("abc", 3))]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]]])
def test_prompts_as_token_ids(model_dir: Path, prompt: Any) -> None:
    _, answer, _ = ask(model_dir, "v1/completions", COMPLETION | {"prompt": prompt, "echo": True})
    assert answer["choices"][0]["text"] == "ab" + new_text("ab", 3)


def test_choices_have_seeds_of_their_own(model_dir: Path) -> None:
    engine = Answering()
    ask(model_dir, "v1/completions", COMPLETION | {"n": 3, "seed": 7, "temperature": 1}, engine)
    assert [params.seed for _, params in engine.submitted] == [7, 8, 9]


def test_defaults_are_openais(model_dir: Path) -> None:
    engine = Answering()
    ask(model_dir, "v1/completions", {"model": "fake", "prompt": "ab"}, engine)
    [(_, params)] = engine.submitted
    assert params.temperature == 1.0
    assert params.max_new_tokens == 16


def test_the_models(model_dir: Path) -> None:
    status, answer, _ = ask(model_dir, "v1/models", None)
    assert status == 200
    assert [each["id"] for each in answer["data"]] == ["fake"]
    assert ask(model_dir, "v1/models/fake", None)[1]["object"] == "model"
    assert ask(model_dir, "v1/models/other", None)[0] == 404


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
def test_health(model_dir: Path, ready: bool, status: int) -> None:
    engine = Answering()
    engine.health = lambda: {"ready": ready}  # type: ignore[attr-defined]
    assert ask(model_dir, "v1/health", None, engine)[:2] == (status, {"ready": ready, "drain": None})


def test_another_model_or_path_is_not_found(model_dir: Path) -> None:
    status, answer, _ = ask(model_dir, "v1/completions", COMPLETION | {"model": "gpt-4"})
    assert status == 404
    assert answer["error"]["message"] == "model: 'gpt-4' is not served here, only 'fake' is"
    status, answer, _ = ask(model_dir, "v1/embeddings", COMPLETION)
    assert status == 404
    assert "v1/chat/completions" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suffix": "x"}, "suffix: text after the continuation is not supported, got 'x'; leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format: constrained output is not supported"),
        ({"best_of": 3}, "best_of: must be left out or equal to n (1), got 3"),
        ({"tempreature": 1}, "tempreature: unknown key (value 1); did you mean 'temperature'?"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number, at least 1, got 0"),
        ({"max_tokens": "5"}, "max_tokens: must be a whole number, at least 1, got '5'"),
        ({"prompt": ""}, "prompt: must be a text, a list of token ids"),
        ({"prompt": []}, "prompt: must be a text, a list of token ids"),
        ({"n": 0}, "n: must be a whole number"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs 'stream': true"),
        ({"store": True}, "store: nothing is stored here"),
        ({"service_tier": "priority"}, "service_tier: a choice of service tiers is not supported, got 'priority'"),
        ({"prompt": "a\ud800"}, "prompt: must be a text, a list of token ids"),
        ({"temperature": -1}, "temperature: must be a number, at least 0"),
    ],
)
def test_refusals(model_dir: Path, change: dict[str, Any], message: str) -> None:
    assert refusal(model_dir, "v1/completions", COMPLETION | change).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: must be a list of at least one"),
        ({"messages": "Hi"}, "messages: must be a list of at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: content parts must be"),
        ({"max_completion_tokens": 4}, "max_tokens and max_completion_tokens are the same"),
        ({"tool_choice": "required"}, "tool_choice: must be 'auto' or 'none', got 'required'"),
        ({"functions": []}, "functions: function calling"),
    ],
)
def test_refusals_of_chats(model_dir: Path, change: dict[str, Any], message: str) -> None:
    assert refusal(model_dir, "v1/chat/completions", CHAT | change).startswith(message)


@pytest.mark.parametrize("body", [b"{", b"\xff", [], None, b""])
def test_bodies_that_are_no_object(model_dir: Path, body: Any) -> None:
    assert refusal(model_dir, "v1/completions", body)


def test_harmless_parameters_pass(model_dir: Path) -> None:
    body = CHAT | {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False}
    body |= {"service_tier": "auto", "verbosity": "medium", "prompt_cache_key": "a", "safety_identifier": "b"}
    assert ask(model_dir, "v1/chat/completions", body)[0] == 200


def test_a_request_can_be_cancelled_by_its_id(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    engine = FakeEngine()
    frontend = Frontend(make(model_dir, engine, "continuous"))
    frontend.paths = {"a": "v1/completions", "b": "v1/cancel", "c": "v1/cancel", "d": "v1/cancel"}
    frontend.open["a"] = {"body": COMPLETION}
    frontend.turn()
    frontend.open |= {"b": {"body": {"id": "cmpl-a"}}, "c": {"body": {"id": "zz"}}, "d": {"body": {}}}
    assert frontend.turn() == ["b", "c", "d"]
    assert frontend.answers["b"] == {"id": "a", "cancelled": True}
    assert frontend.answers["c"]["error"]["message"] == "no request 'zz' is running here"
    assert frontend.answers["d"]["error"]["code"] == "invalid_request"
    assert engine.aborted == [0]
    engine.answer_all()
    assert frontend.turn() == ["a"]
    assert frontend.answers["a"]["choices"][0]["finish_reason"] == "abort"


def test_time_limits_and_others(model_dir: Path) -> None:
    engine = Answering()
    ask(model_dir, "v1/completions", COMPLETION, engine)
    ask(model_dir, "v1/completions", COMPLETION | {"timeout": 2.5}, engine)
    ask(model_dir, "v1/completions", COMPLETION | {"timeout": 1e9}, engine)
    assert engine.timeouts == [600, 2.5, 600]
    said = refusal(model_dir, "v1/completions", COMPLETION | {"n": 33})
    assert said == "n: 33 choices, but this model gives at most 32 (handler.max_choices)"


@pytest.mark.parametrize(("error", "status"), [(OverloadedError("full"), 429), (PipelineError("gone"), 503)])
def test_statuses(model_dir: Path, error: PippyError, status: int) -> None:
    engine = FakeEngine()
    engine.refusal = error
    got, answer, ctx = ask(model_dir, "v1/completions", COMPLETION, engine)
    assert got == status
    assert answer["error"]["message"] == str(error)
    assert ctx.headers[0]["Retry-After"] == "1"


def events(frontend: Frontend, name: str) -> list[Any]:
    """Return the events of a stream, parsed; the end mark as a text."""
    text = "".join(frontend.streams[name])
    assert text.endswith("\n\n")
    payloads = [block.removeprefix("data: ") for block in text.removesuffix("\n\n").split("\n\n")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@pytest.fixture
def stream(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run one streamed request; return its events."""

    def run(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> list[Any]:
        monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
        frontend = Frontend(make(model_dir, engine or Answering(), "continuous"))
        frontend.paths["a"] = path
        frontend.open["a"] = {"body": body | {"stream": True}}
        for _ in range(20):
            frontend.turn()
        assert not frontend.open
        return events(frontend, "a")

    return run


def test_a_streamed_completion(stream: Any) -> None:
    got = stream("v1/completions", COMPLETION)
    assert got[-1] == "[DONE]"
    assert "".join(choice["text"] for event in got[:-1] for choice in event["choices"]) == new_text("ab", 3)
    assert [event["choices"][0]["finish_reason"] for event in got[:-1]][-1] == "length"
    assert all("usage" not in event for event in got[:-1])
    assert len({event["id"] for event in got[:-1]}) == 1


def test_a_streamed_chat_begins_with_its_role_and_ends_with_its_usage(stream: Any) -> None:
    got = stream("v1/chat/completions", CHAT | {"n": 2, "stream_options": {"include_usage": True}})
    assert [event["choices"][0]["delta"] for event in got[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [event["choices"][0]["index"] for event in got[:2]] == [0, 1]
    assert got[-1] == "[DONE]"
    assert got[-2]["choices"] == []
    assert got[-2]["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in got[:-2])
    for number in range(2):
        parts = [choice for event in got[:-1] for choice in event["choices"] if choice["index"] == number]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]


def test_a_stream_repeats_the_prompt_once(stream: Any) -> None:
    got = stream("v1/completions", COMPLETION | {"echo": True, "n": 2})
    for number in range(2):
        texts = [c["text"] for event in got[:-1] for c in event["choices"] if c["index"] == number]
        assert "".join(texts) == "ab" + new_text("ab", 3)


def test_a_refused_stream_is_a_plain_error(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation_handler, "_TURN_S", 0.001)
    frontend = Frontend(make(model_dir, Answering(), "continuous"))
    frontend.paths["a"] = "v1/completions"
    frontend.open["a"] = {"body": COMPLETION | {"stream": True, "max_tokens": 0}}
    assert frontend.turn() == ["a"]
    assert frontend.answers["a"]["error"]["type"] == "invalid_request_error"
    assert frontend.context is not None
    assert frontend.context.statuses == {0: (400, "Bad Request")}


def test_logprobs_of_completions(model_dir: Path) -> None:
    engine = Likely()
    _, answer, _ = ask(model_dir, "v1/completions", COMPLETION | {"logprobs": 1}, engine)
    [choice] = answer["choices"]
    got = choice["logprobs"]
    assert "".join(got["tokens"]) == choice["text"]
    assert got["token_logprobs"] == [-0.5] * 3
    assert got["text_offset"] == [0, 1, 2]
    assert all(set(top.values()) == {-0.25, -0.5} for top in got["top_logprobs"])


def test_logprobs_of_chats(model_dir: Path) -> None:
    _, answer, _ = ask(model_dir, "v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}, Likely())
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert all(each["logprob"] == -0.5 and len(each["top_logprobs"]) == 1 for each in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert (
        refusal(model_dir, "v1/chat/completions", CHAT | {"top_logprobs": 1}) == "top_logprobs: needs 'logprobs': true"
    )


class Likely(Answering):
    """Reports log-probabilities with every token."""

    def submit(self, prompt: Any, params: Any, on_event: Any, **others: Any) -> int:
        logprobs = TokenLogprobs(-0.5, [(ord("z"), -0.25)])
        return super().submit(prompt, params, lambda event: on_event(replace(event, logprobs=logprobs)), **others)


def test_logprobs_of_half_characters_are_told_apart_and_counted_right() -> None:
    tokens = list("aé!".encode())
    completion = Completion([1], SamplingParams(max_new_tokens=4, logprobs=2), Tokenizer(byte_tokenizer()))
    for number, token_id in enumerate(tokens):
        logprobs = TokenLogprobs(-0.5, [(0xC3, -0.25), (0xA9, -1.0)])
        reason = FinishReason.LENGTH if number == 3 else None
        completion.take(TokenEvent(token_id=token_id, logprobs=logprobs, finish_reason=reason))
    form = CompletionFormat("id", "fake", 1, Tokenizer(byte_tokenizer()), with_usage=False, with_prompt=False)
    got = form.choice(0, completion)["logprobs"]
    assert got["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert got["text_offset"] == [0, 1, 1, 2]
    assert got["top_logprobs"][0] == {"a": -0.5, "bytes:\\xc3": -0.25, "bytes:\\xa9": -1.0}
    chat = ChatFormat("id", "fake", 1, Tokenizer(byte_tokenizer()), with_usage=False).choice(0, completion)
    assert [each["bytes"] for each in chat["logprobs"]["content"]] == [[token] for token in tokens]


def test_alternatives_that_read_alike_are_told_apart() -> None:
    class Alike:
        def token_text(self, token_id: int) -> str:
            return "same"

    form = CompletionFormat("id", "fake", 1, cast(Any, Alike()), with_usage=False, with_prompt=False)
    assert form._alternatives([(5, -0.5), (5, -0.5), (6, -1.0)]) == {"same": -0.5, "token_id:6": -1.0}


def test_defaults_of_the_checkpoint(model_dir: Path) -> None:
    written = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}
    (model_dir / "generation_config.json").write_text(json.dumps(written))
    engine = Answering()
    ask(model_dir, "v1/completions", {"model": "fake", "prompt": "ab"}, engine)
    ask(model_dir, "v1/completions", {"model": "fake", "prompt": "ab", "temperature": 0, "top_p": 1}, engine)
    ask(model_dir, "", {"prompt": "ab"}, engine)
    seen = [(each.temperature, each.top_p, each.repetition_penalty) for _, each in engine.submitted]
    assert seen == [(0.6, 0.9, 1.05), (0, 1, 1.05), (0, 0.9, 1.05)]


@pytest.mark.parametrize("wrong", [{"top_p": 2}, {"top_k": "x"}, {"temperature": -1}, {"repetition_penalty": 0}])
def test_defaults_that_make_no_sense_are_refused_at_load(model_dir: Path, wrong: dict[str, Any]) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match=f"generation_config.json: {next(iter(wrong))}: must be"):
        make(model_dir, FakeEngine())
