"""``Engine.stats``: from any thread, while batches run, and after a rank was started anew."""

from __future__ import annotations

import pytest

from tests.command import run_probe
from tests.models import Checkpoints

pytestmark = pytest.mark.alone
PROBE = """
import json, queue, sys, threading, time
from ts_pippy_handler import launch
from ts_pippy_handler.config import load_config
from ts_pippy_handler.errors import PipelineError
from ts_pippy_handler.request import SamplingParams

config = load_config({"handler": {"model_path": sys.argv[1]}, "pippy": {"threads_per_rank": 1}})
engine = launch.start_spawned(config, 2, launch.SpawnOptions(stdout=2, log_level="CRITICAL"))
found = {}

def generate(num_tokens):
    events = queue.Queue()
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=num_tokens, ignore_eos=True), events.put)
    return events

def end(events):
    while (event := events.get(timeout=60)).finish_reason is None:
        pass
    return event.finish_reason.value

def count(rank):
    return [rank.rank, rank.num_batches, rank.num_tokens]

engine.stats(reset=True)
events = generate(300)
readings = []
threads = [threading.Thread(target=lambda: readings.append(engine.stats())) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(30)
found["readings"] = [[rank.rank for rank in ranks] for ranks in readings]
found["end"] = end(events)
found["counts"] = [count(rank) for rank in engine.stats(reset=True)]

[child] = engine.loaded.group.peers
child.kill()
child.wait()
try:
    engine.stats()
    found["lost"] = "answered"
except PipelineError as error:
    found["lost"] = str(error)
found["end again"] = end(generate(4))
found["counts again"] = [count(rank) for rank in engine.stats()]
started = time.monotonic()
engine.close()
found["close_s"] = time.monotonic() - started
try:
    engine.stats()
    found["closed"] = "answered"
except PipelineError as error:
    found["closed"] = str(error)
print(json.dumps(found))
"""


def test_stats_of_two_ranks(checkpoints: Checkpoints) -> None:
    found = run_probe(PROBE, checkpoints("llama"), timeout_s=240).json()
    assert found["readings"] == [[0, 1]] * 8
    assert (found["end"], found["end again"]) == ("length", "length")
    assert found["counts"] == [[0, 300, 302], [1, 300, 302]]
    assert found["lost"].startswith("a rank did not answer 'read': ")
    # Rank 0 went on counting, the other began anew; what was under way with the lost rank is computed twice.
    (_, first_batches, _), second = found["counts again"]
    assert first_batches >= 4
    assert second[0] == 1
    assert 4 <= second[1] <= first_batches
    assert found["close_s"] < 10, "ranks of different ages waited for each other"
    assert found["closed"].startswith("a rank did not answer 'read': ")
