"""Requests in, events out: with a stage that fails, stalls or computes as the tests want."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.processes import wait_until
from tests.unit.fakes import VOCAB, SlotModel, continuation, next_token
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import InvalidRequestError, OverloadedError, PipelineError
from ts_pippy_handler.heartbeat import Pulse
from ts_pippy_handler.kv_cache import BlockAllocator
from ts_pippy_handler.request import Batch, FinishReason, SamplingParams, TokenEvent
from ts_pippy_handler.scheduler import Limits, Scheduler

DEADLINE_S = 20


class FakeStage:
    """Computes logits whose largest is the right next token."""

    def __init__(self) -> None:
        self.graph = SimpleNamespace(outputs=("logits",))
        self.model = SlotModel()
        self.before: Callable[[Batch], None] = lambda batch: None

    def run(self, batch: Batch, received: Any) -> dict[str, torch.Tensor]:
        self.before(batch)
        tokens = self.model.run(batch)
        logits = torch.zeros(len(tokens), VOCAB)
        logits[range(len(tokens)), tokens] = 1.0
        return {"logits": logits}


class Harness:
    """An engine over a fake stage, and the events of its requests."""

    def __init__(self, *, num_blocks: int = 32, num_in_flight: int = 2, revive: Any = None, **limits: int) -> None:
        self.stage = FakeStage()
        self.left: list[bool] = []
        self.present: list[Any] = [{"pid": 7, "device": "cpu"}, {"pid": 8, "device": "cpu"}]
        group = SimpleNamespace(
            leave=lambda is_broken: self.left.append(is_broken),
            ask=lambda function, *arguments: [function(*arguments)],
            roll_call=lambda: self.present,
        )
        self.loaded: Any = SimpleNamespace(
            stage=self.stage,
            transport=None,
            max_len=64,
            vocab_size=VOCAB,
            group=group,
            num_slots=num_blocks * 4,
            pulse=Pulse(),
        )
        values = {"max_len": 64, "max_batch_tokens": 16, "max_running": 4, "max_waiting": 20, **limits}
        self.scheduler = Scheduler(BlockAllocator(num_blocks, 4), Limits(**values, num_in_flight=num_in_flight), [0])
        self.deaths: list[PipelineError] = []
        self.engine = Engine(self.loaded, self.scheduler, revive, self.deaths.append)

    def submit(self, prompt: list[int], max_new_tokens: int = 5, **others: Any) -> tuple[int, queue.Queue[TokenEvent]]:
        events: queue.Queue[TokenEvent] = queue.Queue()
        params = SamplingParams(max_new_tokens=max_new_tokens, **{"ignore_eos": True, **others})
        return self.engine.submit(prompt, params, events.put), events


@pytest.fixture
def start() -> Any:
    """Makes harnesses and closes their engines."""
    started: list[Harness] = []

    def make(**options: Any) -> Harness:
        started.append(Harness(**options))
        return started[-1]

    yield make
    for harness in started:
        harness.stage.before = lambda batch: None
        harness.engine.close(timeout_s=DEADLINE_S)
        assert not harness.engine.is_running
        harness.scheduler.check_integrity()
        assert harness.scheduler.allocator.num_used == 0


def drain(events: queue.Queue[TokenEvent]) -> tuple[list[int], TokenEvent]:
    """Return all tokens of a request and its last event, after which nothing may come."""
    tokens: list[int] = []
    while True:
        event = events.get(timeout=DEADLINE_S)
        if event.token_id is not None:
            tokens.append(event.token_id)
        if event.finish_reason is not None:
            return tokens, event


def expected(prompt: list[int], max_new_tokens: int = 5) -> list[int]:
    return continuation(prompt, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))[0]


PROMPTS = [[3 + index] * (1 + 3 * index) for index in range(8)]


@pytest.mark.parametrize("num_in_flight", [1, 3])
def test_many_requests_at_once(start: Any, num_in_flight: int) -> None:
    harness = start(num_in_flight=num_in_flight, num_blocks=14)
    queues = [harness.submit(prompt, 9)[1] for prompt in PROMPTS]
    for prompt, events in zip(PROMPTS, queues, strict=True):
        tokens, last = drain(events)
        assert tokens == expected(prompt, 9)
        assert last.finish_reason is FinishReason.LENGTH
        assert events.empty()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_k": None},
        {"top_p": 0.0},
        {"top_p": 2.0},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"seed": -5},
    ],
)
def test_values_no_rank_could_sample_with_are_refused(start: Any, wrong: dict[str, Any]) -> None:
    harness = start()
    [name] = wrong
    with pytest.raises(InvalidRequestError, match=f"^{name}: must be "):
        harness.submit([1], **wrong)
    assert drain(harness.submit([3])[1])[0] == expected([3])


def test_token_ids_are_whole_numbers(start: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^token ids must be whole numbers, got 1.5$"):
        start().submit([1.5])


def test_more_texts_than_could_ever_wait_are_refused_together(start: Any) -> None:
    engine = start().engine
    engine.check_room(24)
    with pytest.raises(InvalidRequestError, match=r"^25 texts were asked for at once; at most 24 are possible$"):
        engine.check_room(25)


def test_a_request_whose_time_is_over_ends_with_what_it_has(start: Any) -> None:
    harness = start()
    harness.stage.before = lambda batch: time.sleep(0.02)
    events: queue.Queue[TokenEvent] = queue.Queue()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    harness.engine.submit([1, 2], params, events.put, timeout_s=0.2)
    _, other = harness.submit([5], 30)
    tokens, last = drain(events)
    assert last.finish_reason is FinishReason.ABORT
    assert 0 < len(tokens) < 60
    assert tokens == expected([1, 2], 60)[: len(tokens)]
    assert drain(other)[0] == expected([5], 30)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, VOCAB], r"^token id 97 is not in the vocabulary, which has ids 0 to 96$"),
        ([-1], r"^token id -1 is not in the vocabulary"),
        ([], r"^the prompt is empty"),
        ([1] * 64, r"^the prompt has 64 tokens; at most 63 fit"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(start: Any, prompt: list[int], message: str) -> None:
    harness = start()
    with pytest.raises(InvalidRequestError, match=message):
        harness.submit(prompt, 1)
    tokens, _ = drain(harness.submit([4])[1])
    assert tokens == expected([4])


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (
            {"logit_bias": ((5, 1.0), (97, 1.0))},
            r"^logit_bias: token id 97 is not in the vocabulary, which has ids 0 to",
        ),
        ({"stop_token_ids": (-1,)}, r"^stop_token_ids: token id -1 is not in the vocabulary, which has ids 0 to 96$"),
        ({"stop_token_ids": (10**30,)}, r"^stop_token_ids: token id 1000000000000000000000000000000 is not in"),
        ({"min_tokens": 6}, r"^min_tokens is 6, but at most 5 new tokens"),
        (
            {"min_tokens": 1, "stop_token_ids": tuple(range(1, VOCAB)), "ignore_eos": False},
            r"^min_tokens is 1, but every token of the vocabulary ends the text; name fewer stop_token_ids$",
        ),
    ],
)
def test_wishes_that_cannot_be_honoured_are_refused_at_once(start: Any, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        start().submit([1], **wishes)


def test_too_many_requests(start: Any) -> None:
    harness = start(max_running=1, max_waiting=2)
    gate, entered = threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    harness.stage.before = hold
    accepted = [harness.submit([5])]
    assert entered.wait(DEADLINE_S)
    refusals = 0
    for _ in range(50):  # the engine is inside a batch and takes nothing over meanwhile
        try:
            accepted.append(harness.submit([6]))
        except OverloadedError as error:
            refusals += 1
            assert "requests are waiting already, try again later" in str(error)  # noqa: PT017 - the rest is accepted
    gate.set()
    for number, events in accepted:
        assert drain(events)[0] == expected([6] if number else [5])
    assert (len(accepted), refusals) == (3, 48)


def test_what_the_time_went_into(start: Any) -> None:
    harness = start()
    harness.engine.stats(reset=True)
    harness.stage.before = lambda batch: time.sleep(0.02)
    drain(harness.submit([5] * 40, 3)[1])
    time.sleep(0.3)  # idle
    [stats] = harness.engine.stats()
    assert (stats.rank, stats.num_batches, stats.num_tokens) == (0, 5, 42), "three chunks and two tokens more"
    assert (stats.bytes_received, stats.num_receives, stats.wait_s, stats.send_s) == (0, 0, 0, 0)
    assert stats.compute_s >= 0.1
    assert stats.bookkeeping_s > 0
    assert stats.compute_s + stats.bookkeeping_s <= stats.elapsed_s - 0.05
    harness.engine.stats(reset=True)
    [stats] = harness.engine.stats()
    assert (stats.num_batches, stats.num_tokens, stats.compute_s) == (0, 0, 0)


def test_aborting_a_running_request(start: Any) -> None:
    harness = start()
    seen = threading.Event()
    harness.stage.before = lambda batch: seen.wait(DEADLINE_S)
    number, events = harness.submit([5], 40)
    _, others = harness.submit([6])
    harness.engine.abort(number)
    seen.set()
    tokens, last = drain(events)
    assert last.finish_reason is FinishReason.ABORT
    assert tokens == expected([5], 40)[: len(tokens)]
    assert len(tokens) < 40
    assert drain(others)[0] == expected([6])
    harness.engine.abort(number)
    harness.engine.abort(12345)
    assert drain(harness.submit([7])[1])[0] == expected([7])
    assert events.empty()


def test_a_consumer_that_fails_stops_nobody_else(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    harness = start()

    def fails(event: TokenEvent) -> None:
        raise ValueError("consumer broke")

    harness.engine.submit([3], SamplingParams(max_new_tokens=9), fails)
    assert drain(harness.submit([4])[1])[0] == expected([4])
    assert "the consumer of request 0 failed" in caplog.messages


def test_logits_of_all_prompt_tokens(start: Any) -> None:
    harness = start()
    prompt = [5] * 40  # three chunks
    number, events = harness.submit(prompt, 1, only_logits=True)
    assert drain(events) == ([], TokenEvent(token_id=None, finish_reason=FinishReason.LENGTH))
    logits = harness.engine.take_logits(number)
    assert logits.shape == (40, VOCAB)
    assert logits.argmax(-1).tolist() == [next_token(prompt[: row + 1]) for row in range(40)]


def test_logits_are_whole_after_an_eviction(start: Any) -> None:
    harness = start(num_blocks=14, max_batch_tokens=4)
    gate, entered = threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    harness.stage.before = hold
    runners = [harness.submit([3 + index], 20)[1] for index in range(2)]
    assert entered.wait(DEADLINE_S)
    prompt = list(range(1, 46))  # with the growing requests before it, more than the cache holds
    number, events = harness.submit(prompt, 1, only_logits=True)
    gate.set()
    for index, runner in enumerate(runners):
        assert drain(runner)[0] == expected([3 + index], 20)
    drain(events)
    logits = harness.engine.take_logits(number)
    assert logits.argmax(-1).tolist() == [next_token(prompt[: row + 1]) for row in range(45)]


def fail_once(harness: Harness, at: int) -> None:
    calls = iter(range(10**6))

    def before(batch: Batch) -> None:
        if next(calls) == at:
            raise RuntimeError("bad luck")

    harness.stage.before = before


def test_a_pipeline_that_is_revived_goes_on(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    revived: list[str] = []
    harness = start(revive=lambda error: (revived.append(str(error)), harness.loaded)[1])
    fail_once(harness, at=6)
    queues = [harness.submit(prompt, 6)[1] for prompt in PROMPTS[:5]]
    for prompt, events in zip(PROMPTS[:5], queues, strict=True):
        tokens, last = drain(events)
        assert tokens == expected(prompt, 6), "no token is lost or repeated"
        assert last.finish_reason is FinishReason.LENGTH
    assert revived == ["rank 0, stage 0: RuntimeError: bad luck"]
    assert not harness.deaths
    assert "pipeline failed: rank 0, stage 0: RuntimeError: bad luck" in caplog.messages


def test_a_request_that_runs_in_two_failures_ends_with_the_error(start: Any) -> None:
    harness = start(revive=lambda error: harness.loaded)

    def poison(batch: Batch) -> None:
        if 13 in batch.token_ids:
            raise RuntimeError("13")

    harness.stage.before = poison
    events = harness.submit([13, 13])[1]
    tokens, last = drain(events)
    assert tokens == []
    assert last.finish_reason is FinishReason.ERROR
    assert str(last.error) == "rank 0, stage 0: RuntimeError: 13"
    harness.stage.before = lambda batch: None
    assert drain(harness.submit([4])[1])[0] == expected([4])


def test_a_request_that_waits_while_scheduling_fails_twice_ends_with_the_error(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    revivals: list[str] = []
    harness = start(revive=lambda error: (revivals.append(str(error)), harness.loaded)[1])
    share = harness.scheduler._share

    def poisoned(request: Any) -> bool:
        if 13 in request.tokens:
            raise ValueError("13")
        return bool(share(request))

    monkeypatch.setattr(harness.scheduler, "_share", poisoned)
    tokens, last = drain(harness.submit([13])[1])
    assert (tokens, last.finish_reason) == ([], FinishReason.ERROR)
    assert revivals == ["rank 0 could not schedule: ValueError: 13"] * 2
    assert drain(harness.submit([4])[1])[0] == expected([4])


def test_a_request_that_cannot_be_added_harms_none_that_came_with_it(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = start()
    add = harness.scheduler.add

    def poisoned(number: int, prompt: list[int], params: SamplingParams) -> None:
        if 13 in prompt:
            raise ValueError("13")
        add(number, prompt, params)

    monkeypatch.setattr(harness.scheduler, "add", poisoned)
    with harness.engine.paused():
        bad, good = harness.submit([13])[1], harness.submit([4])[1]
    assert str(drain(bad)[1].error) == "the request could not be accepted: 13"
    assert drain(good)[0] == expected([4])


def test_logits_are_whole_after_a_failure(start: Any) -> None:
    harness = start(revive=lambda error: harness.loaded, num_in_flight=1)
    fail_once(harness, at=2)
    number, events = harness.submit([5] * 40, 1, only_logits=True)
    assert drain(events)[1].finish_reason is FinishReason.LENGTH
    assert harness.engine.take_logits(number).shape == (40, VOCAB)


def test_a_pipeline_that_cannot_be_revived_ends_everything_once(start: Any) -> None:
    harness = start()
    fail_once(harness, at=3)
    queues = [harness.submit(prompt, 30)[1] for prompt in PROMPTS]
    for events in queues:
        last = drain(events)[1]
        assert last.finish_reason is FinishReason.ERROR
        assert str(last.error) == "rank 0, stage 0: RuntimeError: bad luck"
    with pytest.raises(PipelineError, match=r"^rank 0, stage 0: RuntimeError: bad luck$"):
        harness.submit([1])
    harness.engine.close(DEADLINE_S)
    assert [str(error) for error in harness.deaths] == ["rank 0, stage 0: RuntimeError: bad luck"]
    assert all(events.empty() for events in queues)
    assert harness.left[0] is True


def test_a_reported_loss_wakes_an_idle_engine(start: Any) -> None:
    revived = threading.Event()
    harness = start(revive=lambda error: (revived.set(), harness.loaded)[1])
    harness.engine.report_lost(PipelineError("a rank ended with status 1"))
    assert revived.wait(DEADLINE_S)
    assert drain(harness.submit([4])[1])[0] == expected([4])


def test_health_counts_what_runs_and_waits(start: Any) -> None:
    harness = start()
    gate = threading.Event()
    harness.stage.before = lambda batch: gate.wait(DEADLINE_S)
    queues = [harness.submit([5] * 8, 2)[1] for _ in range(6)]
    assert wait_until(lambda: harness.engine.health()["requests"] == {"running": 4, "waiting": 2}, DEADLINE_S)
    health = harness.engine.health()
    assert health["ready"] is True
    assert (health["stages"], health["ranks"][1]) == (
        2,
        {"rank": 1, "stage": 1, "pid": 8, "device": "cpu", "state": "ready"},
    )
    blocks = health["kv_blocks"]
    assert (blocks["total"], blocks["used"] + blocks["free"]) == (32, 32)
    assert blocks["used"] >= 8
    gate.set()
    for events in queues:
        drain(events)


def test_health_is_not_ready_without_every_rank_or_when_broken(start: Any) -> None:
    harness = start()
    harness.present[1] = None
    health = harness.engine.health()
    assert health["ready"] is False
    assert health["ranks"][1] == {"rank": 1, "stage": 1, "pid": None, "device": None, "state": "lost"}
    harness.present[1] = {"pid": 8, "device": "cpu"}
    assert harness.engine.health()["ready"]
    fail_once(harness, at=0)
    drain(harness.submit([4])[1])
    assert wait_until(lambda: not harness.engine.health()["ready"], DEADLINE_S)


def test_closing_answers_what_is_left(start: Any) -> None:
    harness = start()
    gate = threading.Event()
    harness.stage.before = lambda batch: gate.wait(DEADLINE_S)
    queues = [harness.submit(prompt, 40)[1] for prompt in PROMPTS]
    closing = threading.Thread(target=harness.engine.close)
    closing.start()
    wait_until(lambda: harness.engine._closing, DEADLINE_S)
    with pytest.raises(PipelineError, match=r"^the model is being unloaded$"):
        harness.submit([1], 40)
    gate.set()
    closing.join(DEADLINE_S)
    for events in queues:
        last = drain(events)[1]
        assert (last.finish_reason, str(last.error)) == (FinishReason.ERROR, "the model is being unloaded")
    assert harness.left == [False]
