"""The weight files of a directory are those that transformers takes, and what lies in their place is named."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.weights import Checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 538090408\n"
PAGE = "<!DOCTYPE html><html><body>404 Not Found</body></html>"
INDEX = "model.safetensors.index.json"


def save(directory: Path, name: str, tensor: str = "a") -> None:
    save_file({tensor: torch.ones(2)}, directory / name)


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        (["model.safetensors", "other.safetensors"], "model.safetensors"),
        (["model.fp16.safetensors"], "model.fp16.safetensors"),
        (["own.safetensors", "adapter_model.safetensors", "consolidated.safetensors", "._own.safetensors"], "own."),
    ],
)
def test_which_file_is_taken(tmp_path: Path, files: list[str], taken: str) -> None:
    for name in files:
        save(tmp_path, name, tensor=name)
    torch.save({"b": torch.ones(2)}, tmp_path / "pytorch_model.bin.old")
    for stray in ("optimizer.pt", "training_args.bin", "tf_model.h5", "consolidated.00.pth", "model.safetensors.tmp"):
        (tmp_path / stray).write_bytes(b"stray")
    (tmp_path / "original").mkdir()
    [name] = Checkpoint(str(tmp_path)).names
    assert name.startswith(taken)


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    save(tmp_path, "shard.safetensors", "stale")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"stale": "shard.safetensors"}}))
    assert Checkpoint(str(tmp_path)).names == ["stale"]
    save(tmp_path, "model.safetensors", "new")
    torch.save({"bin": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert Checkpoint(str(tmp_path)).names == ["new"]


def test_the_file_that_config_json_names(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", "usual")
    save(tmp_path, "own.safetensors", "own")
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "own.safetensors"}))
    assert Checkpoint(str(tmp_path)).names == ["own"]
    for wrong in ("gone.safetensors", "../own.safetensors", 5):
        (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": wrong}))
        with pytest.raises(
            CheckpointError, match=f"transformers_weights: {re.escape(repr(wrong))} is no file beside it"
        ):
            Checkpoint(str(tmp_path))


def pipe(directory: Path) -> None:
    os.mkfifo(directory / "model.safetensors")


def adapter(directory: Path) -> None:
    save(directory, "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text("{}")


def shards(directory: Path) -> None:
    for number in (1, 2):
        save(directory, f"model-0000{number}-of-00002.safetensors")


def unfinished(directory: Path) -> None:
    (directory / "model.safetensors.incomplete").write_bytes(b"half")


def gguf(directory: Path) -> None:
    (directory / "model-q4.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (pipe, r"pytorch_model\.bin\.index\.json$"),
        (adapter, r"; an adapter is there \(adapter_config\.json\): merge it into its base model"),
        (shards, r"; 2 files such as model-00001-of-00002\.safetensors are there, but no index"),
        (unfinished, r"; model\.safetensors\.incomplete is there, a download that has not finished"),
        (gguf, r"; a GGUF file is there, which is another format"),
    ],
)
def test_what_is_there_instead_of_weights(tmp_path: Path, fill: Callable[[Path], None], message: str) -> None:
    fill(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"^{re.escape(str(tmp_path))}: no weights found; looked for .*{message}"
    ):
        Checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", INDEX])
@pytest.mark.parametrize(("text", "what"), [(POINTER, "a pointer of Git LFS"), (PAGE, "a web page"), ("", "empty")])
def test_what_was_saved_in_the_place_of_a_file(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path / name))}: .*it is {what}"):
        Checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "its 'weight_map' names no tensors"),
        ({"a": 5}, "says that tensor 'a' is in 5, which names no file"),
        ({"a": None}, "says that tensor 'a' is in None, which names no file"),
        ({"a": ""}, "says that tensor 'a' is in '', which names no file"),
        ({"a": ["x"]}, "says that tensor 'a' is in ['x'], which names no file"),
        ([1], "not a checkpoint index with a 'weight_map': it is [1]"),
    ],
)
def test_an_odd_index(tmp_path: Path, weight_map: object, message: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{tmp_path / INDEX}: {message}')}"):
        Checkpoint(str(tmp_path))


@pytest.mark.parametrize("place", ["nowhere", "shard.safetensors", "folder", "pipe"])
def test_a_shard_that_is_no_file(tmp_path: Path, place: str) -> None:
    shard = tmp_path / "shard.safetensors"
    {"folder": shard.mkdir, "pipe": lambda: os.mkfifo(shard)}.get(place, lambda: shard.symlink_to(place))()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard.name}}))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(shard))}: missing, although {INDEX} says it holds"):
        Checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", INDEX])
def test_a_file_that_may_not_be_read(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own cannot be entered by another user
        os.chmod(folder, 0o755)
        file = Path(folder) / name
        file.write_bytes(b"x")
        file.chmod(0)
        user = os.geteuid()
        if user == 0:  # to whom everything is allowed
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))}: .*Permission denied"):
                Checkpoint(folder)
        finally:
            os.seteuid(user)
