"""Prompts of every kind reach the engine as tokens, and its tokens come back as one answer with the right end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import byte_tokenizer
from tests.unit.fakes import FakeEngine
from ts_pippy_handler.completion import Completion
from ts_pippy_handler.config import HandlerConfig
from ts_pippy_handler.errors import InvalidRequestError, OverloadedError, PipelineError, PippyError
from ts_pippy_handler.generator import Generator, Prompt, Wishes
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from ts_pippy_handler.text import Tokenizer


def make(model_dir: Path, engine: FakeEngine | None = None, *, tokenizer: bool = True, **handler: Any) -> Generator:
    config = HandlerConfig(model_path=str(model_dir), **handler)
    core = Tokenizer(byte_tokenizer()) if tokenizer else None
    return Generator(engine or FakeEngine(), core, config)  # type: ignore[arg-type]


def params_of(generator: Generator, wishes: Wishes, prompt: str = "abc") -> SamplingParams:
    generator.submit(Prompt(text=prompt), wishes)
    return generator.engine.submitted[-1][1]  # type: ignore[attr-defined]


def test_kinds_of_prompts(model_dir: Path) -> None:
    generator = make(model_dir)
    messages = [{"role": "user", "content": "Hi"}]
    prompts = [Prompt(text="é"), Prompt(token_ids=(4, 5)), Prompt(messages=messages)]
    generator.submit_all(prompts, Wishes(max_new_tokens=1))
    chat = generator.tokenizer.encode_chat(messages)
    assert [tokens for tokens, _ in generator.engine.submitted] == [list("é".encode()), [4, 5], chat]


def test_wishes_become_parameters(model_dir: Path) -> None:
    wishes = Wishes(max_new_tokens=3, temperature=0.5, top_k=7, top_p=0.9, seed=0, stop=("x",), ignore_eos=True)
    assert params_of(make(model_dir, manual_seed=9), wishes) == SamplingParams(
        max_new_tokens=3, temperature=0.5, top_k=7, top_p=0.9, seed=0, stop=("x",), ignore_eos=True
    )


def test_every_wish_about_tokens_becomes_a_parameter(model_dir: Path) -> None:
    wished: dict[str, Any] = {
        "max_new_tokens": 4,
        "min_p": 0.2,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": ((3, 1.0),),
        "stop_token_ids": (5,),
        "min_tokens": 2,
        "logprobs": 0,
    }
    assert params_of(make(model_dir, manual_seed=9), Wishes(**wished)) == SamplingParams(seed=9, **wished)


def test_an_answer_has_logprobs_when_asked(model_dir: Path) -> None:
    generator = make(model_dir)
    asked, plain = (
        generator.submit(Prompt(text="ab"), Wishes(max_new_tokens=3, logprobs=number)) for number in (1, None)
    )
    generator.engine.answer_all()
    answer = asked.answer()
    assert answer.logprobs == [TokenLogprobs(-float(i), [(t, -0.5)]) for i, t in enumerate(answer.token_ids)]
    assert plain.answer().logprobs is None


def test_defaults(model_dir: Path) -> None:
    engine = FakeEngine(max_len=1000)
    params = params_of(make(model_dir, engine, manual_seed=9, max_new_tokens=33), Wishes())
    assert params == SamplingParams(max_new_tokens=33, seed=9)


def test_without_any_seed_every_request_draws_its_own(model_dir: Path) -> None:
    generator = make(model_dir)
    seeds = {params_of(generator, Wishes()).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_default_number_of_new_tokens_fits_what_is_left_but_a_wish_is_not_cut(model_dir: Path) -> None:
    generator = make(model_dir, FakeEngine(max_len=10), max_new_tokens=256)
    assert params_of(generator, Wishes(), "abcdefg").max_new_tokens == 3
    assert params_of(generator, Wishes(), "abcdefghijklmn").max_new_tokens == 1
    assert params_of(generator, Wishes(max_new_tokens=50), "abcdefg").max_new_tokens == 50


@pytest.mark.parametrize(
    ("prompt", "wishes", "tokenizer", "message"),
    [
        (Prompt(text=""), Wishes(), True, r"^the prompt is empty, at least one character is needed$"),
        (Prompt(text="x"), Wishes(), False, r"^this model has no tokenizer; send token ids$"),
        (Prompt(messages=[]), Wishes(), False, r"^this model has no tokenizer; send token ids"),
        (Prompt(token_ids=[1]), Wishes(stop=("a",)), False, r"^stop: this model has no tokenizer, so stop strings ca"),
        (
            Prompt(text="123456"),
            Wishes(),
            True,
            r"^the prompt has 6 tokens, but this model takes at most 5 \(handler.max_length\)$",
        ),
    ],
)
def test_what_cannot_be_honoured(
    model_dir: Path, prompt: Prompt, wishes: Wishes, tokenizer: bool, message: str
) -> None:
    generator = make(model_dir, tokenizer=tokenizer, max_length=5)
    with pytest.raises(InvalidRequestError, match=message):
        generator.submit(prompt, wishes)
    assert not generator.engine.submitted


def test_a_prompt_of_exactly_the_longest_length(model_dir: Path) -> None:
    make(model_dir, max_length=5).submit(Prompt(text="12345"), Wishes())


def test_a_request_beyond_the_limits_is_refused_before_its_prompt_is_encoded(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(model_dir)
    generator.engine.refusal = OverloadedError("too many")  # type: ignore[attr-defined]
    monkeypatch.setattr(generator.tokenizer, "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(OverloadedError):
        generator.submit(Prompt(text="abc"), Wishes())


def test_several_prompts_start_all_or_none(model_dir: Path) -> None:
    generator = make(model_dir)
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        generator.submit_all([Prompt(text="a"), Prompt(text="")], Wishes())
    assert not generator.engine.submitted
    failing = make(model_dir, FakeEngine(fail_at=2))
    with pytest.raises(PippyError, match=r"^request 2 cannot start$"):
        failing.submit_all([Prompt(text="a"), Prompt(text="b"), Prompt(text="c")], Wishes())
    assert failing.engine.aborted == [0, 1]


def test_an_answer(model_dir: Path) -> None:
    generator = make(model_dir)
    completion = generator.submit(Prompt(text="ab"), Wishes(max_new_tokens=3))
    assert not completion.done.is_set()
    generator.engine.answer_all()
    assert completion.done.is_set()
    answer = completion.answer()
    assert answer.prompt_token_ids == list(b"ab")
    assert len(answer.token_ids) == 3
    assert answer.text == byte_tokenizer().decode(answer.token_ids)
    assert answer.finish_reason is FinishReason.LENGTH


def test_cancelling(model_dir: Path) -> None:
    generator = make(model_dir)
    completions = generator.submit_all([Prompt(text="a"), Prompt(text="b")], Wishes())
    generator.cancel(completions)
    assert generator.engine.aborted == [0, 1]
    generator.engine.answer_all()
    assert [each.answer().finish_reason for each in completions] == [FinishReason.ABORT] * 2


def feed(completion: Completion, text: bytes, last: FinishReason | None = None) -> list[bool]:
    reasons = [None] * (len(text) - 1) + [last]
    return [
        completion.take(TokenEvent(token_id=byte, finish_reason=reason))
        for byte, reason in zip(text, reasons, strict=True)
    ]


def completion(*stop: str, tokenizer: bool = True) -> Completion:
    core = Tokenizer(byte_tokenizer()) if tokenizer else None
    return Completion([1], SamplingParams(max_new_tokens=99, stop=stop), core)


def test_a_stop_string_ends_the_text_before_it() -> None:
    stopped = completion("END")
    assert feed(stopped, b"well EN") == [False] * 7
    assert not stopped.done.is_set()
    assert stopped.take(TokenEvent(token_id=ord("D"))), "the engine must be told to stop"
    assert not stopped.take(TokenEvent(token_id=ord("!"))), "what was under way is not taken"
    assert not stopped.take(TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))
    answer = stopped.answer()
    assert answer.text == "well "
    assert answer.token_ids == list(b"well END")
    assert answer.finish_reason is FinishReason.STOP


def test_a_stop_string_with_the_last_token_counts_as_stop() -> None:
    stopped = completion("z")
    assert feed(stopped, b"xyz", FinishReason.LENGTH) == [False, False, False], "it has ended at the engine by itself"
    assert stopped.answer().finish_reason is FinishReason.STOP
    assert stopped.answer().text == "xy"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_the_engines_own_end(reason: FinishReason) -> None:
    ended = completion("nowhere")
    feed(ended, "ab🎉".encode(), reason)
    assert (ended.answer().text, ended.answer().finish_reason) == ("ab🎉", reason)


def test_a_failed_pipeline_is_raised_to_the_one_who_asks() -> None:
    failed = completion()
    feed(failed, b"ab")
    error = PipelineError("rank 1 is gone")
    failed.take(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error))
    with pytest.raises(PipelineError, match=r"^rank 1 is gone$"):
        failed.answer()


def test_without_a_tokenizer_there_is_no_text() -> None:
    ended = completion(tokenizer=False)
    feed(ended, b"ab", FinishReason.LENGTH)
    assert ended.answer().text is None
    assert ended.answer().token_ids == [97, 98]


def test_callbacks_are_called_once_before_and_after_the_end() -> None:
    calls: list[str] = []
    ended = completion()
    ended.add_callback(lambda: calls.append("early"))
    feed(ended, b"a", None)
    assert calls == []
    feed(ended, b"b", FinishReason.LENGTH)
    ended.add_callback(lambda: calls.append("late"))
    ended.take(TokenEvent(token_id=1, finish_reason=FinishReason.LENGTH))
    assert calls == ["early", "late"]
