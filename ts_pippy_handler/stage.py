"""One pipeline stage in memory: its part of the graph, its weights, its cache, and one pass over a batch.

Turns a :class:`~ts_pippy_handler.splitting.StageGraph` into something that runs: weights are read from the checkpoint
straight to the device, attention operators become cached attention, the device of the trace becomes the real one.
Knows nothing of other ranks; what goes in and out of a pass is a dict of named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ts_pippy_handler.attention import NUM_TENSORS
from ts_pippy_handler.cached_attention import AttentionPlan, CachedAttention, allocate_caches
from ts_pippy_handler.errors import UnsupportedModelError
from ts_pippy_handler.graph_data import ModelFacts
from ts_pippy_handler.packing import PackedWeight, Scratch, reserve, use_packed_linears
from ts_pippy_handler.request import Batch, SampledRow, Segment
from ts_pippy_handler.splitting import StageGraph
from ts_pippy_handler.tracing import TracedModel, is_attention
from ts_pippy_handler.weight_sources import WeightSource, find_buffer
from ts_pippy_handler.weights import Checkpoint

_MIN_COMPILED_ROWS = 2
"""Rows of logits that a compiled stage computes at least: none or one would have to be compiled separately."""


class Stage:
    """A loaded stage.

    Args:
        graph: The stage as it was cut.
        traced: The model it was cut from: names, dtype and buffer values.
        checkpoint: Where the weights are.
        device: Where the stage runs.
        pack_weights: Whether linear layers on a CPU use packed weights.
        native_attention: Whether decode rows on a CPU may use attention compiled here.
        native_linear: Whether packed linear layers may use kernels compiled here.
        progress: Called with the number of bytes of each tensor that was read.

    Raises:
        CheckpointError: If a tensor is missing, damaged or of another shape.
        UnsupportedModelError: If the graph holds a constant whose value the trace does not know.
    """

    def __init__(
        self,
        graph: StageGraph,
        traced: ModelFacts | TracedModel,
        checkpoint: Checkpoint,
        device: torch.device,
        *,
        pack_weights: bool = True,
        native_attention: bool = True,
        native_linear: bool = True,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.graph = graph
        self.dtype = traced.dtype
        self.device = device
        self._plan = AttentionPlan()
        self._native_attention = native_attention
        self.num_bytes = sum(parameter.nbytes for parameter in graph.module.parameters())
        """Bytes of the stage's weights."""
        self._attentions = _install_attention(graph, self._plan)
        _move_to_device(graph.module, device)
        packed = use_packed_linears(graph.module, traced.dtype, device, native=native_linear) if pack_weights else {}
        doubled = [key for key, packing in packed.items() if not packing.is_only_packed]
        self.resident_bytes = self.num_bytes + sum(graph.module.get_parameter(key).nbytes for key in doubled)
        """The same with what exists twice, plain and packed: a tied embedding."""
        _load_tensors(graph, traced, checkpoint, device, packed, progress)
        graph.module.recompile()
        self._forward: Callable[..., Any] = graph.module
        self._min_rows = 0

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
        allocate_caches(self._attentions, num_slots, self.dtype, self.device, native=self._native_attention)

    def compile(self) -> None:
        """Compile the stage, whose cache must be there and hold nothing yet.

        Raises:
            LoadError: If torch cannot compile it here.
        """
        from ts_pippy_handler.compiling import compile_module  # brings in the compiler

        attentions = {f"attention_{index}": attention for index, attention in enumerate(self._attentions)}
        eager, self._min_rows = self._forward, _MIN_COMPILED_ROWS

        def warm_up(forward: Callable[..., Any]) -> None:
            self._forward = forward
            for num_tokens in (8, 1):
                self.run(*self._example(num_tokens))

        try:
            self._forward = compile_module(self.graph.module, attentions, warm_up)
        except BaseException:
            self._forward, self._min_rows = eager, 0
            raise

    def _example(self, num_tokens: int) -> tuple[Batch, dict[str, torch.Tensor]]:
        """Return a batch of one request with zeros for what is received."""
        segment = Segment(num_tokens, 0, [(0, num_tokens)])
        batch = Batch(0, [0] * num_tokens, [segment], [SampledRow(num_tokens - 1, 0, 0.0, 0, 1.0, 0)])
        received = {
            value.name: torch.zeros(
                [num_tokens if dim is None else dim for dim in value.shape], dtype=value.dtype, device=self.device
            )
            for value in self.graph.receives
        }
        return batch, received

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
        output = self._forward(*(inputs[name] for name in self.graph.inputs))
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if self.is_last:
            outputs = [outputs[0][: len(batch.sampled)]]
        return dict(zip(self.graph.outputs, outputs, strict=True))

    def _batch_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        positions: list[int] = []
        for segment in batch.segments:
            positions.extend(range(segment.num_cached, segment.context_len))
        rows = [sampled.row for sampled in batch.sampled]
        rows += [0] * (self._min_rows - len(rows))
        values = {"input_ids": [batch.token_ids], "position_ids": [positions], "logit_rows": rows}
        return {
            name: torch.tensor(values[name], dtype=torch.long, device=self.device)
            for name in self.graph.inputs
            if name in values
        }


