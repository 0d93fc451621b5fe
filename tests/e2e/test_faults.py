"""A stopped, cut off or stuck rank under a real TorchServe: told in seconds, gone without orphans, and serving again.

``python -m scripts.lib.fault_table`` measures every cell; these are a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.breaking import Breakable
from tests.models import Checkpoints
from tests.packages import Packages

ERROR_S, BACK_S = 10.0, 60.0


@pytest.fixture(scope="module")
def breakable(
    packages: Packages, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Breakable]:
    """Three ranks under torchrun that obey orders to fail."""
    with Breakable(packages, checkpoints("llama"), "torchrun", tmp_path_factory.mktemp("faults")) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank"),
    [("SIGSTOP", 0), ("stuck step", 1), ("connections silent", 2)],
)
def test_a_stream_ends_in_seconds_and_the_model_comes_back(breakable: Breakable, fault: str, rank: int) -> None:
    cell = breakable.measure(fault, rank, "streaming")
    print(cell)
    assert cell.outcome in ("cut", "500")
    assert cell.error_s < ERROR_S
    assert cell.recovery_s < BACK_S
    assert (cell.orphans, cell.wrong, cell.named) == (0, 0, True)
