"""Whoever reaches a port that a rank listens on, and is no rank, neither ends nor holds up the group.

What torch itself does not withstand is said in docs/architecture.md, and is no case here.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import socket
from collections.abc import Iterator

import psutil
import pytest
import torch

from tests.models import Checkpoints
from ts_pippy_handler import launch
from ts_pippy_handler.config import load_config
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.request import FinishReason, SamplingParams, TokenEvent

NEW_TOKENS = 12
ANSWER_S = 60.0
PAYLOADS = {"half open": [b""]}


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[Engine]:
    """Three real ranks on loopback."""
    settings = {"threads_per_rank": 1, "kv_cache_tokens": 512}
    config = load_config({"handler": {"model_path": str(checkpoints("llama"))}, "pippy": settings})
    engine = launch.start_spawned(config, 3)
    yield engine
    engine.close()


def tokens_of(engine: Engine) -> list[int | None]:
    events: queue.Queue[TokenEvent] = queue.Queue()
    engine.submit([5, 6, 7], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True), events.put)
    received = [events.get(timeout=ANSWER_S) for _ in range(NEW_TOKENS)]
    assert received[-1].finish_reason is FinishReason.LENGTH, received[-1]
    return [event.token_id for event in received]


def pids_of(engine: Engine) -> list[int]:
    return [psutil.Process().pid, *(child.pid for child in engine.loaded.group.peers)]


def ports_of(pids: list[int]) -> dict[tuple[str, int], int]:
    """Return every address that these processes listen on, with the rank."""
    found = {}
    for rank, pid in enumerate(pids):
        for each in psutil.Process(pid).net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                found[(each.laddr.ip, each.laddr.port)] = rank
    return found


def test_nothing_that_was_sent_is_kept(engine: Engine) -> None:
    counts = []
    for _ in range(3):
        for _ in range(5):
            tokens_of(engine)
        gc.collect()
        counts.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    assert counts[2] - counts[1] < NEW_TOKENS, f"tensors after 5, 10 and 15 requests of {NEW_TOKENS} steps: {counts}"


@pytest.mark.parametrize("kind", PAYLOADS)
def test_strangers_at_every_port(engine: Engine, kind: str) -> None:
    expected, pids = tokens_of(engine), pids_of(engine)
    ports = ports_of(pids)
    assert len(ports) >= 3
    with contextlib.ExitStack() as stack:
        for address in ports:
            for payload in PAYLOADS[kind]:
                stranger = stack.enter_context(socket.create_connection(address, 5))
                with contextlib.suppress(OSError):
                    stranger.sendall(payload)
        assert tokens_of(engine) == expected, "while they are connected"
    assert tokens_of(engine) == expected, "after they have gone"
    assert pids_of(engine) == pids, "no rank was started anew"
    assert engine.health()["ready"]


def test_a_hundred_connections_to_every_port(engine: Engine) -> None:
    expected, pids = tokens_of(engine), pids_of(engine)
    with contextlib.ExitStack() as stack:
        for address in ports_of(pids):
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, 5))
        assert tokens_of(engine) == expected
        assert engine.health()["ready"]
    assert tokens_of(engine) == expected
    assert pids_of(engine) == pids
