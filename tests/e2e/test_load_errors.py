"""A model that cannot be loaded says why within seconds, in the log and to who registers it, and is given up."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models import Checkpoints, copy_checkpoint
from tests.packages import Launch, Packages
from tests.torchserve import TorchServe

ANSWER_S = 60.0
"""A slow and busy machine needs half of it until the interpreter, torch and the ranks are up."""


def truncate(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])


def drop_config(model: Path) -> None:
    (model / "config.json").unlink()


Mistake = tuple[dict[str, Any], Callable[[Path], None] | None, str]
"""Changes of model-config.yaml, damage to the checkpoint, and what the log says of it."""
DTYPE = r"handler\.dtype: unknown dtype; did you mean 'float32'"
KEY = r"pippy\.chunk: unknown key \(value 2\); did you mean 'chunks'\?"
MISTAKES: dict[str, Mistake] = {
    "a misspelt dtype": ({"handler": {"dtype": "flaot32"}}, None, DTYPE),
    "an unknown key": ({"pippy": {"chunk": 2}}, None, KEY),
    "a missing model": ({"handler": {"model_path": "/no/such/model"}}, None, r"not a directory.*'/no/such/model'"),
    "too many stages": ({"stages": 6}, None, r"number of stages: got 6, allowed are 1 to 5"),
    "a truncated shard": ({}, truncate, r"\.safetensors"),
    "no config.json": ({}, drop_config, r"config\.json"),
}


IN_DEFAULT_RUN = {"an unknown key", "too many stages", "a truncated shard"}


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=[] if each in IN_DEFAULT_RUN else [pytest.mark.slow]) for each in MISTAKES]
)
@pytest.mark.parametrize("launch", ["torchrun", "spawn"])
def test_the_reason_is_told_in_seconds(
    server: TorchServe,
    packages: Packages,
    checkpoints: Checkpoints,
    tmp_path: Path,
    launch: Launch,
    mistake: str,
) -> None:
    changes, damage, reason = MISTAKES[mistake]
    model = copy_checkpoint(checkpoints("llama"), tmp_path / "model")
    name = packages.changed(model, launch, changes)
    if damage is not None:
        damage(model)
    logged = len(server.log())
    started = time.monotonic()
    answer = server.manage("POST", f"/models?url={name}.mar&initial_workers=1&synchronous=true", timeout_s=300)
    answered = time.monotonic() - started
    told = re.search(reason, server.log()[logged:])
    server.manage("DELETE", f"/models/{name}")
    print(f"{launch}, {mistake}: {answered:.1f} s")
    assert told is not None, server.log()[logged:][-3000:]
    assert answer.status == 500  # the text of the answer is TorchServe's own: "Failed to start workers for model …"
    assert answered < ANSWER_S
