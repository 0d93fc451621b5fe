"""More streams at once than a model accepts: the rest hear of it at once, and those accepted get every token."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.client import Response
from tests.models import WINDOW
from tests.oracle import hf_generate
from tests.packages import Launch, Packages
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

if TYPE_CHECKING:
    from tests.models import Checkpoints

STREAM = {"prompt": "Hello", "max_new_tokens": WINDOW - 5, "ignore_eos": True, "stream": True}
NUM, LIMIT = 64, 16
REFUSED_S = 2.0
"""Far below the seconds of a stream and far above the 0.1 s of an idle machine: CI's is busy."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("launch", ["torchrun", "spawn"])
def test_streams_beyond_the_limits_are_refused_at_once(
    server: TorchServe, packages: Packages, checkpoints: Checkpoints, launch: Launch
) -> None:
    model = checkpoints("llama")
    [reference] = hf_generate(model, [byte_tokens("Hello")], WINDOW - 5, ignore_eos=True)
    limits = {"max_running_requests": LIMIT, "max_waiting_requests": LIMIT}
    frontend = {"batchSize": 1 if launch == "spawn" else 2 * LIMIT + 64, "jobQueueSize": 1000}
    name = packages(model, 2, launch, pippy=limits, **frontend)
    server.register(name, f"{name}.mar")

    def stream(_: int) -> tuple[Response, float]:
        began = time.monotonic()
        return server.post(name, STREAM), time.monotonic() - began

    with ThreadPoolExecutor(NUM) as pool:
        answers = list(pool.map(stream, range(NUM)))
    refused = [(answer, took) for answer, took in answers if answer.status == 429]
    print("refused after", sorted(round(took, 3) for _, took in refused))
    assert len(refused) == NUM - 2 * LIMIT
    assert all(answer.headers["Retry-After"] == "1" for answer, _ in refused)
    assert max(took for _, took in refused) < REFUSED_S
    for answer, _ in answers:
        if answer.status != 429:
            lines = [part for part in answer.text.splitlines() if part]
            assert answer.status == 200
            assert reference.token_ids == [token for line in lines for token in json.loads(line).get("token_ids", [])]
    server.unregister(name)
