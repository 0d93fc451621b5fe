"""Whatever the mixture of requests, each gets the tokens it would get alone, and ends exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.fakes import EOS, VOCAB, SlotModel, continuation
from ts_pippy_handler.errors import InvalidRequestError, OverloadedError
from ts_pippy_handler.kv_cache import BlockAllocator
from ts_pippy_handler.request import FinishReason, Processing, SampledRow, SamplingParams, TokenEvent, TokenLogprobs
from ts_pippy_handler.request_state import Step
from ts_pippy_handler.scheduler import Limits, Scheduler

MAX_STEPS = 20_000


def make(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_len: int = 256,
    max_batch_tokens: int = 512,
    max_running: int = 8,
    max_waiting: int = 100,
    num_in_flight: int = 1,
    eos: Sequence[int] = (EOS,),
) -> Scheduler:
    limits = Limits(max_len, max_batch_tokens, max_running, max_waiting, num_in_flight)
    return Scheduler(BlockAllocator(num_blocks, block_size), limits, eos)


def params(max_new_tokens: int = 4, *, ignore_eos: bool = True, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, **others)  # type: ignore[arg-type]


@dataclass
class Run:
    """Drives a scheduler as the engine does: batches are computed in order, and answered in order, later."""

    scheduler: Scheduler
    model: SlotModel = field(default_factory=SlotModel)
    in_flight: deque[tuple[Step, list[int]]] = field(default_factory=deque)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[FinishReason]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def add(self, number: int, prompt: list[int], wanted: SamplingParams) -> None:
        self.scheduler.check(len(prompt), wanted)
        self.scheduler.add(number, prompt, wanted)
        self.tokens[number] = []
        self.ends[number] = []
        self.logprobs[number] = []

    def step(self) -> bool:
        """Do one thing; False when there is nothing to do."""
        scheduler = self.scheduler
        has_room = len(self.in_flight) < scheduler.limits.num_in_flight
        step = scheduler.schedule() if has_room else None
        if step is not None:
            self.steps.append(step)
            self.in_flight.append((step, self.model.run(step.batch)))
        elif self.in_flight:
            done, token_ids = self.in_flight.popleft()
            for number, event in scheduler.commit(done, token_ids, fake_logprobs(done.batch.sampled, token_ids)):
                self._take(number, event)
        else:
            assert scheduler.num_running + scheduler.num_waiting == 0, "requests are left, but nothing runs"
            return False
        scheduler.check_integrity()
        return True

    def to_end(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError(f"no end after {MAX_STEPS} steps")

    def _take(self, number: int, event: TokenEvent) -> None:
        assert not self.ends[number], f"request {number} goes on after its end"
        if event.token_id is not None:
            self.tokens[number].append(event.token_id)
        if event.logprobs is not None:
            self.logprobs[number].append(event.logprobs)
        if event.finish_reason is not None:
            self.ends[number].append(event.finish_reason)
            self.scheduler.finish(number)


def fake_logprobs(rows: Sequence[SampledRow], token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
    """Return logprobs that tell which token they belong to."""
    answers = [
        None if row.num_logprobs is None else TokenLogprobs(-float(token), [(token, 0.0)] * row.num_logprobs)
        for row, token in zip(rows, token_ids, strict=True)
    ]
    return answers if any(answers) else []


def run_all(scheduler: Scheduler, prompts: Sequence[list[int]], wanted: SamplingParams) -> Run:
    run = Run(scheduler)
    for number, prompt in enumerate(prompts):
        run.add(number, prompt, wanted)
    run.to_end()
    for number, prompt in enumerate(prompts):
        tokens, reason = continuation(prompt, wanted)
        assert run.tokens[number] == tokens
        assert run.ends[number] == [reason]
    assert scheduler.allocator.num_used == 0
    return run


PROMPTS = [[(7 * i + j) % VOCAB for j in range(3 + 5 * i)] for i in range(6)]


@dataclass(frozen=True)
class Traffic:
    """Requests, when they come, when they are cancelled, and when the cache is lost."""

    limits: dict[str, int]
    requests: list[tuple[list[int], SamplingParams]]
    arrivals: list[int]
    aborts: dict[int, int]
    restarts: frozenset[int]


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    num = draw(st.integers(1, 7))
    prompts = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)) for _ in range(num)]
    wanted = [
        params(
            draw(st.integers(1, 16)),
            ignore_eos=draw(st.booleans()),
            only_logits=draw(st.integers(0, 9)) == 0,
            stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=12))),
            logprobs=draw(st.sampled_from([None, 0, 2])),
        )
        for _ in range(num)
    ]
    block_size = draw(st.integers(1, 5))
    longest = max(len(prompt) + each.max_new_tokens for prompt, each in zip(prompts, wanted, strict=True))
    least = -(-longest // block_size)
    limits = {
        "block_size": block_size,
        "num_blocks": draw(st.integers(least, least * 3)),
        "max_batch_tokens": draw(st.integers(1, 40)),
        "max_running": draw(st.integers(1, 6)),
        "num_in_flight": draw(st.integers(1, 4)),
    }
    return Traffic(
        limits=limits,
        requests=list(zip(prompts, wanted, strict=True)),
        arrivals=[draw(st.integers(0, 30)) for _ in range(num)],
        aborts=draw(st.dictionaries(st.integers(0, num - 1), st.integers(0, 60), max_size=2)),
        restarts=draw(st.frozensets(st.integers(0, 60), max_size=2)),
    )


LOST_TWICE = Traffic(
    {"block_size": 1, "num_blocks": 14, "max_batch_tokens": 3, "max_running": 6, "num_in_flight": 3},
    [([5] * 8, params(6)), ([6] * 7, params(6)), ([7] * 2, params(12))],
    [0, 0, 0],
    {1: 11},
    frozenset({5, 9}),
)


@settings(max_examples=300)
@example(LOST_TWICE)
@given(traffic())
def test_any_traffic_equals_one_request_at_a_time(case: Traffic) -> None:
    run = Run(make(**case.limits))
    aborted = set()
    last = max([*case.arrivals, *case.aborts.values(), *case.restarts])
    for time in range(MAX_STEPS):
        for number, (prompt, wanted) in enumerate(case.requests):
            if case.arrivals[number] == time:
                run.add(number, prompt, wanted)
        for number, when in case.aborts.items():
            if when == time and number in run.ends and not run.ends[number]:
                assert run.scheduler.abort(number)
                aborted.add(number)
        if time in case.restarts:
            run.in_flight.clear()
            run.model.slots.clear()
            run.scheduler.restart()
            assert run.scheduler.num_running == run.scheduler.allocator.num_used == 0
        if not run.step() and time > last:
            break
    else:
        raise AssertionError("no end")
    for number, (prompt, wanted) in enumerate(case.requests):
        tokens, reason = ([], FinishReason.LENGTH) if wanted.only_logits else continuation(prompt, wanted)
        if number in aborted:
            assert run.tokens[number] == tokens[: len(run.tokens[number])]
            assert run.ends[number] == []
        else:
            assert run.tokens[number] == tokens
            assert run.ends[number] == [reason]
        expected = run.tokens[number] if wanted.logprobs is not None else []
        assert run.logprobs[number] == [
            TokenLogprobs(-float(token), [(token, 0.0)] * (wanted.logprobs or 0)) for token in expected
        ], "one for each token, none twice"
    assert run.scheduler.allocator.num_used == 0
    for step in run.steps:
        assert 1 <= step.batch.num_tokens <= case.limits["max_batch_tokens"]
        assert len(step.batch.segments) <= case.limits["max_running"]
    assert [step.batch.number for step in run.steps] == list(range(len(run.steps)))


@pytest.mark.parametrize("num_in_flight", [1, 2, 3, 4])
def test_requests_of_unequal_lengths(num_in_flight: int) -> None:
    run_all(make(num_in_flight=num_in_flight), PROMPTS, params(9))


def test_an_end_of_sequence_token_ends_a_request_unless_ignored() -> None:
    prompt = next([token] for token in range(1, VOCAB) if EOS in continuation([token], params(30))[0][:-1])
    stopped = run_all(make(), [prompt], params(30, ignore_eos=False))
    assert stopped.ends[0] == [FinishReason.STOP]
    assert stopped.tokens[0][-1] == EOS
    assert EOS not in stopped.tokens[0][:-1]
    ignored = run_all(make(), [prompt], params(30))
    assert ignored.ends[0] == [FinishReason.LENGTH]
    assert len(ignored.tokens[0]) == 30


def test_a_long_prompt_runs_in_chunks() -> None:
    run = run_all(make(max_batch_tokens=8), [list(range(1, 30))], params(2))
    chunks = [(step.batch.segments[0].num_cached, step.batch.num_tokens) for step in run.steps]
    assert chunks == [(0, 8), (8, 8), (16, 8), (24, 5), (29, 1)]
    assert [len(step.batch.sampled) for step in run.steps] == [0, 0, 0, 1, 1]
    assert [row.position for step in run.steps for row in step.batch.sampled] == [29, 30]


def test_a_batch_never_exceeds_its_budget() -> None:
    run = run_all(make(max_batch_tokens=10), [list(range(first, first + 7)) for first in range(1, 6)], params(3))
    sizes = [step.batch.num_tokens for step in run.steps]
    assert max(sizes) == 10
    assert sum(sizes) == 5 * (7 + 2)


def test_a_decoding_request_goes_on_beside_a_long_prompt() -> None:
    run = Run(make(max_batch_tokens=8))
    run.add(0, [1], params(20))
    for _ in range(4):
        run.step()
    run.add(1, [2] * 60, params(1))
    before = len(run.tokens[0])
    for _ in range(12):
        run.step()
    assert len(run.tokens[0]) == before + 6, "a token in each of the six batches"
    run.to_end()


def test_a_new_prompt_joins_the_batch_that_fills_the_pipeline() -> None:
    run = Run(make(num_in_flight=2))
    for number in range(3):
        run.add(number, [number + 1], params(20))
    for _ in range(3):
        run.step()
    assert [len(step.batch.segments) for step in run.steps] == [2, 1]
    assert len(run.in_flight) == 1, "the first batch has come back"
    run.add(3, [5, 6, 7], params(20))
    run.step()
    assert sorted(segment.num_tokens for segment in run.steps[-1].batch.segments) == [1, 1, 3]
    run.to_end()


def test_prompts_that_come_together_are_spread_over_the_pipeline() -> None:
    run = run_all(make(num_in_flight=2), [[1, 2, 3], [4, 5, 6]], params(3))
    assert {len(step.batch.segments) for step in run.steps} == {1}


def test_sampling_parameters_travel_with_their_row() -> None:
    run = Run(make())
    run.add(0, [3, 4], params(1, temperature=0.5, top_k=7, top_p=0.8, seed=11))
    run.add(1, [5], params(1))
    run.step()
    first, second = run.steps[0].batch.sampled
    assert (first.row, first.position, first.temperature, first.top_k, first.top_p, first.seed) == (
        1,
        2,
        0.5,
        7,
        0.8,
        11,
    )
    assert (second.row, second.position, second.temperature, second.seed) == (2, 1, 0.0, 0)


def test_plain_rows_carry_nothing_else() -> None:
    run = run_all(make(), PROMPTS, params(4, temperature=0.5, top_k=3, top_p=0.5, seed=1, stop_token_ids=(98,)))
    assert {row.processing for step in run.steps for row in step.batch.sampled} == {None}
    logits = Run(make())
    logits.add(0, [1, 2], params(1, only_logits=True, min_p=0.5, logprobs=3))
    logits.to_end()
    assert [row.processing for row in logits.steps[0].batch.sampled] == [None, None]


@pytest.mark.parametrize("restart_at", [None, 5, 9])
def test_a_row_carries_the_tokens_its_penalties_look_at(restart_at: int | None) -> None:
    wanted = {
        0: params(12, repetition_penalty=1.2),
        1: params(12, presence_penalty=0.5),
        2: params(12, frequency_penalty=0.5),
        3: params(12, min_p=0.1, logit_bias=((3, 1.0),), logprobs=2),
    }
    run = Run(make(num_blocks=13, num_in_flight=2, max_batch_tokens=9))
    for number, each in wanted.items():
        run.add(number, PROMPTS[number], each)
    time = 0
    while run.step():
        time += 1
        if time == restart_at:
            run.in_flight.clear()
            run.scheduler.restart()
    seen: dict[int, set[int]] = {number: set() for number in wanted}
    for step in run.steps:
        rows = iter(step.batch.sampled)
        for sequence, num_rows in step.sampled:
            assert num_rows == 1
            number, row = sequence.number, next(rows)
            prompt, each = PROMPTS[number], wanted[number]
            done = row.position - len(prompt)
            seen[number].add(done)
            assert row.processing == Processing(
                prompt=prompt if number == 0 else [],
                generated=run.tokens[number][:done] if number < 3 else [],
                min_p=each.min_p,
                repetition_penalty=each.repetition_penalty,
                presence_penalty=each.presence_penalty,
                frequency_penalty=each.frequency_penalty,
                logit_bias=each.logit_bias,
                suppressed=[],
                logprobs=each.logprobs,
            )
    assert all(steps == set(range(12)) for steps in seen.values())


@pytest.mark.parametrize(("ignore_eos", "suppressed"), [(False, [EOS, 5, 8]), (True, [5, 8])])
def test_what_ends_a_text_is_suppressed_until_there_are_enough_tokens(ignore_eos: bool, suppressed: list[int]) -> None:
    run = Run(make())
    wanted = params(5, ignore_eos=ignore_eos, stop_token_ids=(8, 5), min_tokens=3)
    prompt = next([token] for token in range(1, VOCAB) if not {EOS, 5, 8} & set(continuation([token], params(5))[0]))
    run.add(0, prompt, wanted)
    run.to_end()
    rows = [step.batch.sampled[0].processing for step in run.steps]
    assert [row.suppressed for row in rows if row] == [suppressed] * 3 + [[], []]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_a_request(ignore_eos: bool) -> None:
    prompt = PROMPTS[2]
    tokens = continuation(prompt, params(20))[0]
    stop = next(token for token in tokens[3:] if token != EOS)
    run = run_all(make(), [prompt], params(20, ignore_eos=ignore_eos, stop_token_ids=(stop, 96)))
    assert run.tokens[0] == tokens[: tokens.index(stop) + 1]
    assert run.ends[0] == [FinishReason.STOP]


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    make().check(3, params(4, min_tokens=4))
    message = r"^min_tokens is 5, but at most 4 new tokens are generated$"
    with pytest.raises(InvalidRequestError, match=message):
        make().check(3, params(4, min_tokens=5))


def test_requests_are_spread_over_the_batches_in_flight() -> None:
    run = Run(make(num_in_flight=3))
    for number in range(6):
        run.add(number, [number + 1], params(3))
    for _ in range(3):
        run.step()
    assert len(run.in_flight) == 3
    rows = [[sequence.number for sequence, _ in step.sampled] for step, _ in run.in_flight]
    assert rows == [[0, 1], [2, 3], [4, 5]]
    run.to_end()


def test_a_request_rests_while_its_token_is_under_way() -> None:
    scheduler = make(num_in_flight=4)
    scheduler.add(0, [1, 2], params(5))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is None
    assert scheduler.num_running == 1


def test_a_full_cache_evicts_the_youngest_and_computes_it_again() -> None:
    scheduler = make(num_blocks=6, block_size=2, max_running=3)
    run = run_all(scheduler, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], params(9))
    restarted = {
        number
        for number in range(3)
        for step in run.steps[3:]
        for (sequence, _), segment in zip(step.sampled, step.batch.segments, strict=False)
        if sequence.number == number and segment.num_cached == 0
    }
    assert restarted == {1, 2}


def test_an_evicted_request_does_not_lose_the_token_under_way() -> None:
    run = Run(make(num_blocks=8, block_size=1, num_in_flight=2))
    run.add(0, [1, 2, 3], params(5))
    run.add(1, [4, 5, 6], params(5))
    run.to_end()
    for number, prompt in enumerate([[1, 2, 3], [4, 5, 6]]):
        assert run.tokens[number] == continuation(prompt, params(5))[0]


def test_no_more_run_than_allowed() -> None:
    run = Run(make(max_running=2))
    for number in range(5):
        run.add(number, [number + 1], params(2))
    while run.step():
        assert run.scheduler.num_running <= 2
    assert [step.batch.num_tokens for step in run.steps] == [2, 2, 2, 2, 1, 1]


def test_aborting_frees_the_cache_at_once_and_silences_the_request() -> None:
    run = Run(make(num_in_flight=2))
    run.add(0, [1, 2], params(5))
    run.add(1, [3, 4], params(5))
    run.step()
    used = run.scheduler.allocator.num_used
    assert run.scheduler.abort(0)
    assert run.scheduler.allocator.num_used == used - 1
    assert not run.scheduler.abort(0)
    run.to_end()
    assert run.tokens[0] == []
    assert run.ends[0] == []
    assert run.tokens[1] == continuation([3, 4], params(5))[0]


def test_aborting_what_waits_and_what_is_unknown() -> None:
    run = Run(make(max_running=1))
    run.add(0, [1], params(2))
    run.add(1, [2], params(2))
    run.step()
    assert run.scheduler.num_waiting == 1
    assert run.scheduler.abort(1)
    assert run.scheduler.num_waiting == 0
    assert not run.scheduler.abort(77)


def test_restarting_computes_everything_running_again() -> None:
    run = Run(make(num_in_flight=2, max_running=3))
    for number in range(4):
        run.add(number, [number + 1, 9], params(4))
    for _ in range(5):
        run.step()
    run.in_flight.clear()
    run.model.slots.clear()
    known = {number: list(tokens) for number, tokens in run.tokens.items()}
    assert run.scheduler.restart() == [2, 1, 0]
    assert run.scheduler.num_running == 0
    assert run.scheduler.num_waiting == 4
    run.to_end()
    for number in range(4):
        tokens = continuation([number + 1, 9], params(4))[0]
        assert run.tokens[number] == tokens
        assert tokens[: len(known[number])] == known[number]


def test_only_logits_wants_every_row_and_no_token() -> None:
    run = Run(make(max_batch_tokens=4))
    run.add(0, [1, 2, 3, 4, 5, 6], params(1, only_logits=True))
    run.to_end()
    assert run.tokens[0] == []
    assert run.ends[0] == [FinishReason.LENGTH]
    assert [[row.row for row in step.batch.sampled] for step in run.steps] == [[0, 1, 2, 3], [0, 1]]
    assert all(step.batch.return_logits for step in run.steps)


def test_logits_and_tokens_are_not_asked_for_in_one_batch() -> None:
    run = Run(make())
    run.add(0, [1, 2], params(3))
    run.add(1, [3, 4, 5], params(1, only_logits=True))
    run.add(2, [6], params(3))
    run.to_end()
    for step in run.steps:
        kinds = {sequence.params.only_logits for sequence, _ in step.sampled}
        assert kinds == {step.batch.return_logits}
    assert run.tokens[2] == continuation([6], params(3))[0]


@pytest.mark.parametrize(
    ("num_prompt", "wanted", "message"),
    [
        (0, params(1), r"^the prompt is empty: it has no tokens, at least one is needed$"),
        (32, params(1), r"^the prompt has 32 tokens; at most 31 fit, so that one new token .* the limit of 32$"),
        (500, params(1), r"^the prompt has 500 tokens; at most 31 fit"),
        (
            30,
            params(3),
            r"^max_new_tokens \(max_tokens\) is 3, but with a prompt of 30 tokens at most 2 are possible \(limit of",
        ),
        (33, params(1, only_logits=True), r"^the prompt has 33 tokens"),
    ],
)
@pytest.mark.parametrize("limit", ["window", "cache"])
def test_what_could_never_finish_is_refused(limit: str, num_prompt: int, wanted: SamplingParams, message: str) -> None:
    limits = {"max_len": 32} if limit == "window" else {"num_blocks": 8, "block_size": 4}
    with pytest.raises(InvalidRequestError, match=message):
        make(**limits).check(num_prompt, wanted)


def test_what_just_fits_is_accepted() -> None:
    scheduler = make(max_len=32)
    scheduler.check(31, params(1))
    scheduler.check(1, params(31))
    scheduler.check(32, params(1, only_logits=True))


def accept_until_refused(scheduler: Scheduler, *, schedule: bool) -> str:
    """Return what the first refusal says."""
    for number in range(50):
        try:
            scheduler.check(1, params(1))
        except OverloadedError as error:
            return str(error)
        scheduler.add(number, [1], params(1))
        if schedule:
            scheduler.schedule()
    raise AssertionError("nothing was refused")


def test_too_many_waiting_requests_are_refused() -> None:
    scheduler = make(max_running=1, max_waiting=3)
    message = accept_until_refused(scheduler, schedule=False)
    assert message == "4 requests are waiting already, try again later"
    assert scheduler.num_waiting == 4, "one may run and three may wait"


def test_no_more_wait_than_allowed_once_others_run() -> None:
    scheduler = make(max_running=2, max_waiting=3)
    message = accept_until_refused(scheduler, schedule=True)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    assert message == "3 requests are waiting already, try again later"


def test_waiting_requests_are_served_in_order() -> None:
    run = Run(make(max_running=1))
    for number in range(4):
        run.add(number, [number + 1], params(1))
    run.to_end()
    assert [sequence.number for step in run.steps for sequence, _ in step.sampled] == [0, 1, 2, 3]
