"""What was asked and answered stays between client and model; who has no key gets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.torchserve import TorchServe

SECRET = "walnut-7193-cupboard"
CHAT = {"role": "user", "content": f"Hide {SECRET}."}


def _bodies(model: str) -> list[tuple[int, str, dict[str, Any] | bytes]]:
    return [
        (200, "", {"prompt": f"Hide {SECRET}.", "max_new_tokens": 8}),
        (200, "/1.0/v1/completions", {"model": model, "prompt": SECRET, "max_tokens": 8, "logprobs": 2}),
        (200, "/1.0/v1/chat/completions", {"model": model, "messages": [CHAT], "max_tokens": 8}),
        (400, "", {"prompt": SECRET, SECRET: 1}),
        (400, "", {"prompt": {"text": SECRET}}),
        (400, "", f'{{"prompt": "{SECRET}'.encode()),
        (400, "/1.0/v1/chat/completions", {"model": model, "messages": [CHAT], SECRET: 1}),
        (404, f"/1.0/v1/{SECRET}", {"prompt": SECRET}),
    ]


def test_neither_prompts_nor_answers_are_logged(server: TorchServe, llama: tuple[str, Path]) -> None:
    name, _ = llama
    texts = []
    for status, path, body in _bodies(name):
        answer = server.post(name + path, body, "application/json")
        assert answer.status == status, (path, body, answer.text)
        if status == 200 and not path:
            texts.append(answer.json()["text"])
    logs = {file.name: file.read_text(errors="replace") for file in server.folder.rglob("*.log")}
    # The frontend logs every path that was asked for.
    found = [
        (file, line)
        for file, log in logs.items()
        for line in log.splitlines()
        if (SECRET in line and f"/v1/{SECRET}" not in line) or any(text and text in line for text in texts)
    ]
    assert len(logs) > 1, "TorchServe's own logs are looked at too"
    assert not found


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_request_without_the_key_is_refused(
    server: TorchServe, llama: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    name, _ = llama
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    monkeypatch.setattr(server, "authorization", lambda _api="inference": headers)
    assert server.post(name, {"prompt": "x", "max_new_tokens": 1}).status in (400, 401, 403)
