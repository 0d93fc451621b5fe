"""Requests that ask much of sampling: the engine over a real split model against transformers' own generate.

With one stage the engine samples by itself; with more, batches and results are packed and unpacked as between ranks.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from tests.models import EOS_ID, VOCAB, Checkpoints
from tests.oracle import MIN_MARGIN, random_prompts
from tests.unit.pipelines import CPU, Pipeline, eager
from ts_pippy_handler.engine import Engine
from ts_pippy_handler.errors import PipelineError
from ts_pippy_handler.heartbeat import Pulse
from ts_pippy_handler.kv_cache import BlockAllocator
from ts_pippy_handler.request import Batch, FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from ts_pippy_handler.sampling import logprobs_of, sample
from ts_pippy_handler.scheduler import Limits, Scheduler
from ts_pippy_handler.transport import Transport

DEADLINE_S = 60
SPLITS = [[3], [1, 2], [1, 1, 1]]
BLOCK = 4
PROMPTS = random_prompts(6, 3, 14, 256, seed=5)


class Loopback(Transport):
    """Both ends of the data plane in one thread: what is sent waits to be received."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.world_size = len(pipeline.stages)
        self._wire_device = CPU
        self._pipeline = pipeline
        self._wire: deque[torch.Tensor] = deque()
        self.num_messages: list[int] = []

    def send_batch(self, batch: Batch | None) -> None:
        if batch is None:
            return
        batch = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch)
        before = len(self._wire)
        logits = self._pipeline.run(batch)
        token_ids = sample(logits, batch.sampled)
        self.send_result(batch, token_ids, logprobs_of(logits, batch.sampled, token_ids), logits)
        self.num_messages.append(len(self._wire) - before)

    def send_values(self, specs: Any, values: Any) -> None:
        pass

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        self._wire.append(tensor.clone())

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        sent = self._wire.popleft()
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype), "the ends disagree about a message"
        tensor.copy_(sent)


@dataclass
class Answer:
    """What came of one request."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    reason: FinishReason


class Served:
    """An engine over the stages of a checkpoint."""

    def __init__(self, directory: Path, split: list[int], num_blocks: int, **limits: int) -> None:
        self.pipeline = Pipeline(directory, split, num_slots=num_blocks * BLOCK)
        self.transport = Loopback(self.pipeline) if len(split) > 1 else None
        alone = self.transport is None
        self.failures = 0
        self._fail_at = -1
        self._num_runs = 0
        stage = SimpleNamespace(graph=SimpleNamespace(outputs=("logits",), sends=()), run=self._run)
        loaded: Any = SimpleNamespace(
            stage=stage,
            transport=self.transport,
            max_len=64,
            vocab_size=VOCAB,
            group=SimpleNamespace(leave=lambda is_broken: None),
            pulse=Pulse(),
        )
        self._alone = alone
        values = {"max_len": 64, "max_batch_tokens": 16, "max_running": 6, "max_waiting": 20, **limits}
        self.scheduler = Scheduler(
            BlockAllocator(num_blocks, BLOCK), Limits(**values, num_in_flight=len(split)), [EOS_ID]
        )
        self.num_evicted = 0
        evict = self.scheduler._evict

        def count(sequence: Any) -> None:
            self.num_evicted += 1
            evict(sequence)

        self.scheduler._evict = count  # type: ignore[method-assign]
        self.engine = Engine(loaded, self.scheduler, self._revive)
        self._loaded = loaded

    def fail_at(self, number: int) -> None:
        """Let one batch fail."""
        self._fail_at = number

    def answers(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
        """Serve requests all at once."""
        queues: list[queue.Queue[TokenEvent]] = [queue.Queue() for _ in requests]
        for (prompt, params), events in zip(requests, queues, strict=True):
            self.engine.submit(prompt, params, events.put)
        return [self._answer(events) for events in queues]

    @staticmethod
    def _answer(events: queue.Queue[TokenEvent]) -> Answer:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while True:
            event = events.get(timeout=DEADLINE_S)
            if event.error is not None:
                raise event.error
            if event.token_id is not None:
                token_ids.append(event.token_id)
            if event.logprobs is not None:
                logprobs.append(event.logprobs)
            if event.finish_reason is not None:
                assert events.empty()
                return Answer(token_ids, logprobs, event.finish_reason)

    def _run(self, batch: Batch, received: Any) -> dict[str, torch.Tensor]:
        self._num_runs += 1
        if self._num_runs == self._fail_at:
            raise RuntimeError("bad luck")
        return {"logits": self.pipeline.run(batch)} if self._alone else {}

    def _revive(self, error: PipelineError) -> Any:
        self.failures += 1
        if self.transport is not None:
            self.transport._wire.clear()
        return self._loaded


@contextmanager
def served(directory: Path, split: list[int], num_blocks: int = 64, **limits: int) -> Iterator[Served]:
    pipelines = Served(directory, split, num_blocks, **limits)
    try:
        yield pipelines
        pipelines.scheduler.check_integrity()
    finally:
        pipelines.engine.close(DEADLINE_S)
        assert not pipelines.engine.is_running


class Counts(LogitsProcessor):
    """OpenAI's penalties and bias, written from their definition."""

    def __init__(self, num_prompt: int, params: SamplingParams) -> None:
        self.num_prompt, self.params = num_prompt, params

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt :], minlength=VOCAB)
        scores = scores - counts * self.params.frequency_penalty - (counts > 0) * self.params.presence_penalty
        bias = torch.zeros(VOCAB)
        for token_id, value in self.params.logit_bias:
            bias[token_id] += value
        return scores + bias


