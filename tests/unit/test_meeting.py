"""Hosts that introduce themselves: who serves comes first, and what does not fit together is named."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from ts_pippy_handler import identity
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import ConfigError, LoadError
from ts_pippy_handler.meeting import Introduction, check, order

FACTS = {"torch": "2.13.0", "pippy.split": '"time"', "model.safetensors": "5 bytes, abc"}


def one(host: str, *, serves: bool = False, address: str = "10.0.0.1", **others: object) -> Introduction:
    own = Introduction(host=host, host_id=host, serves=serves, address=address, facts=FACTS)
    return msgspec.structs.replace(own, **others)


def test_the_host_that_serves_comes_first() -> None:
    seen = [one("b"), one("b"), one("a", serves=True), one("a", serves=True), one("c")]
    assert order(seen) == [2, 3, 0, 1, 4]
    check(seen)


def test_hosts_of_a_script_of_the_users_keep_their_order() -> None:
    assert order([one("b", serves=True), one("a", serves=True)]) == [0, 1]


def test_what_a_host_lacks_is_told_once() -> None:
    broken = one("b", error="pippy.interface: there is no 'eth9' here")
    with pytest.raises(LoadError) as raised:
        check([one("a", serves=True), broken, broken])
    assert str(raised.value) == "b (10.0.0.1): pippy.interface: there is no 'eth9' here"


def test_nobody_serves() -> None:
    with pytest.raises(ConfigError, match=r"^all hosts \(a \(10.0.0.1\), b \(10.0.0.1\)\) run ts-pippy rank, but none"):
        check([one("a"), one("b")])


def test_loopback_reaches_no_other_host() -> None:
    deaf = one("b", address="127.0.0.1")
    with pytest.raises(ConfigError, match=r"but on b \(127.0.0.1\) they would talk over loopback alone; set pippy.int"):
        check([one("a", serves=True), deaf])
    check([one("a", serves=True, address="127.0.0.1"), one("a", address="127.0.0.1")])  # two torchruns of one host


def test_differences_are_named_with_their_hosts() -> None:
    other = one("b", address="10.0.0.2", facts={**FACTS, "pippy.split": "[1,2]", "x": "1"})
    with pytest.raises(ConfigError) as raised:
        check([other, one("a", serves=True)])
    assert str(raised.value) == (
        "the hosts do not serve the same: "
        'pippy.split is "time" on a (10.0.0.1) and [1,2] on b (10.0.0.2); '
        "x is absent on a (10.0.0.1) and 1 on b (10.0.0.2)"
    )


def test_many_differences_are_cut() -> None:
    text = identity.differences([("a", {str(n): "1" for n in range(9)}), ("b", {})])
    assert text is not None
    assert text.endswith("; and 3 more differences")


def checkpoint(directory: Path, weights: bytes, **pippy: object) -> ServingConfig:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return load_config({"handler": {"model_path": str(directory)}, "pippy": pippy})


def test_a_checkpoint_is_told_by_its_contents(tmp_path: Path) -> None:
    weights = bytes(itertools.islice(itertools.cycle(range(251)), 300_000))
    first = identity.facts(checkpoint(tmp_path / "a", weights))
    same = identity.facts(checkpoint(tmp_path / "b", weights, interface="lo", threads_per_rank=2))
    other = identity.facts(checkpoint(tmp_path / "c", weights[::-1], block_size=8))
    assert identity.differences([("a", first), ("b", same)]) is None, "paths and interfaces are a host's own"
    text = identity.differences([("a", first), ("c", other)])
    assert text is not None
    assert text.startswith("pippy.block_size is 16 on a and 8 on c; model.safetensors is 300000 bytes, ")
    assert len(text.split("; ")) == 2
