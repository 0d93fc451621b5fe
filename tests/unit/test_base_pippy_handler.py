"""TorchServe's handler: what it checks and sets before a model is there, and how a failed load is told."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ts", reason="TorchServe is not installed")

import torch
from transformers import PreTrainedTokenizerFast

from tests.models import byte_tokenizer
from tests.unit.fakes import FakeContext
from ts_pippy_handler import BasePippyHandler, base_pippy_handler, loading, process, ranks
from ts_pippy_handler.errors import LoadError


@pytest.fixture(autouse=True)
def answers_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous answers go out over TorchServe's socket, which the end-to-end tests have."""
    monkeypatch.setattr("ts_pippy_handler.base_pippy_handler.finish_async", lambda answers, ctx: answers)


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the handler from watching the parent of the test process, and undo what it does to logging."""
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    # It would end the test process too, with its own status: failures of the whole run were reported as success.
    monkeypatch.setattr(process, "end_quickly_at_exit", lambda: None)
    monkeypatch.setattr(loading, "check_early", lambda config, num_stages: None)  # the checkpoints here are empty
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    yield
    logging.captureWarnings(False)


def context(model_dir: Path, **top: Any) -> FakeContext:
    return FakeContext({"handler": {"model_path": str(model_dir)}, **top})


def test_spawn_mode_joins_nobody(model_dir: Path) -> None:
    handler = BasePippyHandler()
    ctx = context(model_dir, parallelLevel=3)
    handler.initialize(ctx)
    assert (handler.local_rank, handler.world_size) == (0, 3)
    assert handler.device == ranks.device_of(ranks.place_from_environment())
    assert handler.manifest is ctx.manifest
    assert handler.model_yaml_config is ctx.model_yaml_config


def test_torchrun_mode_joins_the_others(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(base_pippy_handler, "initialize_rpc_workers", lambda *arguments: calls.append(arguments))
    os.environ.update(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    handler = BasePippyHandler()
    ctx = context(model_dir)
    handler.initialize(ctx)
    assert (handler.local_rank, handler.world_size) == (1, 8)
    assert calls == [(1, 8, ctx)]


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"pippy": {"chunk": 2}}, r"pippy.chunk: unknown key \(value 2\); did you mean 'chunks'\?$"),
        ({"handler": {"model_path": "/no/such"}}, r"handler.model_path: not a directory; .*, got '/no/such'$"),
        ({"parallelLevel": 0}, r"parallelLevel: must be the number of stages, at least 1, got 0$"),
    ],
)
def test_a_wrong_configuration_is_a_runtime_error_of_one_line(
    model_dir: Path, caplog: pytest.LogCaptureFixture, top: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^rank 0, stage 0: the model cannot be loaded: {message}") as caught:
        BasePippyHandler().initialize(context(model_dir, **top))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [str(caught.value)]


def test_asynchronous_communication_does_not_go_with_torchrun(model_dir: Path) -> None:
    os.environ.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    message = "^rank 1, stage 1: the model cannot be loaded: asyncCommunication: TorchServe connects to one rank only"
    with pytest.raises(RuntimeError, match=message):
        BasePippyHandler().initialize(context(model_dir, asyncCommunication=True))


def test_asynchronous_communication_and_continuous_batching_exclude_each_other(model_dir: Path) -> None:
    message = "the model cannot be loaded: asyncCommunication and continuousBatching: TorchServe's worker dies"
    with pytest.raises(RuntimeError, match=message):
        BasePippyHandler().initialize(context(model_dir, asyncCommunication=True, continuousBatching=True))


def test_sockets_of_ranks_that_never_load_are_removed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    sockets = [tmp_path / f".ts.sock.{number}" for number in (9000, 9001, 9002)]
    for each in sockets:
        each.touch()
    monkeypatch.setattr(sys, "argv", ["worker", "--sock-name", str(sockets[0])])
    with pytest.raises(RuntimeError, match="TorchServe connects to one rank only"):
        BasePippyHandler().initialize(context(model_dir, asyncCommunication=True))
    assert [each.exists() for each in sockets] == [False, False, True]


def test_a_subclass_reports_its_own_errors_the_same_way(model_dir: Path) -> None:
    class Ours(BasePippyHandler):
        def initialize(self, ctx: Any) -> None:
            super().initialize(ctx)
            raise LoadError("no space left")

    class Theirs(BasePippyHandler):
        def initialize(self, ctx: Any) -> None:
            raise ZeroDivisionError("their own mistake")

    class Nothing(BasePippyHandler):
        pass

    with pytest.raises(RuntimeError, match=r"^rank 0, stage 0: the model cannot be loaded: no space left$"):
        Ours().initialize(context(model_dir))
    with pytest.raises(RuntimeError, match=r"^the model cannot be loaded: ZeroDivisionError: their own mistake$"):
        Theirs().initialize(context(model_dir))
    Nothing().initialize(context(model_dir))
    with pytest.raises(RuntimeError, match="handler: missing; the block must give at least model_path"):
        Ours().initialize(FakeContext({"minWorkers": 1}))


@pytest.mark.parametrize(
    ("has_gpu", "given", "device"),
    [
        (False, 0, torch.device("cpu")),
        (False, 3, torch.device("cpu")),
        (True, 3, torch.device("cuda", 3)),
        (False, "cpu", torch.device("cpu")),
        (True, "cuda:1", torch.device("cuda", 1)),
        (False, torch.device("meta"), torch.device("meta")),
        (False, None, None),
    ],
)
def test_upstreams_handlers_assign_a_gpu_number(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, given: Any, device: torch.device | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    handler = BasePippyHandler()
    handler.device = given
    assert handler.device == device


def test_a_removed_tokenizer_method_still_works() -> None:
    handler = BasePippyHandler()
    handler.tokenizer = byte_tokenizer()
    assert isinstance(handler.tokenizer, PreTrainedTokenizerFast)
    with pytest.warns(DeprecationWarning, match=r"tokenizer.encode_plus is gone"):
        encoded = handler.tokenizer.encode_plus(
            "héy", max_length=8, pad_to_max_length=True, add_special_tokens=True, return_tensors="pt"
        )
    assert encoded["input_ids"].tolist() == [[*"héy".encode(), 258, 258, 258, 258]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    with pytest.warns(DeprecationWarning, match="is gone from transformers"):
        assert handler.tokenizer.encode_plus("ab")["input_ids"] == [97, 98]


def test_a_tokenizer_that_has_the_method_keeps_it() -> None:
    own = SimpleNamespace(encode_plus=lambda text: "own")
    handler = BasePippyHandler()
    handler.tokenizer = own
    assert handler.tokenizer.encode_plus("x") == "own"
    handler.tokenizer = None
    assert handler.tokenizer is None


class Doubling(BasePippyHandler):
    """A handler with processing of its own."""

    def preprocess(self, data: list[dict[str, Any]]) -> list[int]:
        return [int(item["body"]) for item in data]

    def inference(self, data: list[int]) -> list[int]:
        return [2 * value for value in data]

    def postprocess(self, data: list[int]) -> list[str]:
        return [str(value) for value in data]


@pytest.fixture
def doubling(model_dir: Path) -> Any:
    def make(**top: Any) -> tuple[Doubling, FakeContext]:
        handler = Doubling()
        ctx = context(model_dir, **top)
        ctx.metrics = SimpleNamespace(add_time=lambda *arguments, **named: None)  # type: ignore[attr-defined]
        ctx.get_request_header = lambda index, name: None  # type: ignore[method-assign]
        handler.initialize(ctx)
        return handler, ctx

    return make


def test_a_frontend_batch_is_handled_at_once(doubling: Any) -> None:
    handler, ctx = doubling()
    assert handler.handle([{"body": b"3"}, {"body": b"4"}], ctx) == ["6", "8"]


def test_asynchronous_communication_gets_a_coroutine(doubling: Any) -> None:
    handler, ctx = doubling(asyncCommunication=True)
    answer = handler.handle([{"body": b"3"}], ctx)
    assert asyncio.iscoroutine(answer)
    assert asyncio.run(answer) == ["6"]
