"""The configuration that is packaged is one that loads; what cannot be packaged is said in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ts_pippy_handler import archive
from ts_pippy_handler.archive import HANDLER_SOURCE, ArchiveOptions, model_config, package
from ts_pippy_handler.config import load_config
from ts_pippy_handler.errors import ConfigError, PippyError


def options(model_dir: Path, **changes: Any) -> ArchiveOptions:
    values = {"model_path": model_dir, "name": "tiny", "num_stages": 3, "output": model_dir.parent / "store"}
    return ArchiveOptions(**{**values, **changes})


class Archiver:
    """Stands in for torch-model-archiver: remembers how it was called and what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, returncode: int = 0, stderr: str = "") -> None:
        self.command: list[str] = []
        self.extra: list[str] = []
        self._answer = (returncode, stderr)
        monkeypatch.setattr(archive.subprocess, "run", self._run)
        monkeypatch.setattr(archive, "_archiver", lambda: ["torch-model-archiver"])

    def _run(self, command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        self.command = command
        if "--extra-files" in command:
            extra = Path(self.option("--extra-files"))
            self.extra = sorted(str(path.relative_to(extra)) for path in extra.rglob("*") if path.is_file())
        return subprocess.CompletedProcess(command, self._answer[0], "", self._answer[1])

    def option(self, name: str) -> str:
        """Return the value of a command-line option."""
        return self.command[self.command.index(name) + 1]


@pytest.mark.parametrize("launch", ["torchrun", "spawn"])
def test_the_configuration_loads(model_dir: Path, launch: Any) -> None:
    written = yaml.safe_load(
        yaml.safe_dump(model_config(options(model_dir, launch=launch, pippy={"split": [1, 1, 2]})))
    )
    config = load_config(written)
    assert config.handler.model_path == str(model_dir)
    assert config.pippy.split == [1, 1, 2]
    assert (written["minWorkers"], written["maxWorkers"]) == (1, 1)


def test_torchrun_mode(model_dir: Path) -> None:
    config = model_config(options(model_dir))
    assert config["parallelType"] == "pp"
    assert config["continuousBatching"] is True
    assert config["torchrun"] == {"nproc-per-node": 3, "rdzv-endpoint": "localhost:0"}
    assert "asyncCommunication" not in config


@pytest.mark.parametrize("launch", ["torchrun", "spawn"])
def test_the_frontend_passes_on_more_requests_than_are_accepted(model_dir: Path, launch: Any) -> None:
    for pippy, accepted in (({}, 64 + 256), ({"max_running_requests": 16, "max_waiting_requests": 2000}, 2016)):
        config = model_config(options(model_dir, launch=launch, pippy=pippy))
        assert config["jobQueueSize"] > accepted
        assert config["batchSize"] == (1 if launch == "spawn" else accepted + 64)


def test_spawn_mode(model_dir: Path) -> None:
    config = model_config(options(model_dir, launch="spawn"))
    assert (config["parallelType"], config["parallelLevel"]) == ("custom", 3)
    assert config["asyncCommunication"] is True
    assert config["batchSize"] == 1
    assert "torchrun" not in config
    assert "continuousBatching" not in config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 0}, r"^number of stages: got 0, at least 1 is needed$"),
        ({"dtype": "int8"}, r"^handler.dtype: unknown dtype; allowed: .*, got 'int8'$"),
        ({"pippy": {"chunk": 1}}, r"^pippy.chunk: unknown key \(value 1\); did you mean 'chunks'\?$"),
        ({"model_path": Path("/no/such/model")}, r"^handler.model_path: not a directory; .*, got '/no/such/model'$"),
    ],
)
def test_options_that_make_no_valid_configuration(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    archiver = Archiver(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        package(options(model_dir, **changes))
    assert not archiver.command
    assert not (model_dir.parent / "store").exists()


@pytest.mark.parametrize(
    ("archive_format", "name"), [("default", "tiny.mar"), ("tgz", "tiny.tar.gz"), ("no-archive", "tiny")]
)
def test_what_the_archiver_is_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, archive_format: Any, name: str
) -> None:
    archiver = Archiver(monkeypatch)
    written = package(options(model_dir, archive_format=archive_format, version="2.5", dtype="bf16"))
    store = model_dir.parent / "store"
    assert written == store / name
    assert archiver.option("--model-name") == "tiny"
    assert archiver.option("--version") == "2.5"
    assert archiver.option("--archive-format") == archive_format
    assert archiver.option("--export-path") == str(store)
    assert "--extra-files" not in archiver.command
    assert Path(archiver.option("--handler")).read_text() == HANDLER_SOURCE
    assert archiver.option("--handler") == str(store / "tiny-source" / "handler.py")
    config = yaml.safe_load(Path(archiver.option("--config-file")).read_text())
    assert config["handler"] == {"model_path": str(model_dir), "dtype": "bf16"}


def test_the_handler_file_defines_exactly_one_class() -> None:
    compiled = compile(HANDLER_SOURCE, "handler.py", "exec")
    assert [const.co_name for const in compiled.co_consts if hasattr(const, "co_name")] == ["Handler"]


def test_weights_can_be_copied_into_the_archive(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model_dir / "model.safetensors").write_bytes(b"weights")
    archiver = Archiver(monkeypatch)
    package(options(model_dir, copy_weights=True))
    assert archiver.extra == ["checkpoint/config.json", "checkpoint/model.safetensors"]
    config = yaml.safe_load(Path(archiver.option("--config-file")).read_text())
    assert config["handler"]["model_path"] == "checkpoint"
    (model_dir.parent / "extracted").mkdir()
    model_dir.rename(model_dir.parent / "extracted" / "checkpoint")
    loaded = load_config(config, model_dir=str(model_dir.parent / "extracted"))
    assert loaded.handler.model_path.endswith("extracted/checkpoint")


def test_an_existing_archive_is_kept_unless_forced(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archiver = Archiver(monkeypatch)
    store = model_dir.parent / "store"
    store.mkdir()
    (store / "tiny.mar").write_text("old")
    message = f"{store / 'tiny.mar'} exists already; use --force to replace it"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        package(options(model_dir))
    assert not archiver.command
    assert package(options(model_dir, force=True)) == store / "tiny.mar"
    assert archiver.command


def test_a_failing_archiver_is_quoted(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Archiver(monkeypatch, returncode=3, stderr="usage: long\nerror: no space left\n")
    with pytest.raises(PippyError, match=r"^torch-model-archiver failed with status 3: error: no space left$"):
        package(options(model_dir))


def test_a_missing_archiver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^torch-model-archiver is not installed; run: pip install torch-model-arch"):
        archive._archiver()


def test_the_archiver_beside_this_python_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch-model-archiver").write_text("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert archive._archiver() == [str(tmp_path / "torch-model-archiver")]


def test_stages_on_several_hosts(model_dir: Path) -> None:
    config = model_config(options(model_dir, nodes=(1, 2), rdzv_port=29500, pippy={"interface": "10.0.0.0/24"}))
    assert config["torchrun"] == {
        "nnodes": 2,
        "nproc-per-node": 1,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "localhost:29500",
    }
    assert config["maxRetryTimeoutInSec"] == 86_400, "hosts are not started together"
    one = model_config(options(model_dir, nodes=(3,)))
    assert one == model_config(options(model_dir))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": (1, 1)}, r"stages of each host: 1,1 must be .* add up to the number of stages, 3$"),
        ({"nodes": (3, 0)}, "stages of each host: 3,0 must be numbers of at least 1"),
        ({"nodes": (1, 2)}, "stages on several hosts: --interface is missing"),
        ({"nodes": (1, 2), "launch": "spawn"}, "stages on several hosts: torchrun has to start them"),
    ],
)
def test_stages_that_cannot_be_on_these_hosts(model_dir: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        package(options(model_dir, **changes))
