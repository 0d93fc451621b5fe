"""One TorchServe for all tests that do not need to break it; models come and go on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.java import require_java
from tests.packages import LAUNCHES, Launch, Packages
from tests.torchserve import TorchServe

if TYPE_CHECKING:
    from tests.models import Checkpoints


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Archives made with ``ts-pippy package``, in one model store."""
    require_java()
    return Packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def server(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchServe]:
    """A TorchServe without models, on which they can be registered."""
    with TorchServe(packages.store, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session", params=LAUNCHES)
def llama(
    request: pytest.FixtureRequest, server: TorchServe, packages: Packages, checkpoints: Checkpoints
) -> Iterator[tuple[str, Path]]:
    """Name and checkpoint of a small llama, served over two stages in each launch mode in turn."""
    launch: Launch = request.param
    model = checkpoints("llama")
    name = packages(model, 2, launch)
    server.register(name, f"{name}.mar")
    yield name, model
    server.unregister(name)
