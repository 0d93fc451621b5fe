"""Answers over HTTP from real TorchServe equal plain ``transformers``, in every launch mode."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.client import Response
from tests.models import IM_END_ID, IM_START_ID, Checkpoints, byte_tokenizer
from tests.oracle import MIN_MARGIN, Reference, hf_generate, smallest_margin
from tests.packages import LAUNCHES, Launch, Packages
from tests.texts import byte_texts, byte_tokens
from tests.torchserve import TorchServe

NEW_TOKENS = 48
TEXTS = byte_texts(32, 1, 400, seed=1)
PROMPTS = [byte_tokens(text) for text in TEXTS]


def check(answers: Sequence[Any], prompts: Sequence[Sequence[int]], references: Sequence[Reference]) -> None:
    assert smallest_margin(references) > MIN_MARGIN
    for answer, prompt, reference in zip(answers, prompts, references, strict=True):
        assert answer["token_ids"] == reference.token_ids
        assert answer["finish_reason"] == reference.finish_reason
        used = len(prompt), len(reference.token_ids)
        assert answer["usage"] == {
            "prompt_tokens": used[0],
            "completion_tokens": used[1],
            "total_tokens": sum(used),
        }


def bodies(responses: Sequence[Response]) -> list[Any]:
    assert {response.status for response in responses} == {200}, [response.body for response in responses]
    return [response.json() for response in responses]


def wish(prompt: Any, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_new_tokens": NEW_TOKENS, **others}


def test_requests_at_once(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    answers = bodies(server.post_all(name, [wish(text) for text in TEXTS]))
    check(answers, PROMPTS, hf_generate(model, PROMPTS, NEW_TOKENS))
    tokenizer = byte_tokenizer()
    for answer in answers:
        assert answer["text"] == tokenizer.decode(answer["token_ids"], skip_special_tokens=True)


def test_a_list_of_prompts_gives_a_list_of_answers(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    response = server.post(name, wish(TEXTS))
    [answers] = bodies([response])
    check(answers, PROMPTS, hf_generate(model, PROMPTS, NEW_TOKENS))
    [single] = bodies([server.post(name, wish(TEXTS[:1]))])
    check(single, PROMPTS[:1], hf_generate(model, PROMPTS[:1], NEW_TOKENS))


def test_lists_and_single_prompts_of_several_clients(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    references = hf_generate(model, PROMPTS[:10], NEW_TOKENS)
    parts = [slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 10)]
    answers = bodies(server.post_all(name, [wish(TEXTS[part]) for part in parts] + [wish(TEXTS[0])]))
    for part, answer in zip(parts, answers, strict=False):
        check(answer, PROMPTS[part], references[part])
    check(answers[-1:], PROMPTS[:1], references[:1])


def test_plain_text_form_and_chat(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    text = "Grüße, 漢字 😀"
    [reference] = hf_generate(model, [byte_tokens(text)], NEW_TOKENS)

    form = urllib.parse.urlencode(wish(text)).encode()
    [answer] = bodies([server.post(name, form, "application/x-www-form-urlencoded")])
    check([answer], [byte_tokens(text)], [reference])

    part = "--limit\r\nContent-Disposition: form-data; name={}\r\n\r\n{}\r\n"
    multipart = "".join(part.format(key, value) for key, value in wish(text).items()) + "--limit--\r\n"
    [answer] = bodies([server.post(name, multipart.encode(), "multipart/form-data; boundary=limit")])
    check([answer], [byte_tokens(text)], [reference])

    chat = [IM_START_ID, *b"user\n", *byte_tokens(text), IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]
    messages = [{"role": "user", "content": text}]
    [answer] = bodies([server.post(name, {"messages": messages, "max_new_tokens": NEW_TOKENS})])
    check([answer], [chat], hf_generate(model, [chat], NEW_TOKENS))


def test_a_text_body_gets_a_text_answer(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    response = server.post(name, "Hello")
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/plain")
    [reference] = hf_generate(model, [byte_tokens("Hello")], 256)
    assert response.text == byte_tokenizer().decode(reference.token_ids, skip_special_tokens=True)


def test_sampling_is_reproducible_by_its_seed(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, _ = llama
    wishes = [wish("Hello", temperature=2.5, top_k=50, top_p=0.95, seed=seed, ignore_eos=True) for seed in (5, 6, 5)]
    together = bodies(server.post_all(name, wishes))
    assert together[0] == together[2] != together[1]
    assert bodies([server.post(name, wishes[0])]) == together[:1]


def test_a_stop_string_ends_the_text_before_it(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    [reference] = hf_generate(model, [byte_tokens("Hello")], NEW_TOKENS, ignore_eos=True)
    text = byte_tokenizer().decode(reference.token_ids, skip_special_tokens=True)
    stop = next(character for character in text[5:] if character.isascii() and character not in text[:5])
    [answer] = bodies([server.post(name, wish("Hello", stop=["not in it", stop], ignore_eos=True))])
    assert answer["text"] == text.partition(stop)[0]
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("family", "stages", "launch"),
    [
        pytest.param("opt", 1, "torchrun", marks=pytest.mark.slow),
        ("mistral", 3, "torchrun"),
        pytest.param("gpt2", 2, "torchrun-batch", marks=pytest.mark.slow),
        ("qwen3", 3, "spawn"),
        pytest.param("gemma2", 4, "spawn", marks=pytest.mark.slow),
    ],
)
def test_families(
    server: TorchServe, packages: Packages, checkpoints: Checkpoints, family: str, stages: int, launch: Launch
) -> None:
    model = checkpoints(family)
    name = packages(model, stages, launch)
    server.register(name, f"{name}.mar")
    try:
        answers = bodies(server.post_all(name, [wish(text) for text in TEXTS]))
        check(answers, PROMPTS, hf_generate(model, PROMPTS, NEW_TOKENS))
    finally:
        server.unregister(name)


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_smollm2(server: TorchServe, packages: Packages, smollm2: Path, smollm2_expected: Any, launch: Launch) -> None:
    texts, prompts, references = smollm2_expected
    name = packages(smollm2, 2, launch)
    server.register(name, f"{name}.mar")
    try:
        check(bodies(server.post_all(name, [wish(text) for text in texts])), prompts, references)
        check(server.post(name, wish(texts)).json(), prompts, references)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [answer] = bodies([server.post(name, {"messages": question, "max_new_tokens": 20})])
        assert "Paris" in answer["text"]
    finally:
        server.unregister(name)
