"""BasePippyHandler: TorchServe's handler for a model split over pipeline ranks. The only importer of ``ts``.

A subclass calls ``super().initialize(ctx)``, which brings the ranks up, then builds its driver with
``get_pipeline_driver``; ``preprocess``, ``inference`` and ``postprocess`` run on rank 0 only. Every way TorchServe
can call a handler works: frontend batches, continuous batching, asynchronous communication.

Source of the contract: TorchServe 0.12 ``ts/service.py``, ``ts/async_service.py``, ``ts/torch_handler``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from ts.protocol.otf_message_handler import create_predict_response
from ts.torch_handler.base_handler import BaseHandler

from ts_pippy_handler import loading, migration, process, ranks
from ts_pippy_handler.config import renamed
from ts_pippy_handler.errors import ConfigError, LoadError, PippyError, one_line
from ts_pippy_handler.pt_pippy import config_of, initialize_rpc_workers, num_spawned_stages

logger = logging.getLogger(__name__)


def load_failure_as_runtime_error(method: Callable[..., None]) -> Callable[..., None]:
    """Let TorchServe report a failed load: it logs a RuntimeError and answers; other errors just kill the worker."""

    @functools.wraps(method)
    def wrapped(self: BasePippyHandler, ctx: Any) -> None:
        process.mark_failed()  # until it succeeds
        try:
            method(self, ctx)
            process.mark_failed(failed=False)
        except PippyError as error:
            # One line that says all, last in the log: the traceback of a wrong key helps nobody.
            place = ranks.place_from_environment()
            message = f"rank {place.rank}, stage {place.rank}: the model cannot be loaded: {error}"
            logger.error(message)
            raise RuntimeError(message) from None
        except (RuntimeError, MemoryError):
            raise  # TorchServe reports these itself
        except Exception as error:
            raise RuntimeError(f"the model cannot be loaded: {type(error).__name__}: {one_line(error)}") from error

    return wrapped


class BasePippyHandler(BaseHandler):
    """Brings up one rank per pipeline stage; rank 0 serves."""

    def __init__(self) -> None:
        super().__init__()
        self.local_rank = 0
        self.world_size = 1
        self._is_async = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap a subclass's own ``initialize`` too, whose configuration errors must reach the log the same way."""
        super().__init_subclass__(**kwargs)
        if "initialize" in cls.__dict__:
            cls.initialize = load_failure_as_runtime_error(cls.__dict__["initialize"])  # type: ignore[method-assign]

    @load_failure_as_runtime_error
    def initialize(self, ctx: Any) -> None:
        """Check the configuration and join the other ranks.

        Sets ``local_rank``, ``world_size`` (the number of stages) and ``device``.

        Raises:
            RuntimeError: With the reason, if the configuration is wrong or a rank does not appear.
        """
        process.die_with_parent()
        process.end_quickly_at_exit()
        process.share_memory_arena()
        _unlink_sockets([ranks.place_from_environment().local_rank])
        migration.accept_meta_from_pretrained()
        logging.captureWarnings(True)
        warnings.simplefilter("default", DeprecationWarning)
        # Subclasses read the blocks too, and shall find each key under the one name that is documented.
        ctx.model_yaml_config = renamed(ctx.model_yaml_config or {})
        self.context = ctx
        self.manifest = ctx.manifest
        self.model_yaml_config = ctx.model_yaml_config
        config = config_of(ctx)
        self._is_async = bool(ctx.model_yaml_config.get("asyncCommunication"))
        if self._is_async and ctx.model_yaml_config.get("continuousBatching"):
            raise ConfigError(
                "asyncCommunication and continuousBatching: TorchServe's worker dies of the second request with both; "
                "leave continuousBatching out, requests are batched without it"
            )
        place = ranks.place_from_environment()
        spawned = num_spawned_stages(ctx)
        self.local_rank = place.local_rank
        self.world_size = spawned or place.world_size
        self.device = ranks.device_of(place)
        if spawned is None:
            if self._is_async:
                _unlink_sockets(range(place.world_size))  # the frontend lets no other rank get here
                raise ConfigError(
                    "asyncCommunication: TorchServe connects to one rank only in this mode, so it does not work with "
                    "torchrun; use continuousBatching, or parallelType: custom with parallelLevel"
                )
            initialize_rpc_workers(self.local_rank, self.world_size, ctx)
        else:
            loading.check_early(config, spawned)

    @property
    def device(self) -> torch.device | None:
        """Where this rank computes. Upstream's handlers assign a GPU number, also where there is no GPU."""
        return self._device

    @device.setter
    def device(self, value: torch.device | str | int | None) -> None:
        if isinstance(value, int):
            value = torch.device("cuda", value) if torch.cuda.is_available() else torch.device("cpu")
        self._device = torch.device(value) if isinstance(value, str) else value

    @property
    def tokenizer(self) -> Any:
        """The tokenizer a subclass assigned."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        self._tokenizer = migration.with_encode_plus(value)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        """Answer a batch; under ``asyncCommunication`` return a coroutine that does."""
        if self._is_async:
            return self._handle_in_thread(data, context)
        answers: list[Any] = super().handle(data, context)
        return answers

    async def _handle_in_thread(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        return finish_async(await asyncio.to_thread(super().handle, data, context), context)


class _SerialSocket(socket.socket):
    """A socket that several threads may send on: TorchServe's own thread and ours, one message after the other."""

    __slots__ = ()
    _turn = threading.Lock()

    def sendall(self, *args: Any) -> None:
        """Send everything before anybody else sends."""
        with self._turn:
            super().sendall(*args)


