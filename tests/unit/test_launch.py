"""The engine of one rank, started as the handlers start it."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest

from tests.models import EOS_ID, Checkpoints, copy_checkpoint
from tests.unit.pipelines import eager_logits
from ts_pippy_handler import launch
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import ConfigError, LoadError, PipelineError
from ts_pippy_handler.launch import eos_token_ids
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent


def config(directory: Path, **pippy: object) -> ServingConfig:
    settings = {"threads_per_rank": 1, "kv_cache_tokens": 256, **pippy}
    return load_config({"handler": {"model_path": str(directory)}, "pippy": settings})


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [7, 8]}, "config.json": {"eos_token_id": 2}}, [7, 8]),
        ({"generation_config.json": {"eos_token_id": 0}, "config.json": {"eos_token_id": 2}}, [0]),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 2}}, [2]),
        ({"config.json": {"eos_token_id": [2, 3]}}, [2, 3]),
        ({"config.json": {"eos_token_id": None}}, []),
        ({}, []),
    ],
)
def test_tokens_that_end_a_text(tmp_path: Path, files: dict[str, dict], expected: list[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(str(tmp_path)) == expected


def test_the_scheduler_gets_its_limits_from_the_configuration(checkpoints: Checkpoints) -> None:
    settings = config(checkpoints("gpt2", layers=4), max_batch_tokens=77, max_running_requests=3, chunks=5)
    engine = launch.start_spawned(settings, 1)
    try:
        limits = engine.scheduler.limits
        assert (limits.max_batch_tokens, limits.max_running, limits.max_waiting) == (77, 3, 1024)
        assert (limits.num_in_flight, limits.max_len) == (5, 256)
        assert engine.scheduler.allocator.num_blocks == 16
        assert engine.eos_token_ids == [EOS_ID]
    finally:
        engine.close()


def test_one_stage_continues_prompts_as_the_model_does(checkpoints: Checkpoints) -> None:
    directory = checkpoints("gpt2", layers=4)
    engine = launch.start_spawned(config(directory), 1)
    prompts = [[5, 6, 7], [200] * 12, [9]]
    try:
        queues: list[queue.Queue[TokenEvent]] = [queue.Queue() for _ in prompts]
        wanted = SamplingParams(max_new_tokens=4, ignore_eos=True)
        for prompt, events in zip(prompts, queues, strict=True):
            engine.submit(prompt, wanted, events.put)
        for prompt, events in zip(prompts, queues, strict=True):
            received = [events.get(timeout=30) for _ in range(4)]
            assert [event.finish_reason for event in received] == [None, None, None, FinishReason.LENGTH]
            tokens = [event.token_id for event in received]
            logits = eager_logits(directory, prompt + tokens[:-1])
            assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    finally:
        engine.close()
    assert not engine.is_running
    with pytest.raises(PipelineError, match=r"^the model is being unloaded$"):
        engine.submit([1], wanted, queue.Queue().put)


def test_mistakes_are_found_before_anything_starts(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^number of stages: got 5, allowed are 1 to 4, the model's layers$"):
        launch.start_spawned(config(checkpoints("gpt2", layers=4)), 5)
    directory = copy_checkpoint(checkpoints("gpt2", layers=4), tmp_path / "copy")
    for file in directory.glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(LoadError, match="unreadable or truncated"):
        launch.start_spawned(config(directory), 1)
