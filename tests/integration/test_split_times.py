"""What ``split: time`` predicts of each stage is near what it takes, also where the head is most of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.lib.bench_split import shares, wide_model
from ts_pippy_handler.step_time import MIX

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TOLERANCE = 0.3
"""Twice what a quiet machine needs (docs/performance.md): this one may be busy, and of another kind."""


def test_shares_of_time_are_as_predicted(tmp_path: Path) -> None:
    found = list(shares(wide_model(tmp_path / "wide"), 3, MIX.answer_rows))
    assert sum(share.measured for share in found) == pytest.approx(1)
    assert [share for share in found if abs(share.difference) > TOLERANCE] == []
