"""A thousand random requests over real ranks: each gets what it would get alone, and the cache is whole at the end."""

from __future__ import annotations

import pytest

from tests.command import run_probe
from tests.models import Checkpoints

PROBE = """
import json, queue, random, sys, threading, time
from ts_pippy_handler import launch
from ts_pippy_handler.config import load_config
from ts_pippy_handler.request import SamplingParams

NUM, ALONE = int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(5)
# Small enough that requests are evicted, chunked and share prefixes.
pippy = {"threads_per_rank": 1, "kv_cache_tokens": 512, "block_size": 8}
pippy |= {"max_batch_tokens": 48, "max_running_requests": 24, "max_waiting_requests": 1000}
config = load_config({"handler": {"model_path": sys.argv[1], "dtype": "float32"}, "pippy": pippy})
engine = launch.start_spawned(config, 2, launch.SpawnOptions(stdout=2, log_level="CRITICAL"))
prefixes = [[draw.randrange(256) for _ in range(40)] for _ in range(3)]

def request():
    prompt = [draw.randrange(256) for _ in range(draw.choice([1, 2, 5, 17, 60, 130]))]
    if draw.random() < 0.3:
        prompt = draw.choice(prefixes) + prompt[:20]
    options = {"max_new_tokens": draw.randint(1, 24), "ignore_eos": draw.random() < 0.5}
    if draw.random() < 0.6:
        options |= {"temperature": draw.choice([0.7, 1.0, 3.0]), "seed": draw.randrange(2**60)}
        options |= {"top_k": draw.choice([0, 5]), "top_p": draw.choice([1.0, 0.8]), "min_p": draw.choice([0.0, 0.05])}
    if draw.random() < 0.3:
        options |= {"repetition_penalty": draw.choice([1.0, 1.3]), "presence_penalty": draw.uniform(-1, 1)}
        options |= {"frequency_penalty": draw.uniform(-1, 1), "logit_bias": ((draw.randrange(256), 3.0),)}
    if draw.random() < 0.3:
        options |= {"stop_token_ids": tuple(draw.sample(range(256), 5)), "min_tokens": 1}
        options |= {"logprobs": draw.choice([0, 3])}
    return prompt, SamplingParams(**options)

def start(prompt, params):
    events = queue.SimpleQueue()
    return engine.submit(prompt, params, events.put), events

def drain(events):
    tokens, logprobs = [], []
    while True:
        event = events.get(timeout=120)
        if event.token_id is not None:
            tokens.append(event.token_id)
            logprobs.append(event.logprobs is not None)
        if event.finish_reason is not None:
            return tokens, event.finish_reason.value, logprobs

requests = [request() for _ in range(NUM)]
running, cancelled = [], set()
for index, (prompt, params) in enumerate(requests):
    number, events = start(prompt, params)
    running.append(events)
    if draw.random() < 0.1:
        cancelled.add(index)
        threading.Timer(draw.uniform(0, 0.3), engine.abort, (number,)).start()
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0, 0.1))
outputs = [drain(events) for events in running]
wrong_ends = [
    index for index, (_, reason, _) in enumerate(outputs)
    if reason not in ({"stop", "length", "abort"} if index in cancelled else {"stop", "length"})
]
wrong_logprobs = [
    index for index, (_, _, told) in enumerate(outputs)
    if any(each != (requests[index][1].logprobs is not None) for each in told)
]
scheduler = engine.scheduler
deadline = time.monotonic() + 30
while scheduler.num_running and time.monotonic() < deadline:
    time.sleep(0.05)
scheduler.check_integrity()
left = [scheduler.num_running, scheduler.num_waiting, scheduler.allocator.num_used, len(engine._callbacks)]
evictions, hits = scheduler.num_evictions, scheduler.num_prefix_hits

differ = []
for index in draw.sample(sorted(set(range(NUM)) - cancelled), ALONE):
    tokens, reason, _ = drain(start(*requests[index])[1])
    if (tokens, reason) != outputs[index][:2]:
        differ.append(index)
aborted = sum(reason == "abort" for _, reason, _ in outputs)
engine.close()
print(json.dumps({
    "wrong_ends": wrong_ends, "wrong_logprobs": wrong_logprobs, "left": left, "differ": differ, "aborted": aborted,
    "evictions": evictions, "hits": hits,
}))
"""


@pytest.mark.slow
def test_a_thousand_random_requests(checkpoints: Checkpoints) -> None:
    found = run_probe(PROBE, checkpoints("llama"), 1000, 150, timeout_s=600).json()
    assert found["wrong_ends"] == found["wrong_logprobs"] == found["differ"] == []
    assert found["left"] == [0, 0, 0, 0]
    assert found["aborted"] > 0, "no cancel came in time"
    assert found["hits"] > 0, "no prefix was shared"
    assert found["evictions"] > 0, "the cache never ran out"