@lru_cache
def reference(directory: Path, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], torch.Tensor]:
    """Return the greedy continuation by transformers, and the raw log-probabilities [N, V] of its steps."""
    ends = [*params.stop_token_ids, *([] if params.ignore_eos else [EOS_ID])]
    chain = LogitsProcessorList([Counts(len(prompt), params)])
    if params.repetition_penalty != 1:
        chain.insert(0, RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens and ends:
        chain.append(MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends))
    ids = torch.tensor([prompt])
    out: Any = eager(str(directory)).generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=params.max_new_tokens,
        do_sample=False,
        eos_token_id=ends or None,
        logits_processor=chain,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    best = torch.cat(out.scores).topk(2, dim=-1).values
    assert float((best[:, 0] - best[:, 1]).min()) > MIN_MARGIN, "a decision too close to prove anything"
    return out.sequences[0, len(prompt) :].tolist(), torch.log_softmax(torch.cat(out.logits).double(), -1)


def check(directory: Path, prompt: list[int], params: SamplingParams, answer: Answer) -> None:
    token_ids, chances = reference(directory, tuple(prompt), params)
    assert answer.token_ids == token_ids
    ended = token_ids[-1] in params.stop_token_ids or (token_ids[-1] == EOS_ID and not params.ignore_eos)
    assert answer.reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    check_logprobs(params, answer, chances)


