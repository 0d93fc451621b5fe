"""Cut a traced model into stages: torchpippy splits the graph before chosen layers.

What follows from the positions alone (rotary tables, for example) is computed on every stage that needs it instead of
being sent. This is the only module that touches torchpippy (0.2.0, its last release). Knows nothing of weights on
disk, of ranks, or of how a stage is run.

Source: torchpippy 0.2.0 ``pippy/IR.py``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ts_pippy_handler.attention import AttentionSpec
from ts_pippy_handler.costs import Unit
from ts_pippy_handler.errors import UnsupportedModelError
from ts_pippy_handler.tracing import SHAPE, TracedModel, attention_spec, is_attention


@dataclass(frozen=True, kw_only=True)
class WireValue:
    """A tensor that one stage sends to the next."""

    name: str
    shape: tuple[int | None, ...]
    """None stands for the number of rows of the batch."""
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class StageGraph:
    """One stage of the split model, still without weights."""

    index: int
    num_stages: int
    first_layer: int
    num_layers: int
    module: fx.GraphModule
    inputs: tuple[str, ...]
    """Where each argument comes from: one of :data:`INPUT_NAMES` or the name of a received value."""
    outputs: tuple[str, ...]
    receives: tuple[WireValue, ...]
    sends: tuple[WireValue, ...]
    tensors: dict[str, str]
    """Name of each parameter and buffer in ``module``, and its name in the Hugging Face model."""
    attention: tuple[AttentionSpec, ...]
    """What each attention operator of ``module`` needs to run, in order."""
    work_bytes_per_row: int
    """Most memory of intermediate values at a time, for each row of a batch."""


def attention_specs(graph: fx.GraphModule) -> dict[fx.Node, AttentionSpec]:
    """Return every attention call of a stage, in order, with what it needs to run."""
    return {node: attention_spec(node) for node in graph.graph.nodes if is_attention(node)}


def split(traced: TracedModel, layers_per_stage: Sequence[int]) -> list[StageGraph]:
    """Cut the traced model before the first layer of each stage. Consumes ``traced.graph``.

    Args:
        traced: The whole model.
        layers_per_stage: Number of layers of each stage, at least one each, summing to all layers.
    """
    # torchpippy is archived and imports slowly; only splitting needs it.
    logging.getLogger("pippy").setLevel(logging.ERROR)  # it warns of a missing training loss
    from pippy import Pipe, pipe_split
    from pippy.IR import MultiUseParameterConfig

    firsts = [sum(layers_per_stage[:stage]) for stage in range(len(layers_per_stage))]
    costs = [
        traced.costs.cost(range(first, first + size)) for first, size in zip(firsts, layers_per_stage, strict=True)
    ]
    starts = [traced.layer_starts[layer] for layer in firsts]
    graph = traced.graph.graph
    for start in reversed(starts[1:]):
        _recompute_behind(graph, start)
    for start in starts[1:]:
        with graph.inserting_before(_first_copied(start)):
            graph.call_function(pipe_split, ())
    for node in graph.nodes:
        node.meta.pop("val", None)
        node.meta.pop("example_value", None)
    traced.graph.recompile()
    with _recompiling_later():
        pipe = Pipe._from_traced(traced.graph, traced.graph, MultiUseParameterConfig.REPLICATE)
    return _stage_graphs(pipe, firsts, layers_per_stage, costs)


@contextlib.contextmanager
def _recompiling_later() -> Iterator[None]:
    """Keep torchpippy from regenerating a stage's code for each parameter it moves there.

    For 30 layers that took 7 s of the 12 s that tracing and splitting needed; a stage is compiled once, when loaded.
    """
    recompile = fx.GraphModule.recompile
    fx.GraphModule.recompile = lambda module: None  # type: ignore[assignment, method-assign, return-value]
    try:
        yield
    finally:
        fx.GraphModule.recompile = recompile  # type: ignore[method-assign]


_COPIED_FOR = "ts_pippy_copied_for"  # node.meta key: the stage start a node was recomputed for


def _recompute_behind(graph: fx.Graph, start: fx.Node) -> None:
    """Let the nodes from ``start`` on compute what follows from the positions alone, instead of receiving it."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    split_at = position[start]
    placeholders: dict[str, fx.Node] = {node.name: node for node in nodes if node.op == "placeholder"}
    recomputable: dict[fx.Node, bool] = {}
    for node in nodes[:split_at]:
        recomputable[node] = _follows_from_positions(node, recomputable)
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node.op == "placeholder" and node.name == "input_ids":
            return placeholders["position_ids"]  # only its length is asked for, and that is the same
        if node.op in ("placeholder", "get_attr"):
            return node
        if node not in copies:
            for source in node.all_input_nodes:
                copy(source)
            with graph.inserting_before(start):
                copies[node] = graph.node_copy(node, copy)
            copies[node].meta[_COPIED_FOR] = start.name
        return copies[node]

    for node in nodes[split_at:]:
        for source in node.all_input_nodes:
            behind = source.op in ("placeholder", "get_attr") or position[source] >= split_at
            if not behind and recomputable[source]:
                node.replace_input_with(source, copy(source))


