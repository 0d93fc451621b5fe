"""Stages on two hosts: TorchServe on one, ``ts-pippy rank`` on the other, and a network that can be cut and slowed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.breaking import FAULTS_FOLDER, LONG, SHORT, Breakable, Outcome
from tests.command import ts_pippy
from tests.hosts import Hosts
from tests.java import require_java
from tests.models import Checkpoints
from tests.oracle import MIN_MARGIN, Reference, hf_generate, smallest_margin, token_lists
from tests.processes import wait_until
from tests.texts import byte_tokens
from tests.torchserve import TorchServe

ERROR_S, BACK_S = 10.0, 60.0
NAME = "spread"
LONGER = LONG | {"max_new_tokens": 200}


class Pair(Breakable):
    """A model of which TorchServe's host runs the first stages, and the second host the others."""

    def __init__(self, hosts: Hosts, folder: Path, model: Path, stages: Sequence[int], *, delay_s: float = 0.0) -> None:
        self.hosts = hosts
        self.stages = list(stages)
        self.name = NAME
        self.model = model
        options: list[object] = ["--name", NAME, "--stages", sum(stages), "--nodes", ",".join(map(str, stages))]
        options += ["--interface", hosts.network, "--dtype", "float32", "-o", folder]
        done = ts_pippy("package", model, *options)
        assert done.status == 0, done.stderr
        self.archive = folder / f"{NAME}.mar"
        self.environment = {
            "PYTHONPATH": f"{FAULTS_FOLDER}:{os.environ.get('PYTHONPATH', '')}",
            "TS_PIPPY_FAULTS": f'{{"delay_s": {delay_s}}}',
        }
        own = self.environment | {"PET_LOCAL_ADDR": hosts.addresses[0]}
        self.server = TorchServe(folder, folder, [self.archive.name], environment=own)
        bodies = (SHORT, LONG, LONGER)
        self._expected = {
            str(body): hf_generate(
                model, [byte_tokens(str(body["prompt"]))], int(body["max_new_tokens"]), ignore_eos=True
            )[0].token_ids
            for body in bodies
        }

    def start_second(self, *options: object) -> None:
        """Start the second host's ranks."""
        arguments = ["--rdzv-endpoint", self.hosts.addresses[0], "--nproc-per-node", self.stages[1], *options]
        self.hosts.start_second(self.archive, *arguments, environment=self.environment)


