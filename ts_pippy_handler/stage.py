"""One pipeline stage in memory: its part of the graph, its weights, its cache, and one pass over a batch.

Turns a :class:`~ts_pippy_handler.tracing.StageGraph` into something that runs: weights are read from the checkpoint
straight to the device, attention operators become cached attention, the device of the trace becomes the real one.
Knows nothing of other ranks; what goes in and out of a pass is a dict of named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ts_pippy_handler.attention import AttentionPlan, CachedAttention
from ts_pippy_handler.errors import CheckpointError, UnsupportedModelError
from ts_pippy_handler.packing import pack, use_packed_linears
from ts_pippy_handler.request import Batch
from ts_pippy_handler.tracing import StageGraph, TracedModel, attention_specs
from ts_pippy_handler.weights import Checkpoint


class Stage:
    """A loaded stage.

    Args:
        graph: The stage as it was cut.
        traced: The model it was cut from: names, dtype and buffer values.
        checkpoint: Where the weights are.
        device: Where the stage runs.
        pack_weights: Whether linear layers on a CPU use packed weights.
        progress: Called with the number of bytes of each tensor that was read.

    Raises:
        CheckpointError: If a tensor is missing, damaged or of another shape.
        UnsupportedModelError: If the graph holds a constant whose value the trace does not know.
    """

    def __init__(
        self,
        graph: StageGraph,
        traced: TracedModel,
        checkpoint: Checkpoint,
        device: torch.device,
        *,
        pack_weights: bool = True,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.graph = graph
        self.dtype = traced.dtype
        self.device = device
        self._plan = AttentionPlan()
        self.num_bytes = sum(parameter.nbytes for parameter in graph.module.parameters())
        """Bytes of the stage's weights."""
        self._attentions = _install_attention(graph.module, self._plan)
        _move_to_device(graph.module, device)
        packed = use_packed_linears(graph.module, traced.dtype, device) if pack_weights else {}
        _load_tensors(graph, traced, checkpoint, device, packed, progress)
        graph.module.recompile()

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.graph.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the logits."""
        return self.graph.index == self.graph.num_stages - 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of cache the stage needs for each token."""
        return sum(attention.spec.values_per_token for attention in self._attentions) * self.dtype.itemsize

    def allocate_cache(self, num_slots: int) -> None:
        """Reserve the key/value cache of every layer for ``num_slots`` tokens."""
        for attention in self._attentions:
            attention.allocate(num_slots, self.dtype, self.device)

    @torch.inference_mode()
    def run(self, batch: Batch, received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the stage once.

        Args:
            batch: Which tokens of which requests.
            received: The values named in ``graph.receives``, on the stage's device.

        Returns:
            The values named in ``graph.outputs``; on the last stage the single one is the logits [R, V].
        """
        self._plan.prepare(batch.segments, self.device)
        inputs = {**received, **self._batch_inputs(batch)}
        output = self.graph.module(*(inputs[name] for name in self.graph.inputs))
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        return dict(zip(self.graph.outputs, outputs, strict=True))

    def _batch_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        positions: list[int] = []
        for segment in batch.segments:
            positions.extend(range(segment.num_cached, segment.context_len))
        rows = [sampled.row for sampled in batch.sampled]
        values = {"input_ids": [batch.token_ids], "position_ids": [positions], "logit_rows": rows}
        return {
            name: torch.tensor(values[name], dtype=torch.long, device=self.device)
            for name in self.graph.inputs
            if name in values
        }


def _install_attention(module: fx.GraphModule, plan: AttentionPlan) -> list[CachedAttention]:
    """Put a cached attention module in the place of every attention operator."""
    attentions: list[CachedAttention] = []
    for node, spec in attention_specs(module).items():
        attention = CachedAttention(spec, plan)
        name = f"attention_{len(attentions)}"
        module.add_module(name, attention)
        with module.graph.inserting_before(node):
            call = module.graph.call_module(name, node.args[:4])
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        attentions.append(attention)
    return attentions


def _move_to_device(module: fx.GraphModule, device: torch.device) -> None:
    """Replace the device of the trace, which is baked into conversions and factory calls."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)


def _load_tensors(
    graph: StageGraph,
    traced: TracedModel,
    checkpoint: Checkpoint,
    device: torch.device,
    packed: Mapping[str, str],
    progress: Callable[[int], None],
) -> None:
    prefix = traced.base_model_prefix
    buffers = list(graph.module.named_buffers())
    # The largest tensors first: while one is packed it exists twice, and then little else is in memory.
    for key, template in sorted(graph.module.named_parameters(), key=lambda item: -item[1].numel()):
        name = graph.tensors.get(key, key)
        found = checkpoint.find(traced.aliases.get(name, [name]), prefix)
        if found is None:
            raise CheckpointError(f"the checkpoint holds no tensor {name!r}, which stage {graph.index} needs")
        value = torch.empty(template.shape, dtype=template.dtype, device=device)
        checkpoint.read_into(found, value)
        progress(value.nbytes)
        if packed.get(key) != key:
            _set(graph.module, key, torch.nn.Parameter(value, requires_grad=False))
        if key in packed:
            _drop_parameter(graph.module, packed[key])
            graph.module.register_buffer(packed[key], pack(value))
    for key, buffer in buffers:
        name = graph.tensors.get(key, key)
        _set(graph.module, key, _buffer_value(name, buffer, traced, checkpoint, prefix).to(device))


def _buffer_value(
    name: str, buffer: torch.Tensor, traced: TracedModel, checkpoint: Checkpoint, prefix: str
) -> torch.Tensor:
    """Return a buffer from the checkpoint if it is saved there, else as the model's code computes it."""
    computed = traced.buffers.get(name, buffer)
    found = checkpoint.find([name], prefix) if name in traced.persistent_buffers else None
    if found is not None:
        value = torch.empty(buffer.shape, dtype=buffer.dtype)
        checkpoint.read_into(found, value)
        return value
    if computed.is_meta:
        raise UnsupportedModelError(f"the traced model holds a constant {name!r} whose value is unknown")
    return computed


def _drop_parameter(module: torch.nn.Module, key: str) -> None:
    """Make room for a buffer where a parameter was."""
    if key in module._parameters:
        del module._parameters[key]


def _set(module: torch.nn.Module, key: str, value: torch.Tensor) -> None:
    owner, _, leaf = key.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)
