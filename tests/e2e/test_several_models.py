"""Two models on one TorchServe, and two workers of each: nothing is shared, and each answers with its own weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.oracle import hf_generate
from tests.packages import Launch, Packages
from tests.processes import kill, wait_until
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

if TYPE_CHECKING:
    from tests.models import Checkpoints

# Under continuous batching TorchServe lets several workers stop each other, and the handler refuses to load.
NUM_WORKERS: dict[Launch, int] = {"torchrun": 1, "torchrun-batch": 2, "spawn": 2}
NEW_TOKENS = 30
PROMPTS = [f"Question {number}" for number in range(24)]
BACK_S = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("launch", NUM_WORKERS)
def test_two_models_with_workers_of_their_own(
    server: TorchServe, packages: Packages, checkpoints: Checkpoints, launch: Launch
) -> None:
    models = [checkpoints("llama"), checkpoints("llama", seed=1)]
    num_workers = NUM_WORKERS[launch]
    workers = {"minWorkers": num_workers, "maxWorkers": num_workers}
    names = [packages(model, 2, launch, **workers) for model in models]
    prompts = [byte_tokens(prompt) for prompt in PROMPTS]
    expected = {
        name: [reference.token_ids for reference in hf_generate(model, prompts, NEW_TOKENS, ignore_eos=True)]
        for name, model in zip(names, models, strict=True)
    }
    assert expected[names[0]] != expected[names[1]]

    def answers(name: str) -> list[list[int]]:
        bodies = [{"prompt": each, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} for each in PROMPTS]
        responses = server.post_all(name, bodies)
        assert {response.status for response in responses} == {200}
        return [response.json()["token_ids"] for response in responses]

    def serving() -> list[set[int]]:
        """Return, for each model, the processes of rank 0 that answer."""
        with ThreadPoolExecutor(8) as pool:
            asked = [name for name in names for _ in range(16)]
            health = list(pool.map(lambda name: server.health(name, method="GET"), asked))
        found: dict[str, set[int]] = {name: set() for name in names}
        for name, answer in zip(asked, health, strict=True):
            if answer.status == 200:
                found[name].add(answer.json()["ranks"][0]["pid"])
        return list(found.values())

    for name in names:
        server.register(name, f"{name}.mar")
    assert wait_until(lambda: [len(each) for each in serving()] == [num_workers] * 2, BACK_S), "all workers answer"
    assert not set.intersection(*serving())
    with ThreadPoolExecutor(len(names)) as pool:
        assert dict(zip(names, pool.map(answers, names), strict=True)) == expected

    first, second = names
    others = set(server.worker_pids(second))
    victim = server.rank_pids(first)[-1]
    kill(victim)
    assert answers(second) == expected[second]
    server.wait_ready(first, BACK_S, may_retry=True)
    assert wait_until(lambda: len(serving()[0]) == num_workers, BACK_S), "the worker that lost a rank is back"
    assert victim not in server.worker_pids(first)
    assert {name: answers(name) for name in names} == expected
    assert set(server.worker_pids(second)) == others, "the other model's processes are the same"
    for name in names:
        server.unregister(name)
