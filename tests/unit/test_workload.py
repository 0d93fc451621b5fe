"""A workload file is read whole or refused, naming the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ts_pippy_handler.errors import ConfigError
from ts_pippy_handler.workload import progress_of, read_workload

GOOD = {"prompt_token_ids": [1, 2], "max_tokens": 3}


def written(folder: Path, content: Any) -> Path:
    file = folder / "work.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_other_keys_are_left_alone_and_ids_default_to_the_place(tmp_path: Path) -> None:
    requests = [GOOD, {**GOOD, "id": "b", "prompt": "hello", "n_prompt": 2}, {**GOOD, "id": 7}]
    workload = read_workload(written(tmp_path, {"seed": 1, "requests": requests}))
    assert [request.id for request in workload.requests] == [0, "b", 7]
    assert [request.prompt_token_ids for request in workload.requests] == [[1, 2]] * 3
    assert [request.prompt for request in workload.requests] == [None, "hello", None]
    assert workload.name(1) == "work.json: requests[1]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON: "),
        ([GOOD], "requests: must be a list of at least one request, got [{"),
        ({}, "requests: must be a list of at least one request, got None"),
        ({"requests": []}, "requests: must be a list of at least one request, got []"),
        ({"requests": [GOOD, 5]}, "requests[1]: must be an object, got 5"),
        ({"requests": [{"max_tokens": 3}]}, "requests[0].prompt_token_ids: missing, a value is required"),
        ({"requests": [GOOD, {"prompt_token_ids": [1]}]}, "requests[1].max_tokens: missing, a value is required"),
        (
            {"requests": [{**GOOD, "max_tokens": 0}]},
            "requests[0].max_tokens: must be a whole number, at least 1, got 0",
        ),
        (
            {"requests": [{**GOOD, "prompt_token_ids": []}]},
            "requests[0].prompt_token_ids: must be a list of at least one token id, got []",
        ),
        (
            {"requests": [{**GOOD, "prompt_token_ids": [1, "2"]}]},
            "requests[0].prompt_token_ids: must be a list of at least one token id, got [1, '2']",
        ),
        ({"requests": [{**GOOD, "prompt": ""}]}, "requests[0].prompt: must be a text that is not empty, got ''"),
        ({"requests": [{**GOOD, "id": 1}, GOOD]}, "requests: the id '1' occurs more than once"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: Any, message: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_workload(file)
    assert str(caught.value).startswith(f"--workload {file}: {message}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.json: No such file or directory$"):
        read_workload(tmp_path / "nowhere.json")


def test_texts_are_needed_only_where_texts_are_sent(tmp_path: Path) -> None:
    only_text = {"prompt": "hello", "max_tokens": 3}
    assert read_workload(written(tmp_path, {"requests": [only_text]}), need="prompt").requests[0].prompt == "hello"
    with pytest.raises(ConfigError, match=r"requests\[0\].prompt: missing, a value is required$"):
        read_workload(written(tmp_path, {"requests": [GOOD]}), need="prompt")


def test_progress_is_silent_where_nobody_watches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of(read_workload(written(tmp_path, {"requests": [GOOD]}))) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")