@contextmanager
def serving(hosts: Hosts, folder: Path, model: Path, stages: Sequence[int], delay_s: float = 0.0) -> Iterator[Pair]:
    """Start both hosts, and let the test run on the first."""
    require_java()
    with hosts, hosts.inside():
        pair = Pair(hosts, folder, model, stages, delay_s=delay_s)
        with pair.server:
            pair.start_second()
            started = time.monotonic()
            try:
                pair.server.wait_ready(NAME, 90.0, may_retry=True)
                print(f"ready {time.monotonic() - started:.1f} s after the second host started")
                yield pair
            except BaseException as error:
                error.add_note(f"--- the second host's log, last lines ---\n{hosts.second_log()[-6000:]}")
                raise


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "addresses"), [((1, 1), (1, 2)), ((1, 2), (9, 2))])
def test_two_hosts_answer_as_one_model(
    stages: tuple[int, int], addresses: tuple[int, int], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with serving(Hosts(tmp_path, addresses), tmp_path, checkpoints("llama"), stages) as pair:
        answers = [pair._ask(SHORT), pair._ask(LONG)]
        assert [answer.kind for answer in answers] == ["finished"] * 2
        assert [answer.tokens for answer in answers] == [pair._expected[str(SHORT)], pair._expected[str(LONG)]]
        health = pair.server.health(NAME).json()
        assert (health["ready"], health["stages"]) == (True, sum(stages))
        assert [rank["rank"] for rank in health["ranks"]] == list(range(sum(stages)))
        assert len(pair.server.rank_pids(NAME)) == stages[0], "the others run on the other host"


@pytest.mark.slow
def test_smollm2_on_two_hosts_answers_as_transformers(
    smollm2: Path, smollm2_expected: tuple[list[str], list[list[int]], list[Reference]], tmp_path: Path
) -> None:
    texts, _, expected = smollm2_expected
    with serving(Hosts(tmp_path), tmp_path, smollm2, (1, 2)) as pair:
        bodies = [{"prompt": text, "max_new_tokens": 48} for text in texts]
        started = time.monotonic()
        answers = pair.server.post_all(NAME, bodies)
        print(f"{len(bodies)} requests in {time.monotonic() - started:.1f} s")
        assert [answer.status for answer in answers] == [200] * len(bodies)
        assert smallest_margin(expected) > MIN_MARGIN
        assert [answer.json()["token_ids"] for answer in answers] == token_lists(expected)


@pytest.mark.slow
def test_other_settings_are_refused_on_both_hosts(checkpoints: Checkpoints, tmp_path: Path) -> None:
    require_java()
    hosts = Hosts(tmp_path)
    with hosts, hosts.inside():
        pair = Pair(hosts, tmp_path, checkpoints("llama"), (1, 1))
        source = tmp_path / f"{NAME}-source" / "model-config.yaml"
        settings = yaml.safe_load(source.read_text())
        settings["pippy"]["block_size"] = 8
        source.write_text(yaml.safe_dump(settings))
        with pair.server:
            pair.archive = source
            started = time.monotonic()
            pair.start_second()
            reason = re.compile(
                rf"the hosts do not serve the same: pippy.block_size is 16 on \S+ \({hosts.addresses[0]}\) and 8 on "
                rf"second \({hosts.addresses[1]}\)"
            )
            told = [lambda: reason.search(pair.server.log()), lambda: reason.search(hosts.second_log())]
            assert wait_until(lambda: all(each() for each in told), 45.0), hosts.second_log() + pair.server.log_tail()
            print(f"told on both hosts {time.monotonic() - started:.1f} s after the second host started")


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two stages on two hosts, slow enough that faults hit a stream."""
    folder = tmp_path_factory.mktemp("multi-node")
    with serving(Hosts(folder), folder, checkpoints("llama"), (1, 1), delay_s=0.02) as pair:
        yield pair


def broken_stream(pair: Pair, action: Any) -> Outcome:
    """Do something in the middle of a stream, and return what became of that."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pair._ask, LONGER)
        time.sleep(1.0)
        started = time.monotonic()
        action()
        outcome = pair._outcome(running, started)
    print(outcome.kind, f"{outcome.seconds:.1f} s", len(outcome.tokens))
    assert outcome.tokens
    assert outcome.tokens == pair._expected[str(LONGER)][: len(outcome.tokens)]
    return outcome


def broken_soon(pair: Pair, action: Any) -> None:
    """Do something that ends a stream with an error, soon, and the model's readiness with it."""
    outcome = broken_stream(pair, action)
    assert outcome.kind in ("cut", "500", "error in the stream")
    assert outcome.seconds < ERROR_S
    assert not pair._is_ready()


def back_soon(pair: Pair, action: Any) -> None:
    """Do something that lets the model answer again, soon."""
    started = time.monotonic()
    action()
    print(f"back after {pair._wait_back(started):.1f} s")
    assert time.monotonic() - started < BACK_S


@pytest.mark.slow
def test_a_cut_network_ends_streams_and_is_healed(pair: Pair) -> None:
    broken_soon(pair, pair.hosts.cut)
    time.sleep(12)
    assert not pair._is_ready()
    assert "a rank has ended, and torchrun has not" in pair.hosts.second_log()
    back_soon(pair, pair.hosts.mend)


@pytest.mark.slow
def test_a_lost_host_ends_streams_and_may_come_back(pair: Pair) -> None:
    broken_soon(pair, pair.hosts.kill_second)
    back_soon(pair, pair.start_second)


@pytest.mark.slow
def test_a_slow_network_gives_the_same_tokens(pair: Pair) -> None:
    outcome = broken_stream(pair, pair.hosts.slow)
    assert outcome.kind == "finished"