def _install_attention(graph: StageGraph, plan: AttentionPlan) -> list[CachedAttention]:
    """Put a cached attention module in the place of every attention operator."""
    module = graph.module
    attentions: list[CachedAttention] = []
    operators = [node for node in module.graph.nodes if is_attention(node)]
    for node, spec in zip(operators, graph.attention, strict=True):
        attention = CachedAttention(spec, plan)
        name = f"attention_{len(attentions)}"
        module.add_module(name, attention)
        with module.graph.inserting_before(node):
            call = module.graph.call_module(name, node.args[:NUM_TENSORS])
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
        if node.target is torch.ops.aten.histc.default and device.type == "cpu":
            # Models count the rows of each expert so; for whole numbers torch has that on GPUs only.
            with module.graph.inserting_before(node):
                counted = module.graph.call_function(torch.ops.aten.to.dtype, (node.args[0], torch.float32))
            node.replace_input_with(node.args[0], counted)


def _load_tensors(
    graph: StageGraph,
    traced: ModelFacts | TracedModel,
    checkpoint: Checkpoint,
    device: torch.device,
    packed: Mapping[str, PackedWeight],
    progress: Callable[[int], None],
) -> None:
    buffers = list(graph.module.named_buffers())
    sizes = {key: packed[key].values_per_part if key in packed else 0 for key, _ in graph.module.named_parameters()}
    memory = reserve(packed.values())
    scratch = Scratch(max(sizes.values(), default=0), traced.dtype)
    for key, template in sorted(graph.module.named_parameters(), key=lambda named: -sizes[named[0]]):
        source = WeightSource(graph.tensors.get(key, key), traced, checkpoint, template)
        packing = packed.get(key)
        value: torch.Tensor | None = None
        if packing is None or not packing.is_only_packed:
            value = torch.empty(template.shape, dtype=template.dtype, device=device)
            source.read_into(value)
            _set(graph.module, key, torch.nn.Parameter(value, requires_grad=False))
        else:
            _drop(graph.module, key)
        if packing is not None:
            for rows, attribute in packing.parts():
                if value is not None:
                    plain = value[rows]
                else:
                    plain = scratch.take((rows.stop - rows.start) * template.shape[1]).view(-1, template.shape[1])
                    source.read_into(plain, rows)
                graph.module.register_buffer(attribute, packing.kernels.pack(plain, memory))
        progress(template.nbytes)
    for key, buffer in buffers:
        name = graph.tensors.get(key, key)
        _set(graph.module, key, _buffer_value(name, buffer, traced, checkpoint).to(device))


def _buffer_value(
    name: str,
    buffer: torch.Tensor,
    traced: ModelFacts | TracedModel,
    checkpoint: Checkpoint,
) -> torch.Tensor:
    """Return a buffer from the checkpoint if it is saved there, else as the model's code computes it."""
    computed = traced.buffers.get(name, buffer)
    found = find_buffer(name, traced, checkpoint)
    if found is not None:
        checkpoint.check(found, buffer.shape, is_weight=False)
        value = torch.empty(buffer.shape, dtype=buffer.dtype)
        checkpoint.read_into(found, value)
        return value
    if computed.is_meta:
        raise UnsupportedModelError(f"the traced model holds a constant {name!r} whose value is unknown")
    return computed


def _drop(module: torch.nn.Module, key: str) -> None:
    owner, _, leaf = key.rpartition(".")
    delattr(module.get_submodule(owner), leaf)


def _set(module: torch.nn.Module, key: str, value: torch.Tensor) -> None:
    owner, _, leaf = key.rpartition(".")
    setattr(module.get_submodule(owner), leaf, value)
