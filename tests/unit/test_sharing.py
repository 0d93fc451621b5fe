"""Requests that begin alike compute the beginning once, get the tokens they would get alone, and nobody starves."""

from __future__ import annotations

import random

import pytest

from tests.models import VOCAB as MODEL_VOCAB
from tests.models import Checkpoints
from tests.unit.fakes import VOCAB, continuation
from tests.unit.pipelines import Pipeline
from tests.unit.test_scheduler import Run, make, params, run_all
from ts_pippy_handler.request import FinishReason, SamplingParams
from ts_pippy_handler.scheduler import Scheduler

PROMPT = [(7 * index + 5) % VOCAB for index in range(40)]


def counts(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.num_prefix_hits, scheduler.num_prompt_computed


def after_another(scheduler: Scheduler, prompts: list[list[int]], **wanted: object) -> Run:
    """Run one request after the other."""
    run = Run(scheduler)
    for number, prompt in enumerate(prompts):
        run.add(number, prompt, params(3, **wanted))
        run.to_end()
        if not wanted:
            assert run.tokens[number] == continuation(prompt, params(3))[0]
    return run


def test_the_same_prompt_again_reuses_its_full_blocks() -> None:
    run = after_another(make(block_size=16), [PROMPT, PROMPT])
    assert counts(run.scheduler) == (32, 48)
    assert [step.batch.num_tokens for step in run.steps] == [40, 1, 1, 8, 1, 1]
    assert run.steps[3].batch.segments[0].num_cached == 32


def test_the_last_token_is_always_computed() -> None:
    run = after_another(make(block_size=4), [PROMPT, PROMPT, PROMPT[:5], PROMPT[:4]])
    assert counts(run.scheduler) == (36 + 4, 40 + 4 + 1 + 4)


def test_what_was_generated_is_shared_too() -> None:
    first = PROMPT + continuation(PROMPT, params(9))[0]
    run = Run(make(block_size=4))
    run.add(0, PROMPT, params(9))
    run.to_end()
    run.add(1, [*first, 5], params(2))
    run.to_end()
    assert run.tokens[1] == continuation([*first, 5], params(2))[0]
    assert run.scheduler.num_prefix_hits == 48
    assert all(len(step.batch.segments[0].runs) == 1 for step in run.steps), "a conversation stays in one piece"


def test_a_running_request_shares_with_those_that_join() -> None:
    run = Run(make(block_size=4))
    run.add(0, PROMPT, params(12))
    for _ in range(4):
        run.step()
    run.add(1, [*PROMPT[:20], 1, 2], params(4))
    run.to_end()
    assert run.tokens[1] == continuation([*PROMPT[:20], 1, 2], params(4))[0]
    assert counts(run.scheduler) == (20, 42)


def test_requests_that_come_together_share_what_the_first_has_computed() -> None:
    """They are admitted at once, but what the first batch carries the later ones need not."""
    run = run_all(make(block_size=4, max_batch_tokens=20), [PROMPT] * 3, params(3))
    assert [step.batch.num_tokens for step in run.steps[:2]] == [20, 20]
    assert [segment.num_cached for segment in run.steps[1].batch.segments] == [20]
    assert counts(run.scheduler)[0] > 40


def test_a_block_is_shared_only_when_all_of_it_was_sent() -> None:
    run = Run(make(block_size=16, max_batch_tokens=20))
    run.add(0, PROMPT, params(2))
    run.step()
    run.add(1, PROMPT, params(2))
    run.step()  # the answer to the first batch
    step = run.scheduler.schedule()
    assert step is not None
    assert [(segment.num_cached, segment.num_tokens) for segment in step.batch.segments] == [(20, 20)]
    run.in_flight.append((step, run.model.run(step.batch)))
    run.to_end()
    assert run.tokens[0] == run.tokens[1] == continuation(PROMPT, params(2))[0]
    assert counts(run.scheduler) == (32, 48)


def test_nothing_is_shared_inside_one_batch() -> None:
    run = run_all(make(block_size=4, max_batch_tokens=500), [PROMPT] * 3, params(2))
    assert counts(run.scheduler) == (0, 120)


def test_logits_of_all_rows_are_computed_and_fill_the_cache() -> None:
    run = after_another(make(block_size=4), [PROMPT, PROMPT], only_logits=True)
    assert counts(run.scheduler) == (0, 80)
    run.add(7, PROMPT, params(3))
    run.to_end()
    assert counts(run.scheduler) == (36, 84)


def test_switched_off_nothing_is_shared() -> None:
    scheduler = make(block_size=4)
    scheduler._prefix_caching = False
    after_another(scheduler, [PROMPT, PROMPT])
    assert counts(scheduler) == (0, 80)
    assert scheduler.allocator.num_kept == 0


def test_a_lost_cache_is_not_reused() -> None:
    run = after_another(make(block_size=4), [PROMPT])
    assert run.scheduler.restart() == []
    run.model.slots.clear()
    run.add(1, PROMPT, params(3))
    run.to_end()
    assert run.tokens[1] == run.tokens[0]
    assert counts(run.scheduler) == (0, 80)
    assert run.scheduler.allocator.num_kept > 0


def test_those_who_share_with_an_aborted_request_go_on() -> None:
    run = Run(make(block_size=4, num_in_flight=2))
    run.add(0, PROMPT, params(20))
    for _ in range(3):
        run.step()
    run.add(1, [*PROMPT, 3], params(8))
    run.step()
    assert run.scheduler.num_prefix_hits == 40
    assert run.scheduler.abort(0)
    run.scheduler.check_integrity()
    for number in range(2, 8):  # others take what it left
        run.add(number, [number] * 30, params(5))
    run.to_end()
    assert run.tokens[1] == continuation([*PROMPT, 3], params(8))[0]


def test_an_evicted_request_finds_most_of_its_tokens_again() -> None:
    scheduler = make(num_blocks=24, block_size=4)
    run = run_all(scheduler, [PROMPT, [token + 1 for token in PROMPT]], params(24))
    hits, computed = counts(scheduler)
    assert hits > 0
    assert hits + computed >= 80
    assert len(run.steps) < 80


@pytest.mark.parametrize("num_in_flight", [1, 3])
@pytest.mark.parametrize("num_blocks", [4, 9, 40])
def test_a_thousand_requests_leave_the_cache_whole(num_blocks: int, num_in_flight: int) -> None:
    """Common beginnings, long and short, cancelled ones, lost caches: outputs equal those of single requests."""
    draw = random.Random(num_blocks)
    scheduler = make(num_blocks=num_blocks, block_size=4, max_batch_tokens=12, num_in_flight=num_in_flight)
    room = num_blocks * 4
    run = Run(scheduler)
    stems = [[draw.randrange(VOCAB) for _ in range(room)] for _ in range(3)]
    requests: dict[int, tuple[list[int], SamplingParams]] = {}
    aborted: set[int] = set()
    before: object = None
    rested = 0
    while len(requests) < 1000 or scheduler.num_running + scheduler.num_waiting:
        while len(requests) < 1000 and scheduler.num_running + scheduler.num_waiting < 12:
            number = len(requests)
            prompt = draw.choice(stems)[: draw.randint(1, room - 4)] + [draw.randrange(3)] * draw.randint(0, 2)
            wanted = params(draw.randint(1, room - len(prompt)), only_logits=draw.random() < 0.05)
            requests[number] = prompt, wanted
            run.add(number, prompt, wanted)
        if draw.random() < 0.01:
            number = draw.choice([each for each in requests if not run.ends[each] and each not in aborted])
            assert scheduler.abort(number)
            aborted.add(number)
        if draw.random() < 0.002:
            run.in_flight.clear()
            run.model.slots.clear()
            scheduler.restart()
        run.step()
        left = [*scheduler._running.values(), *scheduler._waiting]
        eldest = min(left, key=lambda each: each.number, default=None)
        state = None if eldest is None else (eldest.number, eldest.num_scheduled, len(eldest.tokens))
        rested = 0 if state != before else rested + 1
        before = state
        assert rested < 40, f"the oldest request does not go on: {state}"
    for number, (prompt, wanted) in requests.items():
        tokens = [] if wanted.only_logits else continuation(prompt, wanted)[0]
        if number in aborted:
            assert run.tokens[number] == tokens[: len(run.tokens[number])]
        else:
            assert (run.tokens[number], run.ends[number]) == (tokens, [FinishReason.LENGTH])
    assert scheduler.allocator.num_used == 0
    assert scheduler.allocator.num_free == num_blocks
    assert scheduler.num_prefix_hits > 0


def test_a_stream_of_long_prompts_does_not_stop_a_decoding_request() -> None:
    run = Run(make(max_batch_tokens=8, num_blocks=200))
    run.add(0, [1], params(30))
    for number in range(1, 60):
        run.add(number, [number, *PROMPT[:10]], params(1))
        run.step()  # a batch or an answer
    assert len(run.tokens[0]) >= 28
    run.to_end()


def test_decoding_requests_do_not_stop_a_prompt() -> None:
    run = Run(make(max_batch_tokens=4, max_running=20, num_blocks=200))
    for number in range(12):
        run.add(number, [number + 1], params(40))
    for _ in range(20):
        run.step()
    run.add(12, PROMPT, params(1))
    for _ in range(200):
        run.step()
    assert run.ends[12] == [FinishReason.LENGTH]
    assert not any(run.ends[number] for number in range(12))
    run.to_end()


def test_an_older_request_never_gives_way_to_a_younger_one() -> None:
    scheduler = make(num_blocks=6, block_size=2, max_running=6)
    run = Run(scheduler)
    for number in range(5):
        run.add(number, [number + 1] * (1 + number), params(10 if number < 2 else 6))
    while run.step():
        if not run.ends[0] and run.tokens[0]:
            assert 0 in scheduler._running
    assert run.ends == {number: [FinishReason.LENGTH] for number in range(5)}


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("sizes", [[4], [1, 3], [2, 1, 1]], ids=lambda sizes: f"{len(sizes)} stages")
def test_a_real_model_answers_the_same_with_and_without(
    checkpoints: Checkpoints, family: str, sizes: list[int]
) -> None:
    pipeline = Pipeline(checkpoints(family, layers=4), sizes, num_slots=256)
    stem = [(5 * index + 3) % MODEL_VOCAB for index in range(30)]
    prompts = [stem, [*stem, 9, 8], stem[:21], [*stem[:13], 7], stem]
    answers = {}
    for prefix_caching in (True, False):
        scheduler = make(block_size=4, max_batch_tokens=16)
        scheduler._prefix_caching = prefix_caching
        answers[prefix_caching] = generate(pipeline, scheduler, prompts)
        assert (scheduler.num_prefix_hits > 60) == prefix_caching
    assert answers[True] == answers[False]


def generate(pipeline: Pipeline, scheduler: Scheduler, prompts: list[list[int]]) -> list[list[int]]:
    """Let every prompt join while those before it run."""
    tokens: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        scheduler.add(number, prompt, params(12))
        for _ in range(4 if number + 1 < len(prompts) else 1000):
            step = scheduler.schedule()
            if step is None:
                break
            for each, event in scheduler.commit(step, pipeline.run(step.batch).argmax(-1).tolist()):
                tokens[each].append(event.token_id or 0)
                if event.finish_reason is not None:
                    scheduler.finish(each)
    assert all(len(own) == 12 for own in tokens)
    return tokens
