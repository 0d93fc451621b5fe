"""BasePippyHandler: TorchServe's handler for a model split over pipeline ranks. The only importer of ``ts``.

A subclass calls ``super().initialize(ctx)``, which brings the ranks up, then builds its driver with
``get_pipeline_driver``; ``preprocess``, ``inference`` and ``postprocess`` run on rank 0 only. Every way TorchServe
can call a handler works: frontend batches, continuous batching, asynchronous communication.

Source of the contract: TorchServe 0.12 ``ts/service.py``, ``ts/async_service.py``, ``ts/torch_handler``.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
from ts.torch_handler.base_handler import BaseHandler

from ts_pippy_handler import ranks
from ts_pippy_handler.errors import ConfigError, LoadError, PippyError
from ts_pippy_handler.pt_pippy import config_of, initialize_rpc_workers, num_spawned_stages

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])


def load_failure_as_runtime_error(method: Method) -> Method:
    """Let TorchServe report a failed load: it logs a RuntimeError and answers; other errors just kill the worker."""

    @functools.wraps(method)
    def wrapped(self: BasePippyHandler, ctx: Any) -> Any:
        try:
            return method(self, ctx)
        except PippyError as error:
            # One line that says all, last in the log: the traceback of a wrong key helps nobody.
            place = ranks.place_from_environment()
            message = f"rank {place.rank}, stage {place.rank}: the model cannot be loaded: {error}"
            logger.error(message)
            raise RuntimeError(message) from None

    return wrapped


class BasePippyHandler(BaseHandler):  # type: ignore[misc]
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
        ranks.die_with_parent()
        logging.captureWarnings(True)
        warnings.simplefilter("default", DeprecationWarning)
        self.context = ctx
        self.manifest = ctx.manifest
        self.model_yaml_config = ctx.model_yaml_config
        config_of(ctx)
        self._is_async = bool(ctx.model_yaml_config.get("asyncCommunication"))
        place = ranks.place_from_environment()
        spawned = num_spawned_stages(ctx)
        self.local_rank = place.local_rank
        self.world_size = spawned or place.world_size
        self.device = ranks.device_of(place)
        if spawned is None:
            if self._is_async:
                raise ConfigError(
                    "asyncCommunication: TorchServe connects to one rank only in this mode, so it does not work with "
                    "torchrun; use continuousBatching, or parallelType: custom with parallelLevel"
                )
            initialize_rpc_workers(self.local_rank, self.world_size, ctx)

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
        if value is not None and not hasattr(value, "encode_plus"):
            value.encode_plus = functools.partial(_encode_plus, value)
        self._tokenizer = value

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        """Answer a batch; under ``asyncCommunication`` return a coroutine that does."""
        if self._is_async:
            return asyncio.to_thread(super().handle, data, context)
        answers: list[Any] = super().handle(data, context)
        return answers


def _encode_plus(tokenizer: Any, text: str, *, pad_to_max_length: bool = False, **arguments: Any) -> Any:
    """Stand in for the tokenizer method that upstream's handler calls and transformers 5 removed."""
    warnings.warn(
        "tokenizer.encode_plus(..., pad_to_max_length=True) is gone from transformers; "
        "call tokenizer(text, padding='max_length', ...)",
        DeprecationWarning,
        stacklevel=2,
    )
    if pad_to_max_length:
        arguments.setdefault("padding", "max_length")
    return tokenizer(text, **arguments)


__all__ = ["BasePippyHandler", "LoadError"]
