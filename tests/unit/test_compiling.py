"""Compiled stages compute what uncompiled ones do, and are never compiled while a request waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import Checkpoints
from tests.unit.pipelines import Pipeline, batch_of
from ts_pippy_handler import compiling
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.request import Batch

# torch's own compiler uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_equals_uncompiled(checkpoints: Checkpoints, family: str) -> None:
    directory = checkpoints(family, layers=2)
    eager, compiled = (Pipeline(directory, [1, 1]) for _ in range(2))
    for stage in compiled.stages:
        stage.compile()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    batches = [
        batch_of(0, [([5, 9, 77], 0, [(0, 16)]), (list(range(20)), 0, [(32, 32)])]),
        batch_of(1, [([1], 3, [(0, 16)]), ([2], 20, [(32, 32)])]),
        batch_of(2, [([3], 4, [(0, 16)])]),
        Batch(3, [4, 5, 6], batch_of(3, [([4, 5, 6], 5, [(0, 16)])]).segments, []),
    ]
    for batch in batches:
        expected, seen = eager.run(batch), compiled.run(batch)
        assert seen.shape == expected.shape
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-3)
    assert torch._dynamo.utils.counters["frames"]["total"] == frames, "nothing was compiled later"


def test_what_cannot_be_compiled_says_so(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(checkpoints("llama", layers=2), [2])

    def no_compiler(*args: object, **options: object) -> object:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(compiling.torch, "compile", lambda *args, **options: no_compiler)
    message = r"^pippy\.compile: the stage cannot be compiled: RuntimeError: no C\+\+ compiler was found; .*to false"
    with pytest.raises(LoadError, match=message):
        pipeline.stages[0].compile()
