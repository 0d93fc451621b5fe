"""A mistake in config.json is told in one line: the file, the field, the value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import Checkpoints, byte_tokenizer
from ts_pippy_handler import model_config, tracing
from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.text import Tokenizer

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": "4"}, "Field 'num_hidden_layers' expected int, got str (value: '4')"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: must be at least 1, got 0"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 10000, got 1000000000"),
    ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')"),
    ({"hidden_size": 65}, "The hidden size (65) is not a multiple of the number of attention heads (4)."),
    ({"num_attention_heads": 0}, "num_attention_heads: must be at least 1, got 0"),
    ({"num_attention_heads": 3}, "The hidden size (64) is not a multiple of the number of attention heads (3)."),
    ({"max_position_embeddings": None}, "Field 'max_position_embeddings' expected int, got NoneType (value: None)"),
    ({"max_position_embeddings": "512"}, "Field 'max_position_embeddings' expected int, got str (value: '512')"),
    ({"max_position_embeddings": 0}, "max_position_embeddings: must be the number of tokens a text may have, at"),
    ({"dtype": "float33"}, "dtype: 'float33': AttributeError: module 'torch' has no attribute 'float33'"),
    ({"dtype": 5}, "dtype: must be the name of a dtype, such as 'bfloat16', got 5"),
    ({"rms_norm_eps": None}, "Field 'rms_norm_eps' expected float, got NoneType (value: None)"),
    ({"rope_parameters": [1]}, "rope_parameters: must be a JSON object, got [1]"),
    ({"quantization_config": "x"}, "quantization_config: must be a JSON object, got 'x'"),
]


@pytest.fixture
def written(checkpoints: Checkpoints, tmp_path: Path) -> dict[str, Any]:
    byte_tokenizer().save_pretrained(tmp_path)
    return json.loads((checkpoints("llama", layers=2) / "config.json").read_text())


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[str(mistake) for mistake, _ in MISTAKES])
def test_a_mistake(written: dict[str, Any], tmp_path: Path, mistake: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written | mistake))
    expected = f"^{re.escape(f'{tmp_path}/config.json: {message}')}[^\n]*$"
    with pytest.raises(CheckpointError, match=expected):
        model_config.read_config(str(tmp_path))


def test_a_mistake_is_not_the_tokenizers(written: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written | {"num_hidden_layers": "4"}))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/config\.json: Field 'num_hidden_layers'"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"hidden_act": "nix"}, "hidden_act: 'nix': KeyError: 'nix'"),
        ({"rope_parameters": {"rope_type": "nix"}}, "rope_parameters.rope_type: 'nix': KeyError: 'nix'"),
        ({"head_dim": 0}, "ZeroDivisionError: "),
    ],
)
def test_a_mistake_that_shows_when_the_model_is_built(
    written: dict[str, Any], tmp_path: Path, mistake: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written | mistake))
    config = model_config.read_config(str(tmp_path))
    expected = f"{tmp_path}/config.json: transformers cannot build a llama from it: {message}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}"):
        tracing.trace(config, torch.float32)


@pytest.mark.parametrize("settings", [{"max_position_embeddings": 64}, {"dtype": None}, {"rope_scaling": None}])
def test_no_mistake(written: dict[str, Any], tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written | settings))
    assert model_config.read_config(str(tmp_path)).model_type == "llama"


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}: no config.json there, so it is not a Hugging Face check"):
        model_config.read_config(str(tmp_path))


@pytest.mark.parametrize("text", ["{ broken", json.dumps({"model_type": "no-such-model"}), "{}"])
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/config.json: .+") as caught:
        model_config.read_config(str(tmp_path))
    assert "\n" not in str(caught.value)
