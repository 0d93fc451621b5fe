"""All stages of a split model in one process, run one after the other as the ranks would."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx
from transformers import AutoModelForCausalLM

from ts_pippy_handler import model_config, splitting, tracing
from ts_pippy_handler.request import Batch, SampledRow, Segment
from ts_pippy_handler.stage import Stage
from ts_pippy_handler.tracing import TracedModel
from ts_pippy_handler.weights import Checkpoint

CPU = torch.device("cpu")


_traces: dict[tuple[object, ...], TracedModel] = {}


def traced(directory: Path, dtype: torch.dtype = torch.float32, checkpoint: Checkpoint | None = None) -> TracedModel:
    """Trace a checkpoint, or copy the trace made before: tracing takes a second, and splitting uses a trace up."""
    names = () if checkpoint is None else (*sorted(checkpoint.names), *sorted(checkpoint.same_memory.items()))
    key = ((directory / "config.json").read_text(), dtype, names)
    if key not in _traces:
        _traces[key] = tracing.trace(model_config.read_config(str(directory)), dtype, checkpoint)
    original = _traces[key]
    fresh = copy.copy(original)
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(original.graph.graph, nodes))
    graph.set_codegen(original.graph.graph._codegen)
    fresh.graph = fx.GraphModule(original.graph, graph)
    fresh.layer_starts = [nodes[node] for node in original.layer_starts]
    return fresh


class Pipeline:
    """The stages of a checkpoint, with a cache."""

    def __init__(
        self,
        directory: Path,
        layers_per_stage: Sequence[int],
        *,
        num_slots: int = 128,
        pack_weights: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        checkpoint = Checkpoint(str(directory))
        model = traced(directory, dtype, checkpoint)
        model.ask_checkpoint(checkpoint)
        graphs = splitting.split(model, layers_per_stage)
        self.stages = [Stage(graph, model, checkpoint, CPU, pack_weights=pack_weights) for graph in graphs]
        for stage in self.stages:
            stage.allocate_cache(num_slots)

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits [R, V] of the sampled rows; only what a stage says it sends reaches the next."""
        received: Mapping[str, torch.Tensor] = {}
        for stage in self.stages:
            outputs = {**received, **stage.run(batch, received)}
            for value in stage.graph.sends:
                wanted = tuple(batch.num_tokens if dim is None else dim for dim in value.shape)
                assert tuple(outputs[value.name].shape) == wanted
                assert outputs[value.name].dtype == value.dtype
            received = {value.name: outputs[value.name] for value in stage.graph.sends}
        return outputs[self.stages[-1].graph.outputs[0]]


def batch_of(number: int, parts: Sequence[tuple[Sequence[int], int, list[tuple[int, int]]]]) -> Batch:
    """Build a batch that wants the logits of every row, of (tokens, num_cached, runs) for each request."""
    tokens = [token for own, _, _ in parts for token in own]
    segments = [Segment(len(own), num_cached, runs) for own, num_cached, runs in parts]
    sampled = [SampledRow(row, 0, 0.0, 0, 1.0, 0) for row in range(len(tokens))]
    return Batch(number, tokens, segments, sampled)


@lru_cache(maxsize=8)
def eager(directory: str) -> torch.nn.Module:
    """Return the model as transformers loads it, with its plainest attention."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def eager_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [T, V] of one request that transformers computes, all rows at once."""
    with torch.inference_mode():
        logits: torch.Tensor = eager(str(directory))(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return logits
