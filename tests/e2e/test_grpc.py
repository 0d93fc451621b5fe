"""TorchServe's gRPC inference API: the same answers as over HTTP, in every launch mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.grpc_client import GrpcClient
from tests.oracle import Reference, hf_generate
from tests.packages import Packages
from tests.texts import byte_texts, byte_tokens
from tests.torchserve import TorchServe

NEW_TOKENS = 24
TEXTS = byte_texts(8, 3, 60, seed=4)


@pytest.fixture
def client(server: TorchServe, llama: tuple[str, Path]) -> Iterator[GrpcClient]:
    key = json.loads((server.folder / "key_file.json").read_text())["inference"]["key"]
    client = GrpcClient(server.ports["grpc"], key)
    yield client
    client.close()


def wish(text: str, **others: Any) -> dict[str, Any]:
    return {"prompt": text, "max_new_tokens": NEW_TOKENS, **others}


def references(model: Path) -> list[Reference]:
    return hf_generate(model, [byte_tokens(text) for text in TEXTS], NEW_TOKENS)


def test_whole_answers(client: GrpcClient, llama: tuple[str, Path]) -> None:
    name, model = llama
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        answers = list(pool.map(lambda text: json.loads(client.predict(name, wish(text))), TEXTS))
    assert [answer["token_ids"] for answer in answers] == [each.token_ids for each in references(model)]


def test_streams(client: GrpcClient, llama: tuple[str, Path], server: TorchServe, packages: Packages) -> None:
    launched, model = llama
    if not launched.startswith("spawn"):
        pytest.skip("TorchServe cannot stream over gRPC in this mode")
    name = packages.changed(model, "spawn", {"handler": {"grpc_streaming": True}})
    server.register(name, f"{name}.mar")

    def collect(text: str) -> list[int]:
        lines = b"".join(client.stream(name, wish(text, stream=True))).splitlines()
        return [token for line in lines for token in json.loads(line).get("token_ids", [])]

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(collect, TEXTS)) == [each.token_ids for each in references(model)]
    server.unregister(name)


def test_a_stream_that_the_frontend_could_not_carry_is_refused(client: GrpcClient, llama: tuple[str, Path]) -> None:
    name, _ = llama
    for answer in (b"".join(client.stream(name, wish("a", stream=True))), client.predict(name, wish("a", stream=True))):
        assert json.loads(answer)["error"]["message"].startswith("stream: ")


def test_a_stream_of_a_whole_answer_ends(client: GrpcClient, llama: tuple[str, Path]) -> None:
    name, model = llama
    pieces = list(client.stream(name, wish(TEXTS[0])))
    assert json.loads(b"".join(pieces))["token_ids"] == references(model)[0].token_ids


@pytest.mark.parametrize("is_stream", [False, True])
def test_errors_end_the_call_and_name_the_mistake(client: GrpcClient, llama: tuple[str, Path], is_stream: bool) -> None:
    name, _ = llama
    body = wish("a", max_new_tokens=0)
    answer = b"".join(client.stream(name, body)) if is_stream else client.predict(name, body)
    assert "max_new_tokens: must be" in json.loads(answer)["error"]["message"]
    assert json.loads(client.predict(name, wish("a")))["token_ids"]
