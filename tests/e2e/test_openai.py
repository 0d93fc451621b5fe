"""The official OpenAI client, unchanged, against TorchServe: streamed equals whole equals plain ``transformers``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.models import IM_END_ID, IM_START_ID, byte_tokenizer
from tests.oracle import hf_generate
from tests.texts import byte_texts, byte_tokens
from tests.torchserve import TorchServe

NEW_TOKENS = 40
TEXTS = byte_texts(16, 1, 200, seed=3)


@pytest.fixture
def client(server: TorchServe, llama: tuple[str, Path]) -> Iterator[openai.OpenAI]:
    name, _ = llama
    if name.startswith("torchrunbatch"):
        pytest.skip("without continuousBatching TorchServe cannot stream; what is refused then is tested below")
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.ports['inference']}/predictions/{name}/1.0/v1",
        api_key=server.key("inference"),
        max_retries=0,
        timeout=120,
    ) as made:
        yield made


def texts_of(model: Path, prompts: list[list[int]]) -> list[str]:
    references = hf_generate(model, prompts, NEW_TOKENS)
    return [byte_tokenizer().decode(each.token_ids, skip_special_tokens=True) for each in references]


def test_sixteen_streams_at_once_equal_whole_answers(client: openai.OpenAI, llama: tuple[str, Path]) -> None:
    name, model = llama
    expected = texts_of(model, [byte_tokens(text) for text in TEXTS])

    def whole(text: str) -> str:
        return client.completions.create(model=name, prompt=text, max_tokens=NEW_TOKENS, temperature=0).choices[0].text

    def streamed(text: str) -> tuple[str, int]:
        chunks = list(
            client.completions.create(model=name, prompt=text, max_tokens=NEW_TOKENS, temperature=0, stream=True)
        )
        assert len({chunk.id for chunk in chunks}) == 1
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
        return "".join(chunk.choices[0].text for chunk in chunks), len(chunks)

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(whole, TEXTS)) == expected
        answers = list(pool.map(streamed, TEXTS))
    assert [text for text, _ in answers] == expected
    assert max(num for _, num in answers) > 3, "it comes in pieces"


def test_a_chat_streamed_and_whole(client: openai.OpenAI, llama: tuple[str, Path]) -> None:
    name, model = llama
    said = "Grüße 👩‍👩‍👧!"
    prompt = [IM_START_ID, *b"user\n", *byte_tokens(said), IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]
    [expected] = texts_of(model, [prompt])
    whole = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": said}], max_tokens=NEW_TOKENS, temperature=0
    )
    assert whole.choices[0].message.content == expected
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": said}],
        max_tokens=NEW_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_models_and_errors(client: openai.OpenAI, llama: tuple[str, Path]) -> None:
    name, _ = llama
    assert [each.id for each in client.models.list()] == [name]
    assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens: must be a whole number, at least 1, got 0"):
        client.completions.create(model=name, prompt="a", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="suffix: text after the continuation is not supported"):
        client.completions.create(model=name, prompt="a", suffix="b", stream=True)
    with pytest.raises(openai.NotFoundError, match="path 'v1/embeddings' is not here"):
        client.embeddings.create(model=name, input="a")


def test_health_names_every_rank(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, _ = llama
    answer = server.health(name)
    health = answer.json()
    assert (answer.status, health["ready"], health["stages"]) == (200, True, 2)
    pids = [rank["pid"] for rank in health["ranks"]]
    assert set(pids) <= set(server.worker_pids(name))
    assert len(set(pids)) == 2
    assert {rank["state"] for rank in health["ranks"]} == {"ready"}
    assert health["requests"] == {"running": 0, "waiting": 0}
    assert health["kv_blocks"]["used"] == 0


def test_stop_strings_never_show_in_a_stream(client: openai.OpenAI, llama: tuple[str, Path]) -> None:
    name, model = llama
    [whole] = texts_of(model, [byte_tokens("Hello")])
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    chunks = client.completions.create(
        model=name, prompt="Hello", max_tokens=NEW_TOKENS, temperature=0, stop=[stop], stream=True
    )
    pieces = [(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks]
    assert "".join(text for text, _ in pieces) == expected
    assert [reason for _, reason in pieces if reason] == ["stop"]


def test_a_client_that_leaves_harms_nobody(client: openai.OpenAI, llama: tuple[str, Path], server: TorchServe) -> None:
    name, model = llama
    [expected] = texts_of(model, [byte_tokens("Hello")])
    leaving = client.completions.create(
        model=name, prompt="a", max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(
            client.completions.create, model=name, prompt="Hello", max_tokens=NEW_TOKENS, temperature=0
        )
        next(iter(leaving))
        leaving.close()
        assert staying.result().choices[0].text == expected
    time.sleep(0.5)
    again = client.completions.create(model=name, prompt="Hello", max_tokens=NEW_TOKENS, temperature=0)
    assert again.choices[0].text == expected


def test_the_plain_contract_streams_lines(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, model = llama
    if name.startswith("torchrunbatch"):
        refused = server.post(name, {"prompt": "Hello", "stream": True})
        assert refused.status == 400
        assert "cannot stream" in refused.json()["error"]["message"]
        return
    [expected] = texts_of(model, [byte_tokens("Hello")])
    response = server.post(name, {"prompt": "Hello", "max_new_tokens": NEW_TOKENS, "stream": True})
    assert response.status == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line.get("text", "") for line in lines) == expected
    assert lines[-1]["usage"]["completion_tokens"] == sum(len(line.get("token_ids", [])) for line in lines)
