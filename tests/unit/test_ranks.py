"""A process learns its place from the environment, and failures of one rank are the reason on all."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from ts_pippy_handler import network, ranks
from ts_pippy_handler.config import PippyConfig
from ts_pippy_handler.errors import CheckpointError, ConfigError, LoadError, PipelineError
from ts_pippy_handler.network import Interface
from ts_pippy_handler.ranks import Group, Place, device_of, join, open_store, place_from_environment, set_threads

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TS_PIPPY_GENERATION", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_rank_variables() -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)


def place(rank: int = 0, world_size: int = 1, **others: int) -> Place:
    values = {"local_rank": rank, "local_world_size": world_size, **others}
    return Place(rank=rank, world_size=world_size, **values)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, place()),
        ({"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, place(2, 4)),
        (
            {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            place(5, 8, local_rank=1, local_world_size=4),
        ),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, place(1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "TS_PIPPY_GENERATION": "3"}, place(1, 2, generation=3)),
    ],
)
def test_the_place_in_the_environment(environment: dict[str, str], expected: Place) -> None:
    os.environ.update(environment)
    assert place_from_environment() == expected


def test_names_are_those_of_upstream_and_differ_between_generations() -> None:
    assert place(3, 4).name == "worker3"
    assert place(3, 4, generation=2).name == "worker3-2"


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "device"), [(0, 3, "cpu"), (4, 3, "cuda:3"), (2, 3, "cuda:1"), (1, 2, "cuda:0")]
)
def test_devices(monkeypatch: pytest.MonkeyPatch, num_gpus: int, local_rank: int, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert device_of(place(local_rank, 8)) == torch.device(device)


def test_cores_are_divided_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert set_threads(place(0, 8, local_world_size=4), None) == torch.get_num_threads() == 3
    assert set_threads(place(0, 100), None) == torch.get_num_threads() == 1
    assert set_threads(place(0, 8), 5) == torch.get_num_threads() == 5


class Store:
    """What the ranks share, in a dict."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Ended:
    """A child that has ended."""

    pid = 4711

    def poll(self) -> int:
        return 1


def test_values_are_shared_in_order() -> None:
    store = Store()
    store.set("ts_pippy/size/1", "7")
    assert Group(place(0, 2), store).wait_for_all("size", 5) == [5, 7]
    assert Group(place(1, 2), store).wait_for_all("size", 7) == [5, 7]
    assert Group(place()).wait_for_all("size", 5) == [5]


def test_ranks_that_do_not_appear_are_named() -> None:
    group = Group(place(1, 4), Store())
    with pytest.raises(LoadError, match=r"^ranks \[0, 2, 3\] of 4 did not appear within 0.01 s$"):
        group.wait_for_all("present", 1, 0.01)


def test_a_child_that_ended_is_not_waited_for() -> None:
    group = Group(place(0, 2), Store(), peers=[Ended()])
    with pytest.raises(LoadError, match=r"^ranks \[1\] ended before they were ready \(pids 4711\)$"):
        group.wait_for_all("present", 1, 60)


def test_one_failure_is_the_reason_on_every_rank() -> None:
    store = Store()
    store.set("ts_pippy/loaded/0", "null")
    store.set("ts_pippy/loaded/2", '"no space"')
    store.set("ts_pippy/loaded/3", '"no space"')
    with pytest.raises(LoadError, match=r"^rank 1: shard 2 is missing; ranks 2, 3: no space$") as caught:
        Group(place(1, 4), store).outcome("loaded", CheckpointError("shard 2 is missing"))
    assert isinstance(caught.value.__cause__, CheckpointError)
    with pytest.raises(LoadError, match=r"^rank 1: shard 2 is missing; ranks 2, 3: no space$"):
        Group(place(0, 4), store).outcome("loaded", None)


def test_errors_that_are_not_ours_say_their_name() -> None:
    with pytest.raises(LoadError, match=r"^rank 0: KeyError: 'x'$"):
        Group(place()).outcome("loaded", KeyError("x"))
    Group(place()).outcome("loaded", None)


def test_last_words_explain_better_than_the_symptom() -> None:
    group = Group(place(1, 2), Store())
    symptom = PipelineError("rank 1 stopped answering")
    assert str(ranks.lost(group, symptom)) == "rank 1 stopped answering"
    assert group.failure() is None
    group.fail(ValueError("no memory"))
    assert str(ranks.lost(group, symptom)) == "rank 1: ValueError: no memory"
    alone = Group(place())
    alone.fail(symptom)
    assert alone.failure() is None


class Agent:
    """Stands for RPC: answers for each rank, or fails."""

    def __init__(self, answers: dict[str, object]) -> None:
        self.answers = answers

    def __call__(self, name: str, function: object, args: tuple[object, ...], timeout: float) -> Agent:
        assert (args, timeout) == ((-5,), 10.0)
        self.answer = self.answers[name]
        return copy.copy(self)

    def wait(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_every_rank_is_asked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Group(place()).ask(abs, -5) == [5]
    monkeypatch.setattr("torch.distributed.rpc.rpc_async", Agent({"worker0-1": 6, "worker2-1": 7}))
    assert Group(place(1, 3, generation=1)).ask(abs, -5) == [6, 5, 7]


def test_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.rpc.rpc_async", Agent({"worker1": RuntimeError("timed out\nat …")}))
    with pytest.raises(PipelineError, match=r"^a rank did not answer 'abs': timed out; at …$"):
        Group(place(0, 2)).ask(abs, -5)
    monkeypatch.undo()
    with pytest.raises(PipelineError, match=r"^a rank did not answer 'abs': RPC has not been initialized"):
        Group(place(0, 2)).ask(abs, -5)


def test_one_rank_joins_nobody() -> None:
    group = join(place(), PippyConfig())
    assert group.store is None
    group.leave()


def test_a_rendezvous_that_nobody_named() -> None:
    with pytest.raises(ConfigError, match=r"^WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT do not say where to"):
        open_store(place(0, 2), 1.0)


def test_ranks_bind_to_loopback_unless_told_otherwise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    ranks.bind(None)
    assert {os.environ[name].lstrip("=") for name in names} <= {"lo", "lo0"}
    assert not caplog.messages
    eth7 = Interface(name="eth7", address="10.0.0.7")
    monkeypatch.setattr(network, "find_interface", lambda wanted: {"eth7": eth7}[wanted])
    assert ranks.bind("eth7") == eth7
    assert [os.environ[name] for name in names] == ["eth7", "eth7", "=eth7"], "nccl takes a name for a beginning"
    assert caplog.messages == [
        "ranks listen on 10.0.0.7, interface eth7: whoever reaches its ports can run code in them"
    ]
    assert ranks.own_address() == "10.0.0.7"
