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
from dataclasses import asdict

import msgspec

from ts_pippy_handler import errors, fit, process
from ts_pippy_handler.config import ServingConfig, load_config
from ts_pippy_handler.costs import decode_costs
from ts_pippy_handler.errors import LoadError
from ts_pippy_handler.fit import DeviceMemory
from ts_pippy_handler.trace_cache import TraceCache
from ts_pippy_handler.weights import Checkpoint


def trace_stages(config: ServingConfig, num_stages: int, memory: DeviceMemory | None = None) -> list[bytes]:
    """Trace and split the configured model in a child process, unless an earlier trace of it is kept.

    Args:
        config: The checked configuration.
        num_stages: Number of stages.
        memory: What each stage may take, if that is limited. It may be another amount at each start, so what is kept
            is found by the layers that follow from it.

    Returns:
        Each stage, as :func:`ts_pippy_handler.graph_data.decode_stage` reads it.

    Raises:
        LoadError: If the model cannot be traced or split; the subclass tells which.
    """
    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)

    def cache(layers: int) -> TraceCache:
        return TraceCache(config, layers, checkpoint.names, checkpoint.same_memory)

    costs = cache(0)
    found = None if memory is None else costs.load()
    if found is not None:
        config = _given_split(config, fit.layers_per_stage(decode_costs(found[0]), config.pippy, num_stages, memory))
    # With memory, only an explicit split says what fits it.
    if memory is None or found is not None:
        kept = cache(num_stages).load()
        if kept is not None:
            return kept
    job = json.dumps(
        {
            "config": config.model_dump(exclude_none=True),
            "num_stages": num_stages,
            "memory": memory and asdict(memory),
        }
    )
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
    if memory is not None:
        costs.store([answer["costs"]])
        config = _given_split(config, answer["sizes"])
    cache(num_stages).store(stages)
    return stages


def _given_split(config: ServingConfig, sizes: list[int]) -> ServingConfig:
    return config.model_copy(update={"pippy": config.pippy.model_copy(update={"split": sizes})})


def _trace(config: ServingConfig, num_stages: int, memory: DeviceMemory | None) -> dict[str, object]:
    # Imported here: the parent imports this module too, and needs none of it.
    from ts_pippy_handler import loading, splitting
    from ts_pippy_handler.graph_data import ModelFacts, encode_stage

    checkpoint = Checkpoint(config.handler.model_path, config.handler.index_filename)
    traced = loading.trace_checkpoint(config, checkpoint)
    traced.ask_checkpoint(checkpoint)
    sizes = fit.layers_per_stage(traced.costs, config.pippy, num_stages, memory)
    graphs = splitting.split(traced, sizes)
    stages = [encode_stage(graph, ModelFacts.of(traced, graph)) for graph in graphs]
    return {"stages": stages, "sizes": sizes, "costs": traced.costs.encode()}


def main() -> None:
    """Answer the job on standard input."""
    process.die_with_parent()
    process.leave_interrupts_to_parent()
    job = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not end up in the answer
    answer: dict[str, object]
    try:
        memory = None if job["memory"] is None else DeviceMemory(**job["memory"])
        answer = _trace(load_config(job["config"]), job["num_stages"], memory)
    except LoadError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with answers:
        answers.write(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
