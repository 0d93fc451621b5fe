"""Time counts once, as what it was spent on; readers reset without disturbing the loop that counts."""

from __future__ import annotations

from typing import Any

import pytest

from ts_pippy_handler import meter
from ts_pippy_handler.meter import Meter, RankStats


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(meter, "time", fake)
    monkeypatch.setattr(meter, "_STARTED", 100.0)
    return fake


def seconds(read: dict[str, Any]) -> list[float]:
    return [read[f"{each}_s"] for each in ("compute", "wait", "send", "bookkeeping", "elapsed", "cpu")]


def test_each_moment_counts_once(clock: Clock) -> None:
    counted = Meter()
    clock.now += 1
    counted.skip()
    clock.now += 2
    counted.spent("wait")
    clock.now += 3
    counted.spent("compute")
    clock.now += 4
    counted.spent("compute")
    clock.now += 5
    counted.spent("send")
    assert seconds(counted.read()) == [7, 2, 5, 0, 15, 57.5]


def test_a_reset_is_where_the_next_reading_begins(clock: Clock) -> None:
    counted = Meter()
    counted.ran(7)
    counted.received()
    counted.count_bytes(100)
    clock.now += 2
    counted.spent("bookkeeping")
    first = counted.read(reset=True)
    assert (first["num_batches"], first["num_tokens"]) == (1, 7)
    assert (first["num_receives"], first["bytes_received"]) == (1, 100)
    clock.now += 4
    counted.spent("compute")
    counted.ran(5)
    for _ in range(2):  # reading alone resets nothing
        later = counted.read()
        assert seconds(later) == [4, 0, 0, 0, 4, 2]
        assert (later["num_batches"], later["num_tokens"], later["bytes_received"]) == (1, 5, 0)


def test_a_reading_has_the_fields_of_the_stats() -> None:
    stats = RankStats(rank=3, **meter.read(False))
    assert stats.rank == 3
    assert stats.peak_memory_bytes > 1_000_000
    assert stats.cpu_s > 0


def test_peak_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter.os, "getpid", lambda: 0)
    assert meter.peak_memory_bytes() > 1_000_000
