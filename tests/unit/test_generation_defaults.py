"""What a checkpoint says of generation is honoured or refused, never passed over."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.generation_defaults import read_defaults


def written(directory: Path, generation: Any = None, config: Any = None) -> str:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(directory)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, [7, 8]),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, [0]),
        ({}, {"eos_token_id": 2}, [2]),
        (None, {"eos_token_id": [2, 3]}, [2, 3]),
        (None, {"eos_token_id": None}, []),
        ({"eos_token_id": -1}, {}, []),
        (None, None, []),
    ],
)
def test_tokens_that_end_a_text(tmp_path: Path, generation: Any, config: Any, expected: list[int]) -> None:
    assert read_defaults(written(tmp_path, generation, config)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"pad_token_id": 7}, {"pad_token_id": 3}, 7), ({}, {"pad_token_id": 3}, 3), ({"pad_token_id": -1}, {}, None)],
)
def test_the_token_that_fills_rows(tmp_path: Path, generation: Any, config: Any, expected: int | None) -> None:
    assert read_defaults(written(tmp_path, generation, config)).pad == expected


def test_sampling_is_taken_from_generation_config_only(tmp_path: Path) -> None:
    path = written(tmp_path, {"temperature": 0.5, "top_k": -1, "suppress_tokens": [5, -1]}, {"temperature": 3.0})
    defaults = read_defaults(path)
    assert (defaults.temperature, defaults.num_likeliest, defaults.top_p) == (0.5, 0, None)
    assert defaults.suppressed == [5]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a":', "generation_config.json: Expecting value"),
        ("", "generation_config.json: it is empty"),
        ("\ufeff{}", "generation_config.json: begins with a UTF-8 byte order mark"),
        ("[]", r"generation_config.json: must hold a JSON object, got \[\]"),
        ('"x"', "generation_config.json: must hold a JSON object, got 'x'"),
        ({"eos_token_id": "<eos>"}, "generation_config.json: eos_token_id: must be a token id or a list.*'<eos>'"),
        ({"eos_token_id": "2"}, "eos_token_id: must be a token id or a list of them, got '2'"),
        ({"eos_token_id": [[2]]}, r"eos_token_id: must be a token id or a list of them, got \[\[2\]\]"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id: must be a token id or a list of them"),
        ({"eos_token_id": 10**30}, "eos_token_id: must be"),
        ({"pad_token_id": True}, "pad_token_id: must be a whole number"),
        ({"suppress_tokens": 5}, "suppress_tokens: must be a list of token ids, got 5"),
        ({"top_p": 2}, "top_p: must be a number, above 0 and at most 1, got 2"),
        ({"top_k": "x"}, "top_k: must be a whole number"),
        ({"temperature": -1}, "temperature: must be a number, at least 0"),
        ({"num_beams": 4}, "num_beams: 4 is not supported, and transformers would generate other tokens"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: 3 is not supported"),
        ({"bad_words_ids": [[5]]}, r"bad_words_ids: \[\[5\]\] is not supported"),
        ({"min_new_tokens": 5}, "min_new_tokens: 5 is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale: 1.5 is not supported"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        read_defaults(written(tmp_path, content, {"eos_token_id": 2}))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_at_fault_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'config.json'}: eos_token_id: must be")):
        read_defaults(written(tmp_path, {"temperature": 1.0}, {"eos_token_id": "x"}))


def test_what_changes_nothing_passes(tmp_path: Path) -> None:
    neutral = {
        "num_beams": 1,
        "length_penalty": 1.0,
        "typical_p": 1.0,
        "no_repeat_ngram_size": 0,
        "bad_words_ids": None,
        "max_length": 20,
        "do_sample": False,
        "transformers_version": "5.24.0",
        "_from_model_config": True,
        "use_cache": True,
    }
    assert read_defaults(written(tmp_path, neutral, {"eos_token_id": 2})).eos_token_ids == [2]
