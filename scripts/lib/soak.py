"""Serve a tiny model under mixed traffic while its ranks are killed, and report what became of every request.

    bash scripts/soak [--minutes 3 | --requests 2000] [--launch torchrun|spawn] [--kills N] [--output FILE]

Sends all three formats, whole and streamed, with random parameters; 5 % of the bodies are damaged and 5 % of the
requests given up. Greedy answers must be those of ``transformers``; those with other parameters what the same server
said when nothing else ran. Prints a table; ``--output`` writes JSON. Status 1 if an answer is wrong, hung or lost, the
cache is not whole at the end, or a rank grows. Needs the development requirements and Java.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from scripts.lib.soak_traffic import (
    Answer,
    Expected,
    Sender,
    Shot,
    Task,
    Verdict,
    judge,
    random_options,
    random_shot,
    with_answers,
)
from scripts.lib.soak_watch import Growth, Watch, growth
from tests.client import NO_ANSWER
from tests.models import IM_END_ID, IM_START_ID, byte_tokenizer, tiny_checkpoint
from tests.oracle import MIN_MARGIN, hf_generate
from tests.packages import Packages
from tests.processes import wait_until
from tests.texts import byte_texts, byte_tokens
from tests.torchserve import TorchServe

# Small enough that requests wait, are evicted, run in chunks and share blocks, and that the cache, whose memory counts
# when it is first written, is all in use long before the warm-up ends.
LIMITS = {"kv_cache_tokens": 1536, "block_size": 8, "max_batch_tokens": 128, "threads_per_rank": 1}
LIMITS |= {"max_running_requests": 16, "max_waiting_requests": 5}
NUM_CLIENTS = 20
MAX_GROWTH_PERCENT = 2.0
WARMUP_S = 30.0
"""Of each process: until the largest batch has been and Python's and malloc's pools are filled."""
_GREEDY, _SAMPLED, _LONGEST_PROMPT, _NEW_TOKENS = 40, 80, 150, 48
_BACK_S = 120.0
_SETTLE_S = 30.0
_AFTERMATH_S = 1.0
"""A request that begins so soon after the model is back may still be told of the fault."""
_SHOWN = 20


@dataclass
class Fault:
    """A rank that was killed."""

    rank: int
    at_s: float
    started_s: float
    ended_s: float | None = None
    """When health said ready with a new process in its place; None while it does not."""


@dataclass
class Report:
    """What a soak found."""

    launch: str
    stages: int
    seconds: float = 0.0
    sent: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    health: dict[str, Any] = field(default_factory=dict)

    @property
    def is_cache_whole(self) -> bool:
        """Whether nothing holds any of the cache after the last request."""
        blocks = self.health.get("kv_blocks", {})
        return bool(blocks) and blocks["used"] == 0 and blocks["free"] == blocks["total"]

    @property
    def failures(self) -> list[str]:
        """What makes the soak fail, in words."""
        found = [f"{number} requests {problem}" for problem, number in self.problems.items()]
        found += [f"rank {fault.rank} did not come back" for fault in self.faults if fault.ended_s is None]
        found += [
            f"rank {each.rank} grew by {each.growth_percent:.1f} %"
            for each in self.growths
            if each.growth_percent > MAX_GROWTH_PERCENT
        ]
        return found + ([] if self.is_cache_whole else [f"the cache is not whole: {self.health}"])

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        faults = [
            {"rank": each.rank, "at_s": each.at_s, "back_s": each.ended_s and each.ended_s - each.started_s}
            for each in self.faults
        ]
        return {
            "launch": self.launch,
            "stages": self.stages,
            "seconds": self.seconds,
            "sent": self.sent,
            "finished": dict(self.kinds.most_common()),
            **{problem: self.problems[problem] for problem in ("wrong", "hung", "lost")},
            "faults": faults,
            "ranks": [asdict(each) for each in self.growths],
            "kv_blocks": self.health.get("kv_blocks"),
            "failures": self.failures,
            "examples": self.examples,
        }

    def as_tables(self) -> Iterator[Table]:
        """Return what is read by people."""
        table = Table("finished", title=f"{self.launch}, {self.sent:,} requests in {self.seconds:.0f} s")
        table.add_column("requests", justify="right")
        for kind, number in self.kinds.most_common():
            table.add_row(kind, f"{number:,}")
        for problem in ("wrong", "hung", "lost"):
            table.add_row(f"of these {problem}", f"{self.problems[problem]:,}")
        yield table
        faults = Table("killed", "at", "back after", title="faults")
        for fault in self.faults:
            back = "never" if fault.ended_s is None else f"{fault.ended_s - fault.started_s:.1f} s"
            faults.add_row(f"rank {fault.rank}", f"{fault.at_s:.0f} s", back)
        yield faults
        ranks = Table("rank", "watched", "memory", "growth", "per hour", "descriptors", "threads", title="processes")
        for each in self.growths:
            ranks.add_row(
                f"{each.rank} ({each.pid})",
                f"{each.seconds:.0f} s",
                f"{each.rss_mb:.1f} MB",
                f"{each.growth_percent:+.2f} %",
                f"{each.mb_per_hour:+.1f} MB",
                "{} → {}".format(*each.descriptors),
                "{} → {}".format(*each.threads),
            )
        yield ranks


def make_tasks(model: Path, seed: int) -> tuple[list[Task], list[Task]]:
    """Return greedy tasks with the answers of transformers, and others without."""
    draw = random.Random(seed)
    tokenizer = byte_tokenizer()
    greedy: list[Task] = []
    for number, text in enumerate(byte_texts(_GREEDY, 1, _LONGEST_PROMPT, seed)):
        asked, prompt = _asked(text, is_chat=number % 3 == 0)
        ignore_eos = draw.random() < 0.5
        [reference] = hf_generate(model, [prompt], _NEW_TOKENS, ignore_eos=ignore_eos)
        if reference.margin < MIN_MARGIN:  # rounding could decide
            continue
        # The first tokens of a greedy answer are the same, however many are asked for.
        num = draw.randint(1, _NEW_TOKENS)
        tokens = reference.token_ids[:num]
        reason = reference.finish_reason if len(tokens) == len(reference.token_ids) else "length"
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        fields = asked | {"max_new_tokens": num, "temperature": 0, "ignore_eos": ignore_eos}
        greedy.append(Task(fields, Expected(tokens, text, reason)))
    others = [
        Task(_asked(text, is_chat=number % 3 == 0)[0] | random_options(draw))
        for number, text in enumerate(byte_texts(_SAMPLED, 1, _LONGEST_PROMPT, seed + 1))
    ]
    return greedy, others


def _asked(text: str, *, is_chat: bool) -> tuple[dict[str, Any], list[int]]:
    if not is_chat:
        return {"prompt": text}, byte_tokens(text)
    prompt = [IM_START_ID, *b"user\n", *byte_tokens(text), IM_END_ID, *b"\n", IM_START_ID, *b"assistant\n"]
    return {"messages": [{"role": "user", "content": text}]}, prompt


class Soak:
    """Clients and a killer around one served model."""

    def __init__(self, server: TorchServe, name: str, options: argparse.Namespace) -> None:
        self._server = server
        self._name = name
        self._options = options
        self._sender = Sender(server.ports["inference"], name, server.authorization(), options.limit)
        self._lock = threading.Lock()
        self._begun_s = 0.0
        self.report = Report(options.launch, options.stages)

    def run(self, greedy: Sequence[Task], others: Sequence[Task]) -> Report:
        """Send everything, kill ranks meanwhile, and wait until nothing runs any more."""
        tasks = [*greedy, *with_answers(others, self._sender)]
        watch = Watch(lambda: self._server.rank_pids(self._name), self._options.stages)
        self._begun_s = time.monotonic()
        clients = [threading.Thread(target=self._client, args=(tasks, number)) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        self._kill_now_and_then(clients)
        for client in clients:
            client.join()
        self.report.seconds = time.monotonic() - self._begun_s
        samples = watch.stop()
        found = [growth(rank, pid, each, WARMUP_S) for (rank, pid), each in samples.items()]
        self.report.growths = sorted((each for each in found if each), key=lambda each: each.rank)
        wait_until(self._is_settled, _SETTLE_S)
        return self.report

    def _progress(self) -> float:
        """Return how much of the soak is done, from 0 to 1."""
        if self._options.requests:
            return self.report.sent / self._options.requests
        return (time.monotonic() - self._begun_s) / (60 * self._options.minutes)

    def _client(self, tasks: Sequence[Task], number: int) -> None:
        draw = random.Random(self._options.seed * 1000 + number)
        while True:
            with self._lock:
                if self._progress() >= 1:
                    return
                self.report.sent += 1
            shot = random_shot(draw, tasks, self._name)
            answer = self._sender.send(shot)
            with self._lock:
                self._count(shot, answer)
            if answer.status == 429 or answer.end == "cut":
                time.sleep(draw.uniform(0.1, 0.5))

    def _count(self, shot: Shot, answer: Answer) -> None:
        faults = self.report.faults
        during_fault = any(
            answer.ended_s >= fault.started_s
            and (fault.ended_s is None or answer.started_s <= fault.ended_s + _AFTERMATH_S)
            for fault in faults
        )
        verdict: Verdict = judge(shot, answer, during_fault=during_fault)
        self.report.kinds[verdict.kind] += 1
        if verdict.problem is None:
            return
        self.report.problems[verdict.problem] += 1
        if len(self.report.examples) < _SHOWN:
            at_s = answer.started_s - self._begun_s
            seen = {"problem": verdict.problem, "kind": verdict.kind, "at_s": at_s}
            seen["sent"] = f"{shot.format}, stream {shot.is_stream}, {shot.ending}: {shot.body[:2000]!r}"
            expected = asdict(shot.expected) if shot.expected else None
            self.report.examples.append(seen | {"answer": asdict(answer), "expected": expected})

    def _kill_now_and_then(self, clients: Sequence[threading.Thread]) -> None:
        draw = random.Random(self._options.seed)
        # A worker whose rank 0 dies in spawn mode leaves its clients without an answer: TorchServe 0.12 forgets them.
        first = 1 if self._options.launch == "spawn" else 0
        for number in range(self._options.kills):
            wait_until(
                lambda number=number: (
                    self._progress() >= (number + 0.5) / self._options.kills
                    or not any(client.is_alive() for client in clients)
                ),
                3600.0,
            )
            rank = draw.randrange(first, self._options.stages)
            pid = self._server.rank_pids(self._name)[rank]
            started_s = time.monotonic()
            fault = Fault(rank, started_s - self._begun_s, started_s)
            with self._lock:
                self.report.faults.append(fault)
            psutil.Process(pid).kill()
            print(f"{fault.at_s:.0f} s: killed rank {rank} of {self.report.sent:,} requests", file=sys.stderr)
            if wait_until(lambda pid=pid: self._is_back(pid), _BACK_S):
                with self._lock:
                    fault.ended_s = time.monotonic()

    def _is_back(self, killed: int) -> bool:
        health = self._health()
        return bool(health.get("ready")) and killed not in [rank["pid"] for rank in health["ranks"]]

    def _is_settled(self) -> bool:
        self.report.health = self._health()
        return self.report.is_cache_whole and self.report.health["requests"] == {"running": 0, "waiting": 0}

    def _health(self) -> dict[str, Any]:
        with contextlib.suppress(*NO_ANSWER, http.client.HTTPException, ValueError):
            status, body = self._sender.post("/1.0/v1/health", {})
            if status in (200, 503) and isinstance(body, dict) and "ranks" in body:
                return body
        return {}


def soak(options: argparse.Namespace) -> Report:
    """Make, package and serve a model, and run a soak on it."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_checkpoint(Path(folder) / "model", "llama")
        greedy, others = make_tasks(model, options.seed)
        packages = Packages(Path(folder))
        name = packages.changed(
            model, options.launch, {"stages": options.stages, "pippy": LIMITS, "handler": {"dtype": "float32"}}
        )
        (Path(folder) / "server").mkdir()
        with TorchServe(packages.store, Path(folder) / "server", [f"{name}.mar"]) as server:
            server.wait_ready(name)
            try:
                return Soak(server, name, options).run(greedy, others)
            finally:
                if options.log:
                    options.log.write_text(server.log())


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=3.0, help="how long requests are sent; %(default)s")
    length.add_argument("--requests", type=int, help="how many are sent, instead")
    parser.add_argument("--launch", choices=["torchrun", "spawn"], default="torchrun")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--kills", type=int, help="by default one for each 90 s, or 3 with --requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a request hangs; %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep TorchServe's log")
    options = parser.parse_args()
    if options.kills is None:
        # More often, spawn mode would take it for a pipeline that cannot be kept alive.
        options.kills = 3 if options.requests else max(1, int(options.minutes * 60 / 90))
    report = soak(options)
    console = Console(width=120)
    for table in report.as_tables():
        console.print(table)
    if options.output:
        options.output.write_text(json.dumps(report.as_dict(), indent=2, default=str) + "\n")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    for example in report.examples[:3] if report.failures else []:
        print(json.dumps(example, default=str))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
