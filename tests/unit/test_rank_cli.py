"""``ts-pippy rank`` finds the settings that TorchServe has, or says in one line what is missing."""

from __future__ import annotations

import argparse
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from ts_pippy_handler import rank_cli
from ts_pippy_handler.errors import CheckpointError, ConfigError


def options(model: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rank_cli.add_options(parser)
    return parser.parse_args([str(model), "--rdzv-endpoint", "10.0.0.1", *arguments])


def write(folder: Path, model_path: object, **pippy: Any) -> Path:
    file = folder / "model-config.yaml"
    settings = {"minWorkers": 1, "handler": {"model_path": str(model_path)}, "pippy": {"interface": "lo", **pippy}}
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.mark.parametrize("kind", ["yaml", "directory", "mar", "tar.gz"])
def test_settings_are_those_of_the_archive(kind: str, tmp_path: Path, model_dir: Path) -> None:
    file = write(tmp_path, model_dir, block_size=8)
    given = {"yaml": file, "directory": tmp_path}.get(kind, tmp_path / f"m.{kind}")
    if kind == "mar":
        with zipfile.ZipFile(given, "w") as archive:
            archive.write(file, file.name)
    if kind == "tar.gz":
        with tarfile.open(given, "w:gz") as unpacked:
            unpacked.add(file, f"m/{file.name}")
    config = rank_cli.read_config(options(given, "--interface", "10.0.0.0/8"))
    assert (config.pippy.block_size, config.pippy.interface) == (8, "10.0.0.0/8")
    assert config.handler.model_path == str(model_dir)


def test_a_checkpoint_may_lie_elsewhere_on_each_host(tmp_path: Path, model_dir: Path) -> None:
    file = write(tmp_path, "/nowhere")
    assert rank_cli.read_config(options(file, "--model-path", str(model_dir))).handler.model_path == str(model_dir)


def test_a_plain_checkpoint_has_default_settings(model_dir: Path) -> None:
    config = rank_cli.read_config(options(model_dir, "--interface", "lo"))
    assert (config.handler.model_path, config.pippy.block_size) == (str(model_dir), 16)


def test_an_archive_that_holds_the_checkpoint_is_to_be_unpacked(tmp_path: Path) -> None:
    file = write(tmp_path, "checkpoint")
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.write(file, file.name)
    with pytest.raises(ConfigError, match=r"m.mar: handler.model_path is 'checkpoint', which lies in the archive; unp"):
        rank_cli.read_config(options(tmp_path / "m.mar"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is not here; copy the archive that TorchServe serves to this host"),
        (b"nonsense", "not an archive of TorchServe"),
        ({}, "the archive holds no model-config.yaml"),
        ({"model-config.yaml": b"- a"}, "model-config.yaml must be a block of keys"),
        ({"model-config.yaml": b"{"}, "model-config.yaml is no YAML"),
    ],
)
def test_no_settings(content: bytes | dict[str, bytes] | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "m.mar"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in content.items():
                archive.writestr(name, text)
    with pytest.raises(ConfigError, match=reason):
        rank_cli.read_config(options(file))


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither model-config.yaml nor a checkpoint's config.json$"):
        rank_cli.read_config(options(tmp_path))


def test_loopback_is_refused_before_anything_starts(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pippy.interface: is not set, .* or give --interface"):
        rank_cli.read_config(options(model_dir))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--nnodes", "1"], "^--nnodes: must be at least 2, got 1$"),
        (["--nproc-per-node", "0"], "^--nproc-per-node: must be at least 1, got 0$"),
        (["--rdzv-endpoint", "a:b"], "^--rdzv-endpoint: must be HOST or HOST:PORT, got 'a:b'$"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], reason: str, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        rank_cli.run(options(model_dir, "--interface", "lo", *arguments), print)


def test_a_checkpoint_without_weights_is_told_at_once(model_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights found"):
        rank_cli.run(options(model_dir, "--interface", "lo"), print)
