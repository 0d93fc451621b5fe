"""What unit tests share: small models compute on one thread, so that two busy cores do not wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None, derandomize=True, database=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread where torch is in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that passes for a checkpoint as long as nobody reads it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory
