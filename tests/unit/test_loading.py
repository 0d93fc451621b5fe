"""Settings become a split, a dtype and a cache size; what cannot work is said before anything large is read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import WINDOW, Checkpoints, copy_checkpoint
from ts_pippy_handler import device_memory, loading
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import CheckpointError, ConfigError, LoadError
from ts_pippy_handler.ranks import Group, Place

ALONE = Place(rank=0, local_rank=0, world_size=1, local_world_size=1)


def config(directory: Path, dtype: str | None = None, **pippy: Any) -> ServingConfig:
    handler = {"model_path": str(directory)} | ({"dtype": dtype} if dtype else {})
    return load_config({"handler": handler, "pippy": {"threads_per_rank": 1, **pippy}})


@pytest.fixture
def gpt2(checkpoints: Checkpoints) -> Path:
    return checkpoints("gpt2", layers=4)


def test_one_rank_loads_everything(gpt2: Path) -> None:
    loaded = loading.load(Group(ALONE), config(gpt2, kv_cache_tokens=100))
    assert loaded.num_slots == 96, "whole blocks of 16"
    assert loaded.max_len == 96
    assert loaded.transport is None
    assert loaded.vocab_size == 263
    assert loaded.stage.is_last


@pytest.mark.parametrize(("dtype", "wanted"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_the_dtype_is_the_checkpoints_unless_configured(gpt2: Path, dtype: str | None, wanted: torch.dtype) -> None:
    loaded = loading.load(Group(ALONE), config(gpt2, dtype, kv_cache_tokens=16))
    assert loaded.stage.dtype is wanted
    assert {parameter.dtype for parameter in loaded.stage.graph.module.parameters()} == {wanted}


def test_the_default_cache_holds_no_more_than_full_windows(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 10**12)
    loaded = loading.load(Group(ALONE), config(gpt2, max_running_requests=2))
    assert loaded.num_slots == 2 * WINDOW
    assert loaded.max_len == WINDOW


def test_the_default_cache_takes_a_share_of_the_free_memory(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = 4 * 2 * 64 * 4
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: per_token * 4 * 50)
    assert loading.load(Group(ALONE), config(gpt2)).num_slots == 48


def test_a_cache_smaller_than_a_block(gpt2: Path) -> None:
    message = (
        "the key/value cache holds 15 tokens on the smallest rank, less than one block of 16; "
        "free memory or set pippy.kv_cache_tokens"
    )
    with pytest.raises(LoadError, match=f"^{re.escape(message)}$"):
        loading.load(Group(ALONE), config(gpt2, kv_cache_tokens=15))


def test_a_cache_of_an_absurd_size(gpt2: Path) -> None:
    with pytest.raises(LoadError, match=r"a key/value cache of \d+ tokens needs .* GB on cpu, which cannot be had"):
        loading.load(Group(ALONE), config(gpt2, kv_cache_tokens=10**19))


def test_with_declared_memory_the_cache_takes_the_rest(gpt2: Path) -> None:
    free = loading.load(Group(ALONE), config(gpt2, kv_cache_tokens=16))
    per_token = 4 * 2 * 64 * 4
    fixed = free.stage.resident_bytes + free.stage.graph.work_bytes_per_row * 512
    assert free.stage.resident_bytes == free.stage.num_bytes + 263 * 64 * 4, "the tied embedding, plain and packed"
    loaded = loading.load(Group(ALONE), config(gpt2, max_batch_tokens=512, device_memory=[fixed + 700 * per_token]))
    assert loaded.num_slots == 688, "700 in whole blocks"
    with pytest.raises(LoadError, match=r"^rank 0: pippy\.device_memory: the model fits no split over 1 stages; the"):
        loading.load(Group(ALONE), config(gpt2, max_batch_tokens=512, device_memory=[fixed + 511 * per_token]))
    kept = config(
        gpt2, max_batch_tokens=512, device_memory=[fixed + 900 * per_token]
    )  # the layers' costs and the trace are found again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading.tracer.subprocess, "Popen", None)
        assert loading.load(Group(ALONE), kept).num_slots == 896


class Peers(Group):
    """Two ranks, of which the other one says how many tokens it holds, and gets what is handed out."""

    def __init__(self, answers: int = 0) -> None:
        super().__init__(ALONE)
        self.answers = answers
        self.handed_out: list[list[bytes]] = []

    def hand_out(self, key: str, values: Sequence[bytes]) -> None:
        self.handed_out.append(list(values))

    def wait_for_all(self, key: str, value: object, timeout_s: float = 1.0) -> list[Any]:
        return [value, self.answers if key == "slots" else None]


def test_whatever_stops_the_tracing_the_other_ranks_hear_of_it(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(loading.tracer, "trace_stages", no_process)
    group = Peers()
    with pytest.raises(LoadError, match=r"rank 0: .*temporarily unavailable"):
        loading.load(group, config(gpt2))
    assert group.handed_out == [[b""]]


def test_new_ranks_with_a_smaller_cache_are_not_used(gpt2: Path) -> None:
    loaded = loading.load(Group(ALONE), config(gpt2, kv_cache_tokens=64))
    with pytest.raises(LoadError, match="a rank holds 48 tokens in its cache now, not 64 as before"):
        loading.rejoin(loaded, Peers(48), config(gpt2))


def test_a_failed_load_names_rank_and_reason(gpt2: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(gpt2, tmp_path / "copy")
    file = sorted(directory.glob("*.safetensors"))[0]
    file.unlink()
    with pytest.raises(LoadError, match=rf"^rank 0: .*{file.name}: missing, although") as caught:
        loading.load(Group(ALONE), config(directory))
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_tensors_that_nothing_reads_are_reported(gpt2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = copy_checkpoint(gpt2, tmp_path / "copy")
    loading.load(Group(ALONE), config(directory, kv_cache_tokens=16))
    assert "nothing reads" not in caplog.text
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"n_layer": 3}))
    # Of the layer's 12, transformers has one on gpt2's list of what may be there: it matches "attn.bias".
    for _ in range(2):  # also when the trace is kept
        caplog.clear()
        loading.load(Group(ALONE), config(directory, kv_cache_tokens=16))
        [record] = [each for each in caplog.records if "nothing reads" in each.message]
        assert record.levelname == "WARNING"
        assert re.match(
            rf"{directory}: nothing reads 11 of the checkpoint's \d+ tensors, such as transformer\.h\.3\.",
            record.message,
        )


def test_early_checks_pass_what_can_work(gpt2: Path) -> None:
    loading.check_early(config(gpt2, split=[1, 3]), 2)
    loading.check_early(config(gpt2), 4)


@pytest.mark.parametrize(
    ("pippy", "num_stages", "message"),
    [
        ({"split": [1, 3]}, 3, r"^pippy.split: \[1, 3\] describes 2 stages, but there are 3"),
        ({}, 5, r"^number of stages: got 5, allowed are 1 to 4, the model's layers$"),
        ({}, 0, r"^number of stages: got 0, allowed are 1 to 4, the model's layers$"),
    ],
)
def test_early_checks_of_the_split(gpt2: Path, pippy: dict, num_stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loading.check_early(config(gpt2, **pippy), num_stages)


@pytest.mark.parametrize("layers", [10**9, 200])
def test_more_layers_than_tensors(gpt2: Path, tmp_path: Path, layers: int) -> None:
    directory = copy_checkpoint(gpt2, tmp_path / "copy")
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"n_layer": layers}))
    message = (
        rf"config\.json: (n_layer: must be at most 10000|{layers} layers, but the checkpoint has only \d+ tensors)"
    )
    with pytest.raises(CheckpointError, match=message):
        loading.check_early(config(directory), 2)


def test_early_checks_of_the_checkpoint(gpt2: Path, tmp_path: Path) -> None:
    directory = copy_checkpoint(gpt2, tmp_path / "copy")
    settings = config(directory)
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a checkpoint index with a 'weight_map'"):
        loading.check_early(settings, 2)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        loading.check_early(settings, 2)
