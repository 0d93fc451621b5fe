"""TextGenerationHandler: a ready handler that continues text, in every way TorchServe can call it.

Life of a request here: parse, submit to the engine, wait, answer. What differs between TorchServe's three calling
conventions is only the waiting: all at once for a frontend batch, in turns under continuous batching, as a coroutine
under asynchronous communication. Errors belong to one request and never to its batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from ts_pippy_handler.base_pippy_handler import BasePippyHandler, finish_async
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.generator import Answer, Completion, Generator
from ts_pippy_handler.payload import ParsedRequest, parse_request
from ts_pippy_handler.pt_pippy import config_of, get_pipeline_driver
from ts_pippy_handler.text import Tokenizer

logger = logging.getLogger(__name__)

_TURN_S = 0.05
"""How long one call of ``handle`` waits for something to finish under continuous batching; new requests reach the
handler only with the next call."""
_FORGOTTEN_S = 60.0
"""When a request that the frontend no longer mentions counts as gone."""
_REMEMBERED = 1024
"""Answered requests whose names are kept; a frontend batch is far smaller."""
_REASONS = {400: "Bad Request", 429: "Too Many Requests", 503: "Service Unavailable"}


class Ticket:
    """One HTTP request: its prompts being continued, or the error it ends with."""

    def __init__(self, parsed: ParsedRequest | None, completions: list[Completion], error: PippyError | None) -> None:
        self._parsed = parsed
        self.completions = completions
        self._error = error
        self.seen = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether the response can be built."""
        return all(completion.done.is_set() for completion in self.completions)

    def add_waker(self, wake: Any) -> None:
        """Call ``wake`` whenever one of the prompts is finished."""
        for completion in self.completions:
            completion.add_done_callback(wake)

    def wait(self) -> None:
        """Block until the response can be built."""
        for completion in self.completions:
            completion.done.wait()

    def response(self, context: Any, index: int) -> Any:
        """Set status and content type of item ``index`` and return its body."""
        try:
            if self._error is not None:
                raise self._error
            assert self._parsed is not None
            answers = [completion.answer() for completion in self.completions]
            if self._parsed.is_plain_text:
                context.set_response_content_type(index, "text/plain; charset=utf-8")
                return answers[0].text or ""
            context.set_response_content_type(index, "application/json")
            bodies = [_as_json(answer) for answer in answers]
            return bodies if self._parsed.payload.is_list else bodies[0]
        except PippyError as error:
            context.set_response_status(error.status, _REASONS.get(error.status, "Error"), index)
            context.set_response_content_type(index, "application/json")
            if error.status in (429, 503):
                context.set_response_header(index, "Retry-After", "1")
            return error.as_dict()


class TextGenerationHandler(BasePippyHandler):
    """Continues prompts with a causal language model split over pipeline stages.

    A handler file needs only ``class Handler(TextGenerationHandler): pass``; the model and everything else come from
    model-config.yaml.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator: Generator | None = None
        self._tickets: dict[str, Ticket] = {}
        self._answered: deque[str] = deque(maxlen=_REMEMBERED)
        self._changed = threading.Condition()
        self._is_continuous = False

    def initialize(self, ctx: Any) -> None:
        """Bring up the ranks, load every stage, and send one token through.

        Raises:
            RuntimeError: On every rank, with the reason of the one that failed.
        """
        super().initialize(ctx)
        config: ServingConfig = config_of(ctx)
        self._is_continuous = bool(ctx.model_yaml_config.get("continuousBatching"))
        tokenizer = Tokenizer.load(config.handler.model_path, trust_remote_code=config.handler.trust_remote_code)
        driver = get_pipeline_driver(None, self.world_size, ctx)
        if driver.serves:
            self.model = driver
            self.generator = Generator(driver.engine, tokenizer, config.handler)
        self.initialized = True

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        """Answer a batch of requests, each with its own status."""
        if self.generator is None:  # a rank above 0; TorchServe ignores what it answers
            return [""] * len(data)
        if self._is_async:
            return self._handle_async(data, context)
        if self._is_continuous:
            return self._handle_in_turns(data, context)
        tickets = [self._open(item, context, index) for index, item in enumerate(data)]
        for ticket in tickets:
            ticket.wait()
        return [ticket.response(context, index) for index, ticket in enumerate(tickets)]

    def _open(self, item: dict[str, Any], context: Any, index: int) -> Ticket:
        """Parse one request and start it; an error becomes its response."""
        assert self.generator is not None
        try:
            parsed = parse_request(item, _content_type(context, index))
            completions = self.generator.submit_all(parsed.payload.prompts(), parsed.payload.wishes())
            return Ticket(parsed, completions, None)
        except PippyError as error:
            return Ticket(None, [], error)

    async def _handle_async(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()
        tickets = [self._open(item, context, index) for index, item in enumerate(data)]
        for ticket in tickets:
            ticket.add_waker(lambda: loop.call_soon_threadsafe(finished.set))
        while not all(ticket.is_done for ticket in tickets):
            await finished.wait()
            finished.clear()
        return finish_async([ticket.response(context, index) for index, ticket in enumerate(tickets)], context)

    def _handle_in_turns(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Continuous batching: answer what has finished; the frontend asks again for the rest at once.

        Every call brings all open requests, known ones included. A request left out of ``context.request_ids`` stays
        open at the frontend, so each gets one whole response with its own status. One that was answered already comes
        again when the frontend is a reply behind, and must not be answered twice.
        """
        numbers = list(range(len(data)))
        for index in numbers:
            request_id = context.request_ids[index]
            if request_id not in self._tickets and request_id not in self._answered:
                self._tickets[request_id] = self._open(data[index], context, index)
                self._tickets[request_id].add_waker(self._wake)
        tickets = [self._tickets.get(context.request_ids[index]) for index in numbers]
        with self._changed:
            self._changed.wait_for(lambda: any(ticket and ticket.is_done for ticket in tickets), timeout=_TURN_S)
        answers: list[Any] = [""] * len(data)
        for index, ticket in enumerate(tickets):
            if ticket is not None and ticket.is_done:
                answers[index] = ticket.response(context, index)
                self._answered.append(context.request_ids[index])
                del self._tickets[context.request_ids[index]]
                continue
            if ticket is not None:
                ticket.seen = time.monotonic()
            del context.request_ids[index]
        self._drop_forgotten()
        context.stopping_criteria = None
        return answers

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _drop_forgotten(self) -> None:
        now = time.monotonic()
        for request_id, ticket in list(self._tickets.items()):
            if now - ticket.seen > _FORGOTTEN_S and self.generator is not None:
                self.generator.cancel(ticket.completions)
                del self._tickets[request_id]


def _content_type(context: Any, index: int) -> str | None:
    for name in ("Content-Type", "content-type"):
        value = context.get_request_header(index, name)
        if isinstance(value, str):
            return value
    return None


def _as_json(answer: Answer) -> dict[str, Any]:
    num_prompt, num_new = len(answer.prompt_token_ids), len(answer.token_ids)
    body: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason.value,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        },
    }
    if answer.logprobs is not None:
        body["logprobs"] = [
            {
                "token_id": token_id,
                "logprob": logprobs.logprob,
                "top": [{"token_id": other, "logprob": logprob} for other, logprob in logprobs.top],
            }
            for token_id, logprobs in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
    return body
