"""Traces are found again for the same model, code and split, and for nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models import Checkpoints, copy_checkpoint
from ts_pippy_handler import trace_cache, tracer
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.trace_cache import TraceCache

STAGES = [b"first", b"second"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ts_pippy_handler" / "traces"


@pytest.fixture
def model(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    return copy_checkpoint(checkpoints("llama"), tmp_path / "model")


def config(model: Path, pippy: dict[str, Any] | None = None, **handler: Any) -> ServingConfig:
    return load_config({"pippy": pippy or {}, "handler": {"model_path": str(model), **handler}})


def change_config(model: Path) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))


def test_what_was_stored_is_found(model: Path, tmp_path: Path, folder: Path) -> None:
    assert TraceCache(config(model), 2).load() is None
    TraceCache(config(model), 2).store(STAGES)
    assert TraceCache(config(model), 2).load() == STAGES
    assert TraceCache(config(copy_checkpoint(model, tmp_path / "elsewhere")), 2).load() == STAGES
    assert TraceCache(config(model, {"pack_weights": False}), 2).load() == STAGES
    assert [file.suffix for file in folder.iterdir()] == [".trace"], "no draft is left"


@pytest.mark.parametrize(
    "other",
    [
        lambda model: TraceCache(config(model), 3),
        lambda model: TraceCache(config(model, {"split": "memory"}), 2),
        lambda model: TraceCache(config(model, {"split": [3, 2]}), 2),
        lambda model: TraceCache(config(model, dtype="bfloat16"), 2),
        lambda model: (change_config(model), TraceCache(config(model), 2))[1],
    ],
)
def test_anything_else_is_not_found(model: Path, other: Callable[[Path], TraceCache]) -> None:
    TraceCache(config(model), 2).store(STAGES)
    assert other(model).load() is None


@pytest.mark.parametrize("changed", ["_sources", "version"])
def test_other_code_is_not_found(model: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    TraceCache(config(model), 2).store(STAGES)
    if changed == "_sources":
        monkeypatch.setattr(trace_cache, "_sources", lambda: iter([("a.py", 1, 2)]))
    else:
        monkeypatch.setattr(trace_cache.importlib.metadata, "version", lambda name: "0")
    assert TraceCache(config(model), 2).load() is None


def test_the_sources_are_ours_and_the_models() -> None:
    names = {Path(path).name for path, _, _ in trace_cache._sources()}
    assert {"tracing.py", "attention.py", "modeling_llama.py", "masking_utils.py"} <= names


def test_nothing_is_kept_where_that_is_asked_for_or_unsafe(model: Path, folder: Path) -> None:
    for settings in (config(model, {"trace_cache": False}), config(model, trust_remote_code=True)):
        TraceCache(settings, 2).store(STAGES)
        assert TraceCache(settings, 2).load() is None
    assert not folder.exists()


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1], lambda content: content + b"x"])
def test_a_damaged_file_counts_as_absent(model: Path, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    TraceCache(config(model), 2).store(STAGES)
    [file] = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert TraceCache(config(model), 2).load() is None
    TraceCache(config(model), 2).store(STAGES)
    assert TraceCache(config(model), 2).load() == STAGES


def test_a_disk_that_cannot_be_written_to_is_no_error(model: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    TraceCache(config(model), 2).store(STAGES)
    assert TraceCache(config(model), 2).load() is None


def test_the_oldest_are_forgotten(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "_MAX_FILES", 2)
    for num_stages in (1, 2, 3):
        TraceCache(config(model), num_stages).store(STAGES)
    assert len(list(folder.iterdir())) == 2
    assert TraceCache(config(model), 3).load() == STAGES


def test_a_kept_trace_spares_tracing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tracer.trace_stages(config(model), 2)
    assert len(stages) == 2
    monkeypatch.setattr(tracer.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("traced again"))
    assert tracer.trace_stages(config(model), 2) == stages


def test_a_failed_trace_is_not_kept(model: Path, folder: Path) -> None:
    with pytest.raises(LoadError):
        tracer.trace_stages(config(model), 6)
    assert not folder.exists() or not list(folder.iterdir())
    shutil.rmtree(model)
