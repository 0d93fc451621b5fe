"""A plan names every stage's share, and reads no weights for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models import Checkpoints, copy_checkpoint
from tests.unit.pipelines import eager
from ts_pippy_handler.config import load_config
from ts_pippy_handler.errors import ConfigError
from ts_pippy_handler.plan import Plan, StagePlan, make_plan


@pytest.fixture(scope="module")
def weightless(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without its weight files."""
    directory = copy_checkpoint(checkpoints("llama", layers=4), tmp_path_factory.mktemp("plan") / "llama")
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    return directory


def planned(directory: Path, num_stages: int, **pippy: object) -> Plan:
    return make_plan(load_config({"handler": {"model_path": str(directory)}, "pippy": pippy}), num_stages)


def test_the_stages_add_up_to_the_model(checkpoints: Checkpoints, weightless: Path) -> None:
    plan = planned(weightless, 3)
    total = sum(parameter.numel() for parameter in eager(str(checkpoints("llama", layers=4))).parameters())
    assert (plan.model_type, plan.dtype, plan.split) == ("llama", "float32", "time")
    assert [stage.stage for stage in plan.stages] == [0, 1, 2]
    assert [stage.first_layer for stage in plan.stages] == [
        sum(stage.num_layers for stage in plan.stages[:index]) for index in range(3)
    ]
    assert sum(stage.num_layers for stage in plan.stages) == 4
    assert sum(stage.num_parameters for stage in plan.stages) == total
    assert sum(stage.weight_bytes for stage in plan.stages) == 4 * total
    assert sum(stage.kv_bytes_per_token for stage in plan.stages) == 4 * (2 * 2 * 16) * 4
    assert all(stage.read_bytes_per_token <= stage.weight_bytes for stage in plan.stages)
    assert sum(stage.time_share for stage in plan.stages) == pytest.approx(1)
    assert plan.reason.startswith(
        "Cut so that the slowest stage is as fast as it can be (split: time, for 2 prompt tokens "
    )


def test_a_split_by_hand(weightless: Path) -> None:
    assert [stage.num_layers for stage in planned(weightless, 2, split=[3, 1]).stages] == [3, 1]
    with pytest.raises(ConfigError, match=r"^number of stages: got 9, allowed are 1 to 4, the model's layers$"):
        planned(weightless, 9)


def stage(index: int, read: int) -> StagePlan:
    return StagePlan(
        stage=index,
        first_layer=5 * index,
        num_layers=5,
        num_parameters=1_234_567,
        weight_bytes=4_938_268,
        read_bytes_per_token=read,
        time_share=read / 5_000_000,
        kv_bytes_per_token=2048,
    )


def test_as_table_and_as_data() -> None:
    stages = [stage(0, 1_000_000), stage(1, 4_000_000)]
    plan = Plan(model_type="llama", dtype="float16", split="memory", stages=stages, reason="Cut [here] for a reason.")
    table = plan.as_table().splitlines()
    assert "llama, float16, 2 stages, split: memory" in table[0]
    rows = [line for line in table if "1,234,567" in line]
    assert "0-4" in rows[0]
    assert "5-9" in rows[1]
    assert [row.count("█") for row in rows] == [5, 20]
    assert all("4.9" in row and "2,048" in row for row in rows)
    assert ["20.0%" in rows[0], "80.0%" in rows[1]] == [True, True]
    assert table[-1] == "Cut [here] for a reason."
    data = json.loads(json.dumps(plan.as_dict()))
    assert data["stages"][1]["read_bytes_per_token"] == 4_000_000
    assert data["stages"][1]["time_share"] == 0.8
    assert set(data) == {"model_type", "dtype", "split", "stages", "reason"}


def test_the_title_of_a_split_by_hand() -> None:
    plan = Plan(model_type="opt", dtype="float32", split=[5], stages=[stage(0, 1)], reason="")
    assert "opt, float32, 1 stages, split: given" in plan.as_table()
