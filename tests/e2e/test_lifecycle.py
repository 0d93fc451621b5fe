"""Idle, dying, coming back and going away, with real TorchServe. Order matters: the last test ends the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.client import NO_ANSWER, Response
from tests.models import WINDOW
from tests.oracle import hf_generate
from tests.packages import Packages
from tests.processes import cpu_seconds, cpu_share, kill, wait_until
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

if TYPE_CHECKING:
    from tests.models import Checkpoints

MAX_IDLE_SHARE = 0.02
SHORT_TOKENS, LONG_TOKENS = 12, WINDOW - 5
SHORT, LONG = ({"prompt": "Hello", "max_new_tokens": num, "ignore_eos": True} for num in (SHORT_TOKENS, LONG_TOKENS))
BACK_S = 120.0
"""Long enough for a busy machine; an idle one needs about 10."""


@pytest.fixture(scope="module")
def names(packages: Packages, checkpoints: Checkpoints) -> dict[str, str]:
    """The archives by launch mode."""
    return {launch: packages(checkpoints("llama"), 2, launch) for launch in ("torchrun", "spawn")}


@pytest.fixture(scope="module")
def fragile(
    packages: Packages, names: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TorchServe]:
    """A TorchServe of this module's own, with a model in each launch mode, loaded at start."""
    models = [f"{name}.mar" for name in names.values()]
    with TorchServe(packages.store, tmp_path_factory.mktemp("fragile"), models) as server:
        for name in names.values():
            server.wait_ready(name)
        yield server


@pytest.fixture(scope="module")
def is_right(checkpoints: Checkpoints) -> Callable[[Response, int], bool]:
    """Whether a response holds the right tokens, so many of them."""
    [reference] = hf_generate(checkpoints("llama"), [byte_tokens("Hello")], LONG_TOKENS, ignore_eos=True)

    def check(response: Response, num: int) -> bool:
        return response.status == 200 and response.json()["token_ids"] == reference.token_ids[:num]

    return check


@pytest.mark.alone
def test_idle_models_use_no_processor_time(fragile: TorchServe, names: dict[str, str]) -> None:
    for name in names.values():
        assert fragile.post(name, SHORT).status == 200
    pids = {launch: fragile.worker_pids(name) for launch, name in names.items()}
    assert all(len(each) >= 2 for each in pids.values())
    with ThreadPoolExecutor(len(pids)) as pool:
        shares = dict(zip(pids, pool.map(lambda each: cpu_share(each, 10.0), pids.values()), strict=True))
    assert all(share < MAX_IDLE_SHARE for share in shares.values()), shares


def test_ranks_listen_on_loopback_only(fragile: TorchServe, names: dict[str, str]) -> None:
    ranks = [pid for name in names.values() for pid in fragile.rank_pids(name)]
    addresses = {address for pid, address, _ in fragile.footprint.listening() if pid in ranks}
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize(("launch", "rank"), [("torchrun", 1), ("torchrun", 0), ("spawn", 1)])
def test_a_killed_rank_leaves_no_request_hanging_and_the_model_comes_back(
    fragile: TorchServe,
    names: dict[str, str],
    is_right: Callable[[Response, int], bool],
    launch: str,
    rank: int,
) -> None:
    name = names[launch]
    fragile.wait_ready(name, BACK_S, may_retry=True)
    before = fragile.rank_pids(name)
    assert len(before) == 2
    busy = cpu_seconds(before[:1])
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(answer_of, fragile, name) for _ in range(4)]
        assert wait_until(lambda: cpu_seconds(before[:1]) > busy + 0.1, 10, poll_s=0.01)
        kill(before[rank])
        answers = [each.result() for each in running]
    for answer in answers:
        # Rank 0 of spawn mode computes them anew. Under torchrun it goes too, and they end at once.
        if launch == "spawn":
            assert answer is not None
            assert is_right(answer, LONG_TOKENS)
        else:
            assert answer is None or answer.status in (500, 503)
    fragile.wait_ready(name, BACK_S, may_retry=True)
    assert is_right(fragile.post(name, SHORT), SHORT_TOKENS)
    after = fragile.rank_pids(name)
    assert len(after) == 2
    assert before[rank] not in after
    if launch == "torchrun":
        assert not set(before) & set(after)
        assert not fragile.alive(before)
    else:
        assert after[0] == before[0], "rank 0 serves on; only the lost rank is started anew"


def answer_of(server: TorchServe, name: str) -> Response | None:
    """Return the answer to a long request; None when the connection is cut."""
    try:
        return server.post(name, LONG, timeout_s=BACK_S)
    except TimeoutError:
        raise
    except NO_ANSWER:
        return None


def test_a_killed_spawning_worker_comes_back_without_orphans(
    fragile: TorchServe, names: dict[str, str], is_right: Callable[[Response, int], bool]
) -> None:
    name = names["spawn"]
    answered = fragile.post_all(name, [SHORT] * 30)
    assert all(is_right(response, SHORT_TOKENS) for response in answered)
    before = fragile.worker_pids(name)
    logged = len(fragile.log())
    kill(before[0])
    assert wait_until(lambda: not fragile.alive(before), 10), "its ranks must end with it"
    fragile.wait_loaded_again(logged, BACK_S)
    fragile.wait_ready(name, BACK_S, may_retry=True)
    assert is_right(fragile.post(name, SHORT), SHORT_TOKENS)
    # TorchServe's own line for every request that reaches a handler in this mode.
    received = fragile.log()[logged:].count("self._entry_point=")
    assert 1 <= received < 10, "requests that were answered before are computed once more"


def test_a_killed_torchrun_comes_back_without_orphans(
    fragile: TorchServe, names: dict[str, str], is_right: Callable[[Response, int], bool]
) -> None:
    name = names["torchrun"]
    fragile.wait_ready(name, BACK_S, may_retry=True)
    before = fragile.worker_pids(name)
    kill(before[0])
    assert wait_until(lambda: not fragile.alive(before), 10), "the ranks must end with torchrun"
    fragile.wait_ready(name, BACK_S, may_retry=True)
    assert is_right(fragile.post(name, SHORT), SHORT_TOKENS)


def test_a_model_can_go_and_come_back_beside_another(
    fragile: TorchServe, names: dict[str, str], is_right: Callable[[Response, int], bool]
) -> None:
    fragile.unregister(names["torchrun"])
    assert is_right(fragile.post(names["spawn"], SHORT), SHORT_TOKENS)
    fragile.register(names["torchrun"], f"{names['torchrun']}.mar")


def test_nothing_outlives_a_killed_frontend(fragile: TorchServe, names: dict[str, str]) -> None:
    fragile.kill_frontend()


def test_nothing_remains_after_stop_although_workers_were_killed(
    packages: Packages, names: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = [f"{name}.mar" for name in names.values()]
    with TorchServe(packages.store, tmp_path_factory.mktemp("stopped"), models) as server:
        for name in names.values():
            server.wait_ready(name)
        for name in names.values():
            kill(server.worker_pids(name)[0])
        server.stop()
