"""Memory is measured or declared, and every rank hears the same of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_pippy_handler import device_memory
from ts_pippy_handler.config import PippyConfig, parse
from ts_pippy_handler.errors import ConfigError, LoadError
from ts_pippy_handler.ranks import Group, Place

FREE = 10_000


class Answers(Group):
    """A rank among others whose answers are known."""

    def __init__(self, *others: object) -> None:
        size = len(others) + 1
        super().__init__(Place(rank=0, local_rank=0, world_size=size, local_world_size=size))
        self.others = others

    def wait_for_all(self, key: str, value: object, timeout_s: float = 1.0) -> list[Any]:
        assert key == "memory"
        return [value, *self.others]


measure = device_memory.free_bytes


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: FREE)


def pippy(memory: Any) -> PippyConfig:
    return parse(PippyConfig, json.loads(json.dumps({"device_memory": memory})))  # as it reaches the other ranks


@pytest.mark.parametrize(
    ("memory", "budgets"),
    [
        ("measured", [4_500, 2_700]),
        ("2KiB", [2_048, 2_048]),
        (["2KiB", 1_000], [2_048, 1_000]),
        ({1: "4kB"}, [4_500, 4_000]),
        ({0: 7, 1: 8}, [7, 8]),
    ],
)
def test_every_rank_gets_what_is_declared_or_measured(memory: Any, budgets: list[int]) -> None:
    """Two ranks share the host of rank 0, which has 10,000 bytes; the other says 3,000."""
    agreed = device_memory.agree(Answers(3_000), pippy(memory))
    assert agreed is not None
    assert agreed.budgets == budgets
    assert agreed.on_cpu


def test_nobody_is_asked_without_need() -> None:
    assert (
        device_memory.agree(Group(Place(rank=1, local_rank=1, world_size=2, local_world_size=2)), PippyConfig()) is None
    )


def test_a_rank_that_cannot_measure() -> None:
    with pytest.raises(LoadError, match=r"^rank 1 cannot tell how much memory is free: CUDA error: out of memory$"):
        device_memory.agree(Answers("CUDA error: out of memory"), pippy("measured"))


def test_more_declared_than_free_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    device_memory.agree(Answers(5_000), pippy(["5kB", "5.1kB"]))
    assert [record.message for record in caplog.records] == [
        "pippy.device_memory: 5.0 KiB declared for rank 1, where 4.9 KiB are free now"
    ]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ([1, 2, 3], r"^pippy\.device_memory: has 3 sizes, but there are 2 ranks$"),
        ({2: 5}, r"^pippy\.device_memory: names rank 2, but there are only ranks 0 to 1$"),
    ],
)
def test_sizes_for_other_ranks_than_there_are(memory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        device_memory.check_declared(pippy(memory), 2)
    with pytest.raises(ConfigError, match=message):
        device_memory.on_this_machine(pippy(memory), 2)


def test_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [Place(rank=rank, local_rank=rank, world_size=3, local_world_size=3) for rank in range(3)]
    assert [device_memory.free_share(place) for place in places] == [FREE // 2, FREE, FREE // 2]


def test_pages_of_files_are_no_memory_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "memory.max": "1000000",
        "memory.current": "990000",
        "memory.stat": "anon 90000\nfile 900000\nactive_file 300000\ninactive_file 500000\n",
    }.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    assert measure(torch.device("cpu")) == 10_000 + 800_000
    (tmp_path / "memory.stat").unlink()
    assert measure(torch.device("cpu")) == 10_000
