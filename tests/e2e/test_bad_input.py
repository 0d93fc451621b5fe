"""What cannot be honoured is refused with a sentence, costs nobody else anything, and no worker."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.client import Response
from tests.corpus import MODEL, Malformed, corpus
from tests.models import WINDOW
from tests.oracle import Reference, hf_generate
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
TEXT = "text/plain"
GOOD = {"prompt": "A good prompt", "max_new_tokens": 12}


def prompt(**fields: Any) -> tuple[bytes, str]:
    return json.dumps({"prompt": "x", **fields}).encode(), JSON


def raw(value: Any) -> tuple[bytes, str]:
    return (value if isinstance(value, bytes) else json.dumps(value).encode()), JSON


CASES: dict[str, tuple[tuple[bytes, str], list[str]]] = {
    "empty text": ((b"", TEXT), ["empty"]),
    "empty JSON": ((b"", JSON), ["empty"]),
    "empty form": ((b"", FORM), ["empty"]),
    "invalid UTF-8 text": ((b"good so far \xff\xfe", TEXT), ["UTF-8", "0xff"]),
    "invalid UTF-8 JSON": (raw(b'{"prompt": "\xff"}'), ["UTF-8", "0xff"]),
    "broken JSON": (raw(b'{"prompt": "x", '), ["JSON"]),
    "JSON null": (raw(None), ["object"]),
    "JSON list": (raw(["x"]), ["object", "prompt"]),
    "JSON number": (raw(5), ["object", "prompt"]),
    "JSON string": (raw("x"), ["object", "prompt"]),
    "no prompt": (raw({"max_new_tokens": 3}), ["prompt"]),
    "prompt a number": (raw({"prompt": 5}), ["prompt", "5", "text"]),
    "prompt null": (raw({"prompt": None}), ["prompt"]),
    "prompt an object": (raw({"prompt": {"text": "x"}}), ["prompt", "text"]),
    "prompt of numbers": (raw({"prompt": ["x", 5]}), ["prompt", "5"]),
    "empty prompt": (raw({"prompt": ""}), ["prompt", "''"]),
    "empty list of prompts": (raw({"prompt": []}), ["prompt"]),
    "empty prompt in a list": (raw({"prompt": ["x", ""]}), ["prompt", "''"]),
    "prompt and messages": (prompt(messages=[{"role": "user", "content": "x"}]), ["prompt", "messages"]),
    "messages without content": (raw({"messages": [{"role": "user"}]}), ["messages"]),
    "messages a string": (raw({"messages": "hello"}), ["messages", "hello"]),
    "unknown field": (prompt(max_tokens=3), ["max_tokens", "3", "max_new_tokens"]),
    "thousands of unknown fields": (prompt(**{f"field{n}": 1 for n in range(30_000)}), ["field0", "unknown"]),
    "unknown field of a megabyte": (prompt(**{"é" * 1_000_000: 1}), ["é", "unknown"]),
    "unknown form field": ((b"prompt=x&max_tokens=3", FORM), ["max_tokens", "3", "max_new_tokens"]),
    "prompt too long": (prompt(prompt="y" * (WINDOW + 88)), [str(WINDOW + 88), f"({WINDOW}|{WINDOW - 1})"]),
    "prompt fills the window": (prompt(prompt="y" * WINDOW), [str(WINDOW)]),
    "prompt text too long": ((b"y" * (WINDOW + 88), TEXT), [str(WINDOW + 88), f"({WINDOW}|{WINDOW - 1})"]),
    "no new tokens": (prompt(max_new_tokens=0), ["max_new_tokens", "0", "1"]),
    "negative new tokens": (prompt(max_new_tokens=-3), ["max_new_tokens", "-3", "1"]),
    "huge new tokens": (prompt(max_new_tokens=10**9), ["max_new_tokens", "1000000000", f"({WINDOW}|{WINDOW - 1})"]),
    "vast new tokens": (prompt(max_new_tokens=10**40), ["max_new_tokens", "1000"]),
    "new tokens one too many": (prompt(max_new_tokens=WINDOW), ["max_new_tokens", str(WINDOW)]),
    "new tokens a string": (prompt(max_new_tokens="5"), ["max_new_tokens", "'5'", "integer|whole"]),
    "new tokens a fraction": (prompt(max_new_tokens=2.5), ["max_new_tokens", "2.5", "integer|whole"]),
    "new tokens a boolean": (prompt(max_new_tokens=True), ["max_new_tokens", "True", "integer|whole"]),
    "new tokens a word in a form": ((b"prompt=x&max_new_tokens=many", FORM), ["max_new_tokens", "many"]),
    "negative temperature": (prompt(temperature=-0.5), ["temperature", "-0.5", "0"]),
    "temperature not a number": (raw(b'{"prompt": "x", "temperature": NaN}'), ["temperature", "nan|NaN"]),
    "temperature a string": (prompt(temperature="hot"), ["temperature", "hot"]),
    "top_p above one": (prompt(top_p=1.5), ["top_p", "1.5", "1"]),
    "top_k negative": (prompt(top_k=-2), ["top_k", "-2", "0"]),
    "seed negative": (prompt(seed=-1), ["seed", "-1", "0"]),
    "seed too large": (prompt(seed=2**64), ["seed", str(2**64)]),
    "stop a number": (prompt(stop=5), ["stop", "5"]),
    "stop empty": (prompt(stop=""), ["stop"]),
    "ignore_eos a word": (prompt(ignore_eos="sometimes"), ["ignore_eos", "sometimes"]),
}


@pytest.fixture(scope="module")
def expected(llama: tuple[str, Path]) -> Reference:
    """How the good prompt goes on."""
    _, model = llama
    return hf_generate(model, [byte_tokens(str(GOOD["prompt"]))], 12)[0]


def check_refused(response: Response, named: list[str]) -> None:
    assert response.status == 400, response.body
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}
    assert body["error"]["code"] == "invalid_request"
    message = body["error"]["message"]
    assert "Traceback" not in message
    assert len(message) <= 1000
    for pattern in named:
        assert re.search(pattern, message), message


def check_good(response: Response, expected: Reference) -> None:
    assert response.status == 200, response.body
    assert response.json()["token_ids"] == expected.token_ids


@pytest.mark.parametrize("case", CASES)
def test_each_is_refused_and_the_worker_lives(
    server: TorchServe, llama: tuple[str, Path], expected: Reference, case: str
) -> None:
    name, _ = llama
    pids = server.worker_pids(name)
    request, named = CASES[case]
    check_refused(server.post(name, *request), named)
    check_good(server.post(name, GOOD), expected)
    assert server.worker_pids(name) == pids


def test_a_good_prompt_beside_bad_ones_is_answered_right(
    server: TorchServe, llama: tuple[str, Path], expected: Reference
) -> None:
    name, _ = llama
    pids = server.worker_pids(name)
    for _ in range(3):
        bad = ["broken JSON", "negative new tokens", "prompt too long", "invalid UTF-8 text", "empty text"]
        requests = [each for case in bad for each in (GOOD, CASES[case][0])]
        responses = server.post_all(name, requests)
        for response in responses[::2]:
            check_good(response, expected)
        for case, response in zip(bad, responses[1::2], strict=True):
            check_refused(response, CASES[case][1])
    assert server.worker_pids(name) == pids


@pytest.mark.slow
def test_an_answer_that_torchserve_would_not_carry_costs_no_worker(
    server: TorchServe, llama: tuple[str, Path], expected: Reference
) -> None:
    name, _ = llama
    pids = server.worker_pids(name)
    wanted = {"prompt": ["abc"] * 256, "max_new_tokens": 40, "logprobs": 20, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.post, name, wanted)
        check_good(server.post(name, GOOD), expected)
        check_refused(large.result(), [r"the answer has \d{7,8} bytes", "6553500"])
    check_good(server.post(name, GOOD), expected)
    assert server.worker_pids(name) == pids


def test_the_corpus_is_refused_and_the_worker_lives(
    server: TorchServe, llama: tuple[str, Path], expected: Reference
) -> None:
    name, _ = llama
    pids = server.worker_pids(name)

    def send(malformed: Malformed) -> str | None:
        path = f"/predictions/{name}" + (f"/1.0/{malformed.path}" if malformed.path else "")
        body = malformed.body.replace(MODEL.encode(), name.encode())
        answer = server.request("inference", "POST", path, body, {"Content-Type": malformed.content_type})
        if answer.status == 400 and malformed.named in answer.json()["error"]["message"]:
            return None
        return f"{malformed.path} {malformed.body[:80]!r}: {answer.status} {answer.body[:300]!r}"

    with ThreadPoolExecutor(8) as pool:
        wrong = [each for each in pool.map(send, corpus()) if each]
    assert not wrong
    check_good(server.post(name, GOOD), expected)
    assert server.worker_pids(name) == pids
