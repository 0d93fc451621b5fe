"""An operator drains a model and takes it away: what was accepted is answered, and nothing makes a noise."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.command import ts_pippy
from tests.models import WINDOW
from tests.oracle import hf_generate
from tests.packages import Launch, Packages
from tests.processes import wait_until
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

if TYPE_CHECKING:
    from tests.models import Checkpoints

NOISE = re.compile(r"Traceback|ERROR|WARN|Exception|died")
LONG = {"prompt": "Hello", "max_new_tokens": WINDOW - 5, "ignore_eos": True}
DEADLINE_S = 60.0


def health(server: TorchServe, name: str) -> dict[str, object]:
    found: dict[str, object] = server.request(
        "inference", "POST", f"/predictions/{name}/1.0/v1/health", b"{}", {"Content-Type": "application/json"}
    ).json()
    return found


@pytest.mark.parametrize("launch", ["torchrun", "spawn"])
def test_accepted_requests_are_answered_before_the_model_goes(
    server: TorchServe, packages: Packages, checkpoints: Checkpoints, tmp_path: Path, launch: Launch
) -> None:
    model = checkpoints("llama")
    [reference] = hf_generate(model, [byte_tokens("Hello")], WINDOW - 5, ignore_eos=True)
    archive = packages(model, 2, launch)
    name = f"drained-{launch}"
    server.register(name, f"{archive}.mar")
    url = f"http://127.0.0.1:{server.ports['inference']}"
    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(server.post, name, LONG) for _ in range(8)]
        assert wait_until(lambda: health(server, name)["requests"] == {"running": 8, "waiting": 0}, DEADLINE_S)
        draining = pool.submit(ts_pippy, "drain", name, "--url", url, "--key-file", server.key_file)
        assert wait_until(lambda: health(server, name)["drain"] is not None, DEADLINE_S)
        refused = server.post(name, {"prompt": "Hello"})
        done = draining.result()
        answers = [each.result() for each in running]
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert refused.json()["error"]["code"] == "draining"
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("drained")
    for answer in answers:
        assert (answer.status, answer.json()["token_ids"]) == (200, reference.token_ids)
    assert health(server, name)["ready"] is False
    logged = len(server.log())
    server.unregister(name)
    noise = [line for line in server.log()[logged:].splitlines() if NOISE.search(line)]
    assert not noise, noise
