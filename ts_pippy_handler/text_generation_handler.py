"""TextGenerationHandler: a ready handler that continues text, in every way TorchServe can call it.

Life of a request here: route, parse, submit to the engine, send what there is, until the last. What differs between
TorchServe's three calling conventions is only the waiting: all at once for a frontend batch, in turns under continuous
batching, as a coroutine under asynchronous communication. Errors belong to one request and never to its batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from ts_pippy_handler import openai, process
from ts_pippy_handler.answered import Answered, Computed
from ts_pippy_handler.base_pippy_handler import BasePippyHandler, finish_async, is_grpc, send_chunk
from ts_pippy_handler.config import ServingConfig
from ts_pippy_handler.draining import Drain
from ts_pippy_handler.errors import InvalidRequestError, NotFoundError, PippyError
from ts_pippy_handler.generator import Generator
from ts_pippy_handler.openai_formats import error_body
from ts_pippy_handler.payload import parse_request
from ts_pippy_handler.pt_pippy import config_of, get_pipeline_driver
from ts_pippy_handler.replies import Call, Output, Reply, failure
from ts_pippy_handler.text import Tokenizer
from ts_pippy_handler.unexpected import unexpected

logger = logging.getLogger(__name__)

_TURN_S = 0.05
"""How long one call of ``handle`` waits for something to send under continuous batching; new requests reach the
handler only with the next call."""
_SILENCE_S = 5.0
"""While a client waits, the frontend calls without pause under continuous batching; after such a silence none does."""
_REMEMBERED = 1024
"""Answered requests whose names are kept; a frontend batch is far smaller."""
_PATHS = ("v1/completions", "v1/chat/completions", "v1/models", "v1/cancel", "v1/health")


class TextGenerationHandler(BasePippyHandler):
    """Continues prompts with a causal language model split over pipeline stages.

    A handler file needs only ``class Handler(TextGenerationHandler): pass``; the model and everything else come from
    model-config.yaml.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator: Generator | None = None
        self.drain: Drain | None = None
        self._replies: dict[str, Reply | Answered] = {}
        self._answered: deque[str] = deque(maxlen=_REMEMBERED)
        self._changed = threading.Condition()
        self._last_turn = time.monotonic()
        self._is_continuous = False
        self._allows_grpc_streams = False
        self._model_name = ""
        self._created = int(time.time())

    def initialize(self, ctx: Any) -> None:
        """Bring up the ranks, load every stage, and send one token through.

        Raises:
            RuntimeError: On every rank, with the reason of the one that failed.
        """
        super().initialize(ctx)
        config: ServingConfig = config_of(ctx)
        self._is_continuous = bool(ctx.model_yaml_config.get("continuousBatching"))
        self._allows_grpc_streams = config.handler.grpc_streaming
        self._model_name = str(getattr(ctx, "model_name", ""))
        tokenizer = Tokenizer.load(config.handler.model_path, trust_remote_code=config.handler.trust_remote_code)
        process.on_signal(signal.SIGUSR1, None)  # which would end the process; only rank 0 has a use for it
        driver = get_pipeline_driver(None, self.world_size, ctx)
        if driver.serves:
            self.model = driver
            self.generator = Generator(driver.engine, tokenizer, config.handler)
            self.drain = Drain(driver.engine, config.handler.drain_timeout, self._num_unsent)
            process.on_signal(signal.SIGUSR1, self.drain.begin)
            if self._is_continuous and not self._is_async:
                threading.Thread(target=self._watch_frontend, name="frontend-watch", daemon=True).start()
        self.initialized = True

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        """Answer a batch of requests, each with its own status."""
        if self.generator is None:  # a rank above 0; TorchServe ignores what it answers
            return [""] * len(data)
        if self._is_async:
            return self._handle_async(data, context)
        if self._is_continuous:
            return self._handle_in_turns(data, context)
        replies = [self._open(item, context, index) for index, item in enumerate(data)]
        answers = [_write(_wait(reply), context, index) for index, reply in enumerate(replies)]
        for index in range(len(data)):
            if is_grpc(context, index):
                context.set_response_header(index, "ts_stream_next", "false")
        return answers

    def _open(self, item: dict[str, Any], context: Any, index: int) -> Reply | Answered:
        """Parse one request and start it; an error becomes its answer."""
        assert self.generator is not None
        path = _header(context, index, "url_path").strip("/")
        try:
            if path.startswith("v1/models"):
                return Answered(Output(body=json.dumps(self._models(path))))
            if path == "v1/health":
                return Computed(self._health)  # it asks every rank, and waits for one that does not answer
            if path == "v1/cancel":
                return Answered(Output(body=json.dumps(self._cancel(openai.cancelled_id(item)))))
            call = self._call(path, item, context, index)
            if call.is_stream:
                self._check_can_stream(is_grpc=is_grpc(context, index))
            return Reply(self.generator, call)
        except PippyError as error:
            reason = error
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the other requests
            reason = unexpected(error)
        return Answered(failure(reason, error_body(reason) if path else reason.as_dict()))

    def _check_can_stream(self, *, is_grpc: bool) -> None:
        """Refuse a stream that TorchServe's frontend could not carry in this mode.

        Raises:
            InvalidRequestError: Saying why.
        """
        if not (self._is_async or self._is_continuous):
            raise InvalidRequestError(
                "stream: this model cannot stream, since its model-config.yaml sets neither continuousBatching "
                "nor asyncCommunication"
            )
        if is_grpc and not self._is_async:
            raise InvalidRequestError(
                "stream: under continuousBatching TorchServe drops a gRPC stream after its first piece; "
                "use HTTP, or a model in spawn mode"
            )
        if is_grpc and not self._allows_grpc_streams:
            raise InvalidRequestError(
                "stream: gRPC streams are off; with handler.grpc_streaming: true in model-config.yaml clients may have "
                "them through StreamPredictions, never through Predictions"
            )

    def _call(self, path: str, item: dict[str, Any], context: Any, index: int) -> Call:
        if not path:
            return parse_request(item, _header(context, index, "content-type")).call()
        assert self.generator is not None
        request_id = context.request_ids[index]
        if path == "v1/completions":
            call = openai.parse_completion(item, request_id, self.generator.tokenizer)
        elif path == "v1/chat/completions":
            call = openai.parse_chat(item, request_id, self.generator.tokenizer)
        else:
            raise NotFoundError(f"path {path!r} is not here; there are {', '.join(_PATHS)}")
        openai.check_model(call.model or "", self._model_name)
        return call

    def _health(self) -> Output:
        assert self.generator is not None
        health = self.generator.engine.health() | {"drain": self.drain and self.drain.report()}
        return Output(body=json.dumps(health), status=200 if health["ready"] else 503)

    def _num_unsent(self) -> int:
        """Count the requests whose answers have not left, or not all of them."""
        return sum(isinstance(reply, Reply) for reply in list(self._replies.values()))

    def _models(self, path: str) -> dict[str, Any]:
        name = path.removeprefix("v1/models").strip("/")
        if not name:
            return openai.models([self._model_name], self._created)
        openai.check_model(name, self._model_name)
        return openai.model(name, self._created)

    def _cancel(self, request_id: str) -> dict[str, Any]:
        reply = self._replies.get(request_id)
        if reply is None:
            raise NotFoundError(f"no request {request_id!r} is running here")
        reply.cancel()
        return {"id": request_id, "cancelled": True}

    async def _handle_async(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        # The frontend sends one request at a time in this mode.
        replies = [self._open(item, context, index) for index, item in enumerate(data)]
        answers = [""] * len(data)
        for index, reply in enumerate(replies):
            reply.add_waker(wake)
            self._replies[context.request_ids[index]] = reply
            while (output := reply.next()) is None or not output.is_last:
                if output is not None:
                    send_chunk(_write(output, context, index), context, index)
                    continue
                await changed.wait()
                changed.clear()
            self._replies.pop(context.request_ids[index], None)
            answers[index] = _write(output, context, index)
        return finish_async(answers, context, is_stream=[reply.is_stream for reply in replies])

    def _handle_in_turns(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """Continuous batching: send what there is; the frontend asks again for the rest at once.

        Every call brings all open requests, known ones included. A request left out of ``context.request_ids`` stays
        open at the frontend, so a whole answer keeps its own status. One that was answered already comes again when
        the frontend is a reply behind, and must not be answered twice. One that does not come again is gone.
        """
        names = [context.request_ids[index] for index in range(len(data))]
        for index, name in enumerate(names):
            if name not in self._replies and name not in self._answered:
                self._replies[name] = self._open(data[index], context, index)
                self._replies[name].add_waker(self._wake)
        self._drop_gone(set(names))
        replies = [self._replies.get(name) for name in names]
        with self._changed:
            self._changed.wait_for(lambda: any(reply and reply.has_output for reply in replies), timeout=_TURN_S)
        answers: list[Any] = [""] * len(data)
        stream_ends: dict[int, Callable[[Any], bool | None]] = {}
        for index, (name, reply) in enumerate(zip(names, replies, strict=True)):
            output = reply.next() if reply is not None else None
            if output is None:
                del context.request_ids[index]
                continue
            answers[index] = _write(output, context, index)
            stream_ends[index] = _stream_end(output, is_grpc=is_grpc(context, index))
            if output.is_last:
                self._answered.append(name)
                del self._replies[name]
        context.stopping_criteria = stream_ends
        self._last_turn = time.monotonic()
        return answers

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _drop_gone(self, names: set[str]) -> None:
        """Cancel requests that the frontend has dropped: it found their connection closed."""
        for name in [name for name in self._replies if name not in names]:
            logger.info("request %s: the client has gone, it is cancelled", name)
            self._replies.pop(name).cancel()

    def _watch_frontend(self) -> None:
        """Cancel what runs when nobody waits: with its last request gone, the frontend makes no further call."""
        while True:
            time.sleep(1)
            if self._replies and time.monotonic() - self._last_turn > _SILENCE_S:
                self._drop_gone(set())


def _wait(reply: Reply | Answered) -> Output:
    """Block until a whole answer is there."""
    changed = threading.Event()
    reply.add_waker(changed.set)
    while (output := reply.next()) is None:
        changed.wait()
        changed.clear()
    return output


def _write(output: Output, context: Any, index: int) -> str:
    """Set status and headers of item ``index`` and return its body."""
    context.set_response_content_type(index, output.content_type)
    if output.status != 200:
        context.set_response_status(output.status, output.reason, index)
    if output.status in (429, 503):
        context.set_response_header(index, "Retry-After", "1")
    return output.body


def _stream_end(output: Output, *, is_grpc: bool) -> Callable[[Any], bool | None]:
    """Return what TorchServe asks about each item: whether its stream ends here; None for a whole answer.

    The frontend never ends a ``StreamPredictions`` call that is not told of its end, also if it is answered whole.
    """
    return lambda _body: output.is_last if output.is_chunk or is_grpc else None


def _header(context: Any, index: int, name: str) -> str:
    for spelling in (name, name.title()):
        value = context.get_request_header(index, spelling)
        if isinstance(value, str):
            return value
    return ""
