"""While loading, a rank holds its own weights and little else."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.models import Checkpoints

PROBE = """
import logging, sys
from ts_pippy_handler import launch
from ts_pippy_handler.config import load_config

logging.basicConfig(stream=sys.stdout, level="INFO", format="%(message)s")
config = load_config({"handler": {"model_path": sys.argv[1]}})
launch.start_spawned(config, int(sys.argv[2]), launch.SpawnOptions(stdout=1, log_level="INFO")).close()
"""
BASE = """
import torch, transformers
from pathlib import Path
line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(line.split()[1]) * 1024)
"""


def run(code: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3])
def test_peak_memory_is_the_share_and_a_third(checkpoints: Checkpoints, num_stages: int) -> None:
    model = checkpoints.big()
    assert sum(file.stat().st_size for file in model.glob("*.safetensors")) >= 300e6
    assert len(list(model.glob("*.safetensors"))) >= 4
    plan = subprocess.run(
        [sys.executable, "-m", "ts_pippy_handler.cli", "plan", str(model), "--stages", str(num_stages), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    shares = [stage["weight_bytes"] for stage in json.loads(plan.stdout)["stages"]]
    base = int(run(BASE))
    loaded = run(PROBE, model, num_stages)
    peaks = dict(re.findall(r"^rank (\d+): stage .* peak (\d+) MB resident$", loaded, re.MULTILINE))
    assert len(peaks) == num_stages, loaded
    for rank, share in enumerate(shares):
        peak = int(peaks[str(rank)]) * 1e6
        assert peak <= 1.3 * share + base, f"rank {rank}: peak {peak / 1e6:.0f} MB, share {share / 1e6:.0f} MB"