def check_logprobs(params: SamplingParams, answer: Answer, chances: torch.Tensor) -> None:
    if params.logprobs is None:
        assert answer.logprobs == []
        return
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, own, expected in zip(answer.token_ids, answer.logprobs, chances, strict=True):
        assert own.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        values = [value for _, value in own.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(expected.topk(params.logprobs).values.tolist(), abs=1e-4)
        assert values == pytest.approx([float(expected[other]) for other, _ in own.top], abs=1e-4)
        assert len({other for other, _ in own.top}) == params.logprobs


def greedy(max_new_tokens: int = 10, **wishes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **{"ignore_eos": True, **wishes})


# Stronger than clients may ask for: the logits of this model lie far apart.
WISHES = {
    "nothing": greedy(),
    "repetition": greedy(repetition_penalty=1.8),
    "presence": greedy(presence_penalty=9.0, logprobs=0),
    "frequency": greedy(frequency_penalty=-9.0),
    "bias": greedy(logit_bias=((7, 100.0), (8, 99.0)), frequency_penalty=2.0),
    "all": greedy(
        repetition_penalty=0.7,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        logit_bias=((40, 5.0), (41, -100.0)),
        logprobs=5,
    ),
    "end": greedy(ignore_eos=False, logit_bias=((EOS_ID, 100.0),), min_tokens=4, logprobs=1),
    "stop token": greedy(logit_bias=((9, 100.0), (10, 90.0)), stop_token_ids=(9, 10), min_tokens=3),
    "logprobs": greedy(logprobs=20),
}


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{len(split)} stages")
def test_greedy_requests_of_all_kinds_together_equal_generate(checkpoints: Checkpoints, split: list[int]) -> None:
    directory = checkpoints("llama", layers=3)
    requests = [(PROMPTS[index % 6], params) for index, params in enumerate(WISHES.values())]
    with served(directory, split) as engine:
        for (prompt, params), answer in zip(requests, engine.answers(requests), strict=True):
            check(directory, prompt, params, answer)


def test_the_wishes_change_what_is_chosen(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=3)
    plain = reference(directory, tuple(PROMPTS[0]), greedy())[0]
    for name in ("repetition", "presence", "frequency", "bias", "all"):
        assert reference(directory, tuple(PROMPTS[0]), WISHES[name])[0] != plain, name
    ended = reference(directory, tuple(PROMPTS[0]), WISHES["end"])[0]
    assert (len(ended), ended[-1]) == (5, EOS_ID)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{len(split)} stages")
def test_evictions_and_failures_lose_and_repeat_no_logprobs(checkpoints: Checkpoints, split: list[int]) -> None:
    directory = checkpoints("llama", layers=3)
    wished = [WISHES[name] for name in ("all", "logprobs", "repetition", "presence", "nothing", "all")]
    requests = list(zip(PROMPTS, wished, strict=True))
    with served(directory, split, num_blocks=9) as engine:
        engine.fail_at(12)
        for (prompt, params), answer in zip(requests, engine.answers(requests), strict=True):
            check(directory, prompt, params, answer)
        assert engine.num_evicted > 3
        assert engine.failures == 1


def test_only_batches_that_ask_for_logprobs_have_a_second_message(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=3)
    with served(directory, [1, 2]) as engine:
        assert engine.transport is not None
        engine.answers([(PROMPTS[0], WISHES["repetition"]), (PROMPTS[1], WISHES["nothing"])])
        assert set(engine.transport.num_messages) == {1}
        engine.transport.num_messages.clear()
        engine.answers([(PROMPTS[0], greedy(3, logprobs=0))])
        assert engine.transport.num_messages == [2, 2, 2]


def test_more_logprobs_than_there_are_tokens(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=3)
    with served(directory, [1, 2]) as engine:
        (answer,) = engine.answers([(PROMPTS[0], greedy(2, logprobs=VOCAB + 5))])
    assert [sorted(token for token, _ in each.top) for each in answer.logprobs] == [list(range(VOCAB))] * 2


DRAWN = [
    SamplingParams(
        max_new_tokens=9,
        temperature=0.8 + index / 10,
        top_k=(0, 20)[index % 2],
        top_p=(1.0, 0.95)[index % 2],
        min_p=(0.0, 0.02, 0.1)[index % 3],
        repetition_penalty=(1.0, 1.3, 0.8)[index % 3],
        presence_penalty=(0.0, 0.6)[index % 2],
        frequency_penalty=(0.3, 0.0)[index % 2],
        logit_bias=((), ((65, 3.0), (66, -100.0)))[index % 2],
        stop_token_ids=tuple(range(100, 130)),
        min_tokens=index,
        seed=1000 + index,
        ignore_eos=bool(index % 2),
        logprobs=(None, 0, 3)[index % 3],
    )
    for index in range(6)
]


def test_a_seed_gives_the_same_alone_together_and_with_any_number_of_stages(checkpoints: Checkpoints) -> None:
    directory = checkpoints("llama", layers=3)
    requests = list(zip(PROMPTS, DRAWN, strict=True))
    with served(directory, [3]) as engine:
        alone = [engine.answers([request])[0] for request in requests]
    for split in SPLITS:
        with served(directory, split, num_blocks=9) as engine:
            together = engine.answers(requests)
            assert engine.num_evicted
        for (prompt, params), own, other in zip(requests, alone, together, strict=True):
            assert (own.token_ids, own.reason) == (other.token_ids, other.reason)
            assert len(own.token_ids) >= params.min_tokens
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *own.token_ids[:-1]]])
                logits = eager(str(directory))(input_ids=ids).logits[0, len(prompt) - 1 :]
            check_logprobs(params, other, torch.log_softmax(logits.double(), -1))