def _follows_from_positions(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return node.name != "input_ids" and node.name != "logit_rows"
    if node.op != "call_function" or is_attention(node):
        return False
    if node.target is torch.ops.aten.sym_size.int:
        source = node.args[0]
        return isinstance(source, fx.Node) and (source.name == "input_ids" or known[source])
    return all(known[source] for source in node.all_input_nodes)


def _first_copied(start: fx.Node) -> fx.Node:
    node = start
    while node.prev.meta.get(_COPIED_FOR) == start.name:
        node = node.prev
    return node


def _stage_graphs(pipe: Any, firsts: Sequence[int], layers: Sequence[int], costs: Sequence[Unit]) -> list[StageGraph]:
    calls = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    if len(calls) != len(layers):
        raise UnsupportedModelError(f"torchpippy made {len(calls)} stages where {len(layers)} were asked for")
    values: dict[fx.Node, WireValue] = {}
    last_use: dict[str, int] = {}
    produced: list[tuple[str, ...]] = []
    for index, call in enumerate(calls):
        module = pipe.split_gm.get_submodule(call.target)
        for source in call.all_input_nodes:
            if source in values:
                last_use[values[source].name] = index
        produced.append(_name_outputs(call, module, index, values))
    by_name = {value.name: value for value in values.values()}
    sends = [
        tuple(by_name[name] for owner in range(index + 1) for name in produced[owner] if last_use.get(name, -1) > index)
        for index in range(len(calls))
    ]
    return [
        StageGraph(
            index=index,
            num_stages=len(calls),
            first_layer=firsts[index],
            num_layers=layers[index],
            module=pipe.split_gm.get_submodule(call.target),
            inputs=tuple(values[arg].name if arg in values else arg.name for arg in call.args),
            outputs=produced[index],
            receives=sends[index - 1] if index else (),
            sends=sends[index],
            attention=tuple(attention_specs(pipe.split_gm.get_submodule(call.target)).values()),
            work_bytes_per_row=costs[index].work_bytes_per_row,
            tensors={
                key: name.removeprefix("model.") for key, name in pipe.submod_qualname_mappings[call.target].items()
            },
        )
        for index, call in enumerate(calls)
    ]


def _name_outputs(
    call: fx.Node, module: fx.GraphModule, index: int, values: dict[fx.Node, WireValue]
) -> tuple[str, ...]:
    """Name the outputs of a stage and record the nodes of the outer graph that stand for them."""
    output = next(node for node in module.graph.nodes if node.op == "output").args[0]
    outputs = list(output) if isinstance(output, (tuple, list)) else [output]
    names = tuple(f"stage{index}.{position}" for position in range(len(outputs)))
    users: dict[int, fx.Node]
    if isinstance(output, (tuple, list)):
        users = {int(user.args[1]): user for user in call.users if user.op == "call_function"}  # type: ignore[arg-type]
    else:
        users = {0: call}
    for position, node in users.items():
        if not any(user.op == "call_module" for user in node.users):
            continue
        shape, dtype = outputs[position].meta.get(SHAPE, ((), None))
        if dtype is None or any(isinstance(dim, str) for dim in shape):
            raise UnsupportedModelError(
                f"{outputs[position].name} is needed by a later stage but is no tensor of one row per token"
            )
        values[node] = WireValue(name=names[position], shape=shape, dtype=dtype)
    return names