def is_grpc(context: Any, index: int) -> bool:
    """Whether a request came over gRPC: it then has no headers of its own, only the content types of its parts."""
    return not any(isinstance(value, str) for value in context.get_all_request_header(index).values())


def send_chunk(body: Any, context: Any, index: int) -> None:
    """Send a piece of an asynchronous request's stream; its headers go with the first one."""
    _send_item(body, context, index, is_chunk=True)


def _send_item(body: Any, context: Any, index: int, *, is_chunk: bool) -> None:
    one = {index: context.request_ids[index]}
    message = create_predict_response({index: body}, one, "Prediction success", 200, context, ts_stream_next=is_chunk)
    if type(context.cl_socket) is socket.socket:
        context.cl_socket.__class__ = _SerialSocket
    context.cl_socket.sendall(message)


def finish_async(answers: list[Any], context: Any, is_stream: Sequence[bool] = ()) -> list[Any]:
    """Send the answers of an asynchronous batch and return what ends them.

    TorchServe's asynchronous frontend forgets a request only when its last *chunk* has come, also if it was answered
    whole: without one its memory grows and the model cannot be unregistered. So an answer is sent as the only chunk
    of a stream, with an empty last one. An error must be sent whole, for a stream has status 200; its last chunk then
    finds the connection closed. Over gRPC, where a call ends with a whole answer, the answer is itself the last chunk.

    Args:
        answers: The answers; the last piece of those that have been streamed.
        context: The batch's context.
        is_stream: Which of them have been streamed; none by default.
    """
    for index, answer in enumerate(answers):
        if not (is_stream and is_stream[index]) and not is_grpc(context, index):
            status = context.get_response_status(index)[0]
            _send_item(answer, context, index, is_chunk=status is None or status < 400)
            answers[index] = ""
        context.set_response_header(index, "ts_stream_next", "true")  # which the encoder turns to false: the last
    return answers


def _unlink_sockets(local_ranks: Iterable[int]) -> None:
    """Remove the names of the sockets TorchServe has connected to by now, or never will.

    TorchServe removes only rank 0's when it ends, and what the other ranks leave makes its next start connect to a
    socket that nobody listens on.
    """
    if "--sock-name" not in sys.argv:
        return
    base, _, number = sys.argv[sys.argv.index("--sock-name") + 1].rpartition(".")
    for local_rank in local_ranks:
        with contextlib.suppress(OSError, ValueError):
            Path(f"{base}.{int(number) + local_rank}").unlink()


__all__ = ["BasePippyHandler", "LoadError"]
