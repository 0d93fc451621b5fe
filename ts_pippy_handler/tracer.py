"""Trace a model in a process of its own, once for all ranks.

Tracing needs transformers' model code and torch's exporter, about 180 MB that a rank would keep for its lifetime; done
here, a rank needs neither. ``python -m ts_pippy_handler.tracer`` reads a job from standard input and writes the
stages, or the reason why there are none, to standard output. Knows nothing of ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec

from ts_pippy_handler import errors, process
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.trace_cache import TraceCache
from ts_pippy_handler.weights import Checkpoint


def trace_stages(config: ServingConfig, num_stages: int) -> list[bytes]:
    """Trace and split the configured model in a child process, unless an earlier trace of it is kept.

    Returns:
        Each stage, as :func:`ts_pippy_handler.graph_data.decode_stage` reads it.

    Raises:
        LoadError: If the model cannot be traced or split; the subclass tells which.
    """
    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
    cache = TraceCache(config, num_stages, checkpoint.names, checkpoint.same_memory)
    if (kept := cache.load()) is not None:
        return kept
    job = json.dumps({"config": config.model_dump(exclude_none=True), "num_stages": num_stages})
    done = subprocess.run(
        [sys.executable, "-m", "ts_pippy_handler.tracer"],
        input=job.encode(),
        capture_output=True,
        # The child only handles shapes; it must not take part in the ranks' rendezvous or hold a GPU.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", process.PARENT_PID: str(os.getpid())},
        check=False,
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1][:300]
        raise LoadError(f"tracing the model ended with status {done.returncode}: {last}")
    answer = msgspec.msgpack.decode(done.stdout)
    if "error" in answer:
        raise getattr(errors, answer["kind"])(answer["error"])
    stages: list[bytes] = answer["stages"]
    cache.store(stages)
    return stages


def _trace(config: ServingConfig, num_stages: int) -> list[bytes]:
    # Imported here: the parent imports this module too, and needs none of it.
    from ts_pippy_handler import loading, splitting
    from ts_pippy_handler.graph_data import ModelFacts, encode_stage

    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
    traced = loading.trace_checkpoint(config, checkpoint)
    traced.ask_checkpoint(checkpoint)
    graphs = splitting.split(traced, loading.layers_per_stage(traced, config.pippy, num_stages))
    return [encode_stage(graph, ModelFacts.of(traced, graph)) for graph in graphs]


def main() -> None:
    """Answer the job on standard input."""
    process.die_with_parent()
    process.leave_interrupts_to_parent()
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not end up in the answer
    answer: dict[str, object]
    try:
        answer = {"stages": _trace(load_config(job["config"]), job["num_stages"])}
    except LoadError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with answers:
        answers.write(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
