"""While loading, a rank holds its own weights and little else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.models import Checkpoints

PROBE = """
import json, os, sys
from pathlib import Path
from ts_pippy_handler import launch
from ts_pippy_handler.config import load_config

def peak(pid):
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

config = load_config({"handler": {"model_path": sys.argv[1]}})
engine = launch.start_spawned(config, int(sys.argv[2]), launch.SpawnOptions(stdout=2, log_level="WARNING"))
pids = [os.getpid(), *(process.pid for process in engine.loaded.group.peers)]
print(json.dumps([peak(pid) for pid in pids]))
engine.close()
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
    return done.stdout.splitlines()[-1]


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
    peaks = json.loads(run(PROBE, model, num_stages))
    for rank, (peak, share) in enumerate(zip(peaks, shares, strict=True)):
        assert peak <= 1.3 * share + base, f"rank {rank}: peak {peak / 1e6:.0f} MB, share {share / 1e6:.0f} MB"
