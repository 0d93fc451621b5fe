"""A checkpoint cut into a file for each stage is the same checkpoint, for us and for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.architectures import write_checkpoint
from tests.models import Checkpoints
from ts_pippy_handler import sharding, tracer
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import CheckpointError, ConfigError
from ts_pippy_handler.graph_data import decode_stage
from ts_pippy_handler.weight_sources import needed_tensors
from ts_pippy_handler.weights import Checkpoint


def config(directory: Path, **handler: Any) -> ServingConfig:
    return load_config({"handler": {"model_path": str(directory), **handler}, "pippy": {"trace_cache": False}})


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def names_in(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


@pytest.mark.parametrize("options", [{}, {"shard_bytes": None}, {"file_format": "bin"}], ids=str)
def test_transformers_reads_the_same_weights(checkpoints: Checkpoints, tmp_path: Path, options: dict[str, Any]) -> None:
    source = checkpoints("llama", layers=4, **options)
    read: list[int] = []
    files = sharding.shard(config(source), 3, tmp_path / "out", read.append)
    assert [file.path.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sum(read) == sum(file.num_bytes for file in files)
    original, copied = weights(source), weights(tmp_path / "out")
    assert original.keys() == copied.keys()
    assert all(torch.equal(original[name], copied[name]) for name in original)
    kept = {file.name for file in source.iterdir() if "model" not in file.name}
    assert kept <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_stage_reads_its_own_file_and_the_shared_weight_of_the_first(
    checkpoints: Checkpoints, tmp_path: Path, family: str
) -> None:
    files = sharding.shard(config(checkpoints(family, layers=4)), 2, tmp_path / "out")
    checkpoint = Checkpoint(str(tmp_path / "out"))
    stages = tracer.trace_stages(config(tmp_path / "out"), 2)
    first, last = (set(needed_tensors(*decode_stage(stage), checkpoint)) for stage in stages)
    assert names_in(files[0].path) == first
    assert names_in(files[1].path) == last - first
    assert len(last & first) <= 1


def test_experts_stored_one_by_one_stay_so(tmp_path: Path) -> None:
    source, _ = write_checkpoint("mixtral", tmp_path / "source")
    sharding.shard(config(source), 2, tmp_path / "out")
    original, copied = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(original[name], copied[name]) for name in original)
    assert set(Checkpoint(str(source)).names) == set(Checkpoint(str(tmp_path / "out")).names)


def test_weights_are_converted(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints("llama", layers=2)
    sharding.shard(config(source, dtype="bf16"), 1, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    original, copied = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(original[name].bfloat16(), copied[name]) for name in original)


def test_what_is_there_is_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        sharding.shard(config(checkpoints("llama", layers=2)), 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_copy_that_failed(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in checkpoints("llama", layers=4, shard_bytes=None).iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "config.json").write_text(
        (source / "config.json").read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5')
    )
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model\.layers\.4\."):
        sharding.shard(config(source), 2, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
