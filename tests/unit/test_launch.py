"""The engine of one rank, started as the handlers start it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import EOS_ID, Checkpoints, copy_checkpoint
from tests.oracle import hf_generate
from tests.unit.pipelines import eager_logits
from ts_pippy_handler import launch
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import ConfigError, LoadError, PipelineError
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent


def config(directory: Path, **pippy: object) -> ServingConfig:
    settings = {"threads_per_rank": 1, "kv_cache_tokens": 256, **pippy}
    return load_config({"handler": {"model_path": str(directory)}, "pippy": settings})


def test_the_scheduler_gets_its_limits_from_the_configuration(checkpoints: Checkpoints) -> None:
    settings = config(checkpoints("gpt2", layers=4), max_batch_tokens=77, max_running_requests=3, chunks=5)
    engine = launch.start_spawned(settings, 1)
    try:
        limits = engine.scheduler.limits
        assert (limits.max_batch_tokens, limits.max_running, limits.max_waiting) == (77, 3, 256)
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
        assert engine.scheduler.limits.max_batch_tokens == 96, "the default on CPUs"
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


def test_tokens_that_the_checkpoint_suppresses_never_come(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory = copy_checkpoint(checkpoints("gpt2", layers=4), tmp_path / "copy")
    prompts, wanted = [[5, 6, 7], [9]], SamplingParams(max_new_tokens=6)
    usual = {token for reference in hf_generate(directory, prompts, 6) for token in reference.token_ids}
    file = directory / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(settings | {"suppress_tokens": [*sorted(usual)[:4], 10**6]}))
    expected = hf_generate(copy_checkpoint(directory, tmp_path / "other"), prompts, 6)
    assert not usual <= {token for reference in expected for token in reference.token_ids}
    engine = launch.start_spawned(config(directory), 1)
    try:
        for prompt, reference in zip(prompts, expected, strict=True):
            events: queue.Queue[TokenEvent] = queue.Queue()
            engine.submit(prompt, wanted, events.put)
            assert [events.get(timeout=30).token_id for _ in range(6)] == reference.token_ids
    finally:
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_overflows_ends_with_an_error_and_harms_no_other(
    checkpoints: Checkpoints, tmp_path: Path, temperature: float
) -> None:
    directory = copy_checkpoint(checkpoints("llama", layers=2, shard_bytes=None), tmp_path / "copy")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][200] = torch.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    wanted = SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=temperature, seed=1)
    engine = launch.start_spawned(config(directory), 1)
    try:
        queues: list[queue.Queue[TokenEvent]] = [queue.Queue() for _ in range(3)]
        for prompt, events in zip(([5, 6], [5, 200, 6], [5, 6]), queues, strict=True):
            engine.submit(prompt, wanted, events.put)
        bad = queues[1].get(timeout=30)
        assert (bad.token_id, bad.finish_reason) == (None, FinishReason.ERROR)
        assert "NaN or infinity" in str(bad.error)
        good = [[events.get(timeout=30).token_id for _ in range(4)] for events in (queues[0], queues[2])]
        assert good[0] == good[1]
        assert engine.failure is None
        engine.scheduler.check_integrity()
    finally:
        engine.close()


def test_mistakes_are_found_before_anything_starts(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^number of stages: got 5, allowed are 1 to 4, the model's layers$"):
        launch.start_spawned(config(checkpoints("gpt2", layers=4)), 5)
    directory = copy_checkpoint(checkpoints("gpt2", layers=4), tmp_path / "copy")
    for file in directory.glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(LoadError, match="unreadable or truncated"):
        launch.start_spawned(config(directory), 1)


_BROKEN = """
import queue, sys, time
from ts_pippy_handler import launch
from ts_pippy_handler.config import load_config
from ts_pippy_handler.request import SamplingParams

def main():
    config = load_config({"handler": {"model_path": sys.argv[1]}, "pippy": {"kv_cache_tokens": 256}})
    engine = launch.start_spawned(config, 1, launch.SpawnOptions(ends_process=sys.argv[2] == "ends"))
    def fail(*_):
        raise ValueError("the stage is broken")
    engine.loaded.stage.run = fail
    events = queue.Queue()
    engine.submit([5, 6], SamplingParams(max_new_tokens=4), events.put)
    print(events.get(timeout=30).error, flush=True)
    time.sleep(3)
    print("goes on", flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("then", "status"), [("ends", 1), ("goes on", 0)])
def test_a_pipeline_that_cannot_be_kept_alive_answers_and_ends_its_process(
    checkpoints: Checkpoints, tmp_path: Path, then: str, status: int
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(_BROKEN)
    command = [sys.executable, script, checkpoints("gpt2", layers=4), then]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert "the stage is broken" in lines[0]
    assert lines[1:] == ["goes on"] * (status == 0)
    assert done.returncode == status
