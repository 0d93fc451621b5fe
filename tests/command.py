"""The commands that a user types, run as processes of their own: ``ts-pippy`` and ``torch-model-archiver``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.processes import Footprint
from tests.torchserve import BIN


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Return what the command printed, which must be one JSON document of one line or more and nothing else."""
        assert self.status == 0, self.stderr
        return json.loads(self.stdout)

    def error(self) -> str:
        """Return the one readable line with which the command refused, having printed nothing else."""
        assert self.status not in (0, None), f"no error; stdout: {self.stdout[:500]}"
        assert self.stdout == ""
        assert "Traceback" not in self.stderr
        lines = self.stderr.strip().splitlines()
        assert len(lines) == 1, self.stderr
        return lines[0]


def ts_pippy(*arguments: object, timeout_s: float = 300.0, environment: Mapping[str, str] | None = None) -> Done:
    """Run ``ts-pippy``; it must leave no process, socket or shared memory behind, however it ends.

    Args:
        arguments: Of the command.
        timeout_s: How long it may take.
        environment: Further environment variables.
    """
    return _run([BIN / "ts-pippy", *map(str, arguments)], timeout_s, environment or {})


def run_probe(code: str, *arguments: object, timeout_s: float) -> Done:
    """Run Python code with arguments; it must leave nothing behind, as :func:`ts_pippy`."""
    return _run([sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)], timeout_s, {})


def _run(command: Sequence[str | Path], timeout_s: float, environment: Mapping[str, str]) -> Done:
    footprint = Footprint()
    try:
        done = subprocess.run(
            command,
            env=footprint.environment() | dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        left = footprint.leftovers(10.0)
        assert not left, f"left behind: {left}\n{done.stderr}"
        return Done(done.returncode, done.stdout, done.stderr)
    finally:
        footprint.erase()


def generate(model_dir: Path, stages: int, prompts: Sequence[Sequence[int]], *options: object) -> Any:
    """Run ``ts-pippy generate --json`` on token lists, in float32, and return the parsed answers."""
    ids = [part for prompt in prompts for part in ("--input-ids", json.dumps(list(prompt)))]
    return ts_pippy("generate", model_dir, "--stages", stages, "--dtype", "float32", "--json", *ids, *options).json()


def archive(store: Path, name: str, handler: Path, config: Mapping[str, Any]) -> str:
    """Package a handler file and a model-config.yaml with torch-model-archiver; return the archive's name."""
    config_file = store / f"{name}-model-config.yaml"
    config_file.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    command: list[str | Path] = [BIN / "torch-model-archiver", "--model-name", name, "--version", "1.0", "--force"]
    command += ["--handler", handler, "--config-file", config_file, "--export-path", store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return f"{name}.mar"
