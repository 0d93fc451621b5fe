"""Trace a model in a process of its own, once for all ranks.

Tracing needs transformers' model code and torch's exporter, about 180 MB that a rank would keep for its lifetime; done
here, a rank needs neither. The child first checks that the checkpoint holds the model and says so, then traces while
the ranks start, then splits. ``python -m ts_pippy_handler.tracer`` reads a job from the first line of standard input
and the memory of the stages from the second; to standard output it writes messages, each with its length before it:
nothing in the first, the stages in the second, or why there are none. Knows nothing of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, Any

import msgspec

from ts_pippy_handler import errors, fit, process
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.costs import decode_costs
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.fit import DeviceMemory
from ts_pippy_handler.trace_cache import TraceCache
from ts_pippy_handler.weights import Checkpoint

_LENGTH = struct.Struct("<Q")


class Tracing:
    """The configured model on its way to stages, in a child process unless an earlier trace of it is kept.

    Args:
        config: The checked configuration.
        num_stages: Number of stages.
    """

    def __init__(self, config: ServingConfig, num_stages: int) -> None:
        self._config = config
        self._num_stages = num_stages
        self._checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
        self._child: _Child | None = None
        self._costs: list[bytes] | None = None
        self._kept: list[bytes] | None = None
        # With memory, which may be another amount at each start, stages are kept under the layers that follow from it.
        if config.pippy.device_memory is None:
            self._kept = self._cache(config, num_stages).load()
        else:
            self._costs = self._cache(config, 0).load()
        if self._kept is None and self._costs is None:
            self._child = _Child(config, num_stages)

    def check(self) -> None:
        """Wait until it is known that the checkpoint holds the model; at once where a trace is kept.

        Raises:
            LoadError: If it does not, or the model cannot be built; the subclass tells which.
        """
        if self._child is not None:
            self._child.check()

    def stages(self, memory: DeviceMemory | None = None) -> list[bytes]:
        """Split the model and return each stage, as :func:`ts_pippy_handler.graph_data.decode_stage` reads it.

        Args:
            memory: What each stage may take, if that is limited.

        Raises:
            LoadError: If the model cannot be traced or split; the subclass tells which.
        """
        if self._kept is not None:
            return self._kept
        config = self._config
        if self._costs is not None:
            sizes = fit.layers_per_stage(decode_costs(self._costs[0]), config.pippy, self._num_stages, memory)
            config = _given_split(config, sizes)
            kept = self._cache(config, self._num_stages).load()
            if kept is not None:
                return kept
        if self._child is None:
            self._child = _Child(config, self._num_stages)
        answer = self._child.split(memory)
        if memory is not None:
            self._cache(config, 0).store([answer["costs"]])
            config = _given_split(config, answer["sizes"])
        stages: list[bytes] = answer["stages"]
        self._cache(config, self._num_stages).store(stages)
        return stages

    def close(self) -> None:
        """End the child, if it is still there."""
        if self._child is not None:
            self._child.close()

    def _cache(self, config: ServingConfig, num_stages: int) -> TraceCache:
        return TraceCache(config, num_stages, self._checkpoint.names, self._checkpoint.same_memory)


class _Child:
    """The process that traces."""

    def __init__(self, config: ServingConfig, num_stages: int) -> None:
        # The child only handles shapes; it must not take part in the ranks' rendezvous or hold a GPU.
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", process.PARENT_PID: str(os.getpid())}
        self._is_checked = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ts_pippy_handler.tracer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **own},
        )
        self._send({"config": config.model_dump(exclude_none=True), "num_stages": num_stages})

    def check(self) -> None:
        if not self._is_checked:
            self._receive()
            self._is_checked = True

    def split(self, memory: DeviceMemory | None) -> dict[str, Any]:
        self.check()
        self._send(memory and asdict(memory))
        try:
            return self._receive()
        finally:
            self.close()

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._process.wait()
        self._log.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it says next tells why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = self._process.stdout.read(_LENGTH.size)
        data = self._process.stdout.read(*_LENGTH.unpack(length)) if len(length) == _LENGTH.size else None
        if data is None:
            status = self._process.wait()
            self._log.seek(0)
            last = (self._log.read().decode(errors="replace").strip() or "no output").splitlines()[-1][:300]
            raise LoadError(f"tracing the model ended with status {status}: {last}")
        answer: dict[str, Any] = msgspec.msgpack.decode(data)
        if "error" in answer:
            raise getattr(errors, answer["kind"])(answer["error"])
        return answer


def trace_stages(config: ServingConfig, num_stages: int, memory: DeviceMemory | None = None) -> list[bytes]:
    """Trace and split the configured model, as :class:`Tracing` in one go.

    Raises:
        LoadError: If the model cannot be traced or split; the subclass tells which.
    """
    tracing = Tracing(config, num_stages)
    try:
        return tracing.stages(memory)
    finally:
        tracing.close()


def _given_split(config: ServingConfig, sizes: list[int]) -> ServingConfig:
    return config.model_copy(update={"pippy": config.pippy.model_copy(update={"split": sizes})})


def _answers(lines: Iterator[str]) -> Iterator[dict[str, object]]:
    # Imported here: the parent imports this module too, and needs none of it.
    from ts_pippy_handler import loading, splitting
    from ts_pippy_handler.graph_data import ModelFacts, encode_stage

    job = json.loads(next(lines))
    config = load_config(job["config"])
    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
    model = loading.build_model(config, checkpoint)
    yield {}
    traced = model.trace()
    sizes_given = json.loads(next(lines))
    memory = None if sizes_given is None else DeviceMemory(**sizes_given)
    sizes = fit.layers_per_stage(traced.costs, config.pippy, job["num_stages"], memory)
    graphs = splitting.split(traced, sizes)
    stages = [encode_stage(graph, ModelFacts.of(traced, graph)) for graph in graphs]
    yield {"stages": stages, "sizes": sizes, "costs": traced.costs.encode()}


def _write(answers: IO[bytes], answer: dict[str, object]) -> None:
    data = msgspec.msgpack.encode(answer)
    answers.write(_LENGTH.pack(len(data)) + data)
    answers.flush()


def main() -> None:
    """Answer the job on standard input."""
    process.die_with_parent()
    process.leave_interrupts_to_parent()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not end up in the answer
    try:
        for answer in _answers(sys.stdin):
            _write(answers, answer)
    except LoadError as error:
        _write(answers, {"error": str(error), "kind": type(error).__name__})


if __name__ == "__main__":
    main()
