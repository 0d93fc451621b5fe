"""A cut stage as bytes: what one process traced, another one runs, without tracing again.

The graph becomes plain data in msgpack, its buffers safetensors; nothing is pickled, so reading a stage runs no code
but torch's own operators, looked up by name. Knows graphs and their encoding; knows nothing of processes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import fx

from ts_pippy_handler import experts  # noqa: F401 - graphs name its operator
from ts_pippy_handler.attention import AttentionSpec
from ts_pippy_handler.conversion import Conversion, Conversions
from ts_pippy_handler.errors import UnsupportedModelError
from ts_pippy_handler.splitting import StageGraph, WireValue, attention_specs
from ts_pippy_handler.tracing import TracedModel

_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_MODULES_OF_FUNCTIONS = frozenset({"_operator", "operator", "math", "builtins"})


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a stage needs to know of the model it was cut from."""

    dtype: torch.dtype
    base_model_prefix: str
    vocab_size: int
    max_positions: int | None
    aliases: dict[str, list[str]]
    """All names of each parameter and saved buffer the stage uses; a checkpoint may hold any one of them."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    persistent_buffers: frozenset[str] = frozenset()
    conversions: Conversions = field(default_factory=Conversions)
    """Those of the parameters the stage uses."""
    unread: tuple[str, ...] = ()
    """Tensors of the checkpoint that no stage reads; only the first stage's rank is told, which reports them."""

    @classmethod
    def of(cls, traced: TracedModel, graph: StageGraph) -> ModelFacts:
        """Collect what ``graph`` needs of the traced model."""
        used = set(graph.tensors.values())
        all_aliases = traced.aliases
        names = {alias for name in used for alias in all_aliases.get(name, ())}
        converted = {name: each for name, each in traced.conversions.converted.items() if name in names}
        return cls(
            dtype=traced.dtype,
            base_model_prefix=traced.base_model_prefix,
            vocab_size=traced.vocab_size,
            max_positions=traced.max_positions,
            aliases={name: aliases for name, aliases in all_aliases.items() if name in used},
            buffers={name: value for name, value in traced.buffers.items() if name in used},
            persistent_buffers=frozenset(traced.persistent_buffers & used),
            conversions=Conversions(converted=converted),
            unread=() if graph.index else tuple(traced.unread),
        )


def encode_stage(graph: StageGraph, facts: ModelFacts) -> bytes:
    """Return a stage as bytes.

    Raises:
        UnsupportedModelError: If the graph holds a value that has no plain form.
    """
    module = graph.module
    constants = {key: value for key, value in module.named_buffers() if not value.is_meta}
    tensors = {f"buffer:{name}": value for name, value in facts.buffers.items()}
    tensors |= {f"constant:{name}": value for name, value in constants.items()}
    document = {
        "nodes": [_encode_node(node) for node in module.graph.nodes],
        "attention": [vars(spec) for spec in attention_specs(module).values()],
        "parameters": {name: _template(value) for name, value in module.named_parameters()},
        "buffers": {name: _template(value) for name, value in module.named_buffers()},
        "stage": [graph.index, graph.num_stages, graph.first_layer, graph.num_layers, graph.work_bytes_per_row],
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "receives": [_encode_wire(value) for value in graph.receives],
        "sends": [_encode_wire(value) for value in graph.sends],
        "tensors": graph.tensors,
        "facts": {
            "dtype": str(facts.dtype),
            "base_model_prefix": facts.base_model_prefix,
            "vocab_size": facts.vocab_size,
            "max_positions": facts.max_positions,
            "aliases": facts.aliases,
            "persistent_buffers": sorted(facts.persistent_buffers),
            "conversions": _encode_conversions(facts.conversions),
            "unread": facts.unread,
        },
        # Cloned: buffers may share memory, which safetensors refuses.
        "values": save_tensors({name: value.detach().clone().contiguous() for name, value in tensors.items()}),
    }
    return msgspec.msgpack.encode(document)


def decode_stage(data: bytes) -> tuple[StageGraph, ModelFacts]:
    """Return the stage that :func:`encode_stage` wrote."""
    document: dict[str, Any] = msgspec.msgpack.decode(data)
    values = load_tensors(document["values"])
    root = torch.nn.Module()
    for name, (shape, dtype) in document["parameters"].items():
        parameter = torch.empty(shape, dtype=_constant(dtype), device="meta")
        root.register_parameter(name, torch.nn.Parameter(parameter, requires_grad=False))
    for name, (shape, dtype) in document["buffers"].items():
        known = values.get(f"constant:{name}")
        root.register_buffer(
            name, known if known is not None else torch.empty(shape, dtype=_constant(dtype), device="meta")
        )
    index, num_stages, first_layer, num_layers, work_bytes_per_row = document["stage"]
    graph = StageGraph(
        index=index,
        num_stages=num_stages,
        first_layer=first_layer,
        num_layers=num_layers,
        module=fx.GraphModule(root, _decode_nodes(document["nodes"])),
        inputs=tuple(document["inputs"]),
        outputs=tuple(document["outputs"]),
        receives=tuple(_decode_wire(value) for value in document["receives"]),
        sends=tuple(_decode_wire(value) for value in document["sends"]),
        tensors=document["tensors"],
        attention=tuple(AttentionSpec(**spec) for spec in document["attention"]),
        work_bytes_per_row=work_bytes_per_row,
    )
    facts = document["facts"]
    prefix = "buffer:"
    return graph, ModelFacts(
        dtype=_constant(facts["dtype"]),
        base_model_prefix=facts["base_model_prefix"],
        vocab_size=facts["vocab_size"],
        max_positions=facts["max_positions"],
        aliases=facts["aliases"],
        buffers={name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)},
        persistent_buffers=frozenset(facts["persistent_buffers"]),
        conversions=_decode_conversions(facts["conversions"]),
        unread=tuple(facts["unread"]),
    )


def _encode_conversions(conversions: Conversions) -> list[Any]:
    distinct = {id(each): each for each in conversions.converted.values()}
    return [
        [each.sources, each.targets, [_encode_node(node) for node in each.graph.nodes]] for each in distinct.values()
    ]


def _decode_conversions(records: list[Any]) -> Conversions:
    found = Conversions()
    for sources, targets, nodes in records:
        each = Conversion(sources=tuple(sources), targets=tuple(targets), graph=_decode_nodes(nodes))
        found.converted.update(dict.fromkeys(targets, each))
    return found


def _encode_node(node: fx.Node) -> list[Any]:
    target = _encode_target(node.target) if node.op == "call_function" else node.target
    return [node.op, node.name, target, _encode(node.args), _encode(node.kwargs)]


def _decode_nodes(records: list[list[Any]]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, arguments, keywords in records:
        called = _decode_target(target) if op == "call_function" else target
        args = tuple(_decode(argument, nodes) for argument in arguments[1])
        nodes[name] = graph.create_node(op, called, args, _decode(keywords, nodes), name=name)
    return graph


def _encode_target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops:{target}"
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    if module not in _MODULES_OF_FUNCTIONS or name is None:
        raise UnsupportedModelError(f"the traced model calls {target!r}, which is no torch operator")
    return f"{module}:{name}"


def _decode_target(text: str) -> Any:
    place, _, name = text.partition(":")
    if place == "torch.ops":
        namespace, operator, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    if place not in _MODULES_OF_FUNCTIONS:
        raise UnsupportedModelError(f"a stage names the function {text!r}, which is no torch operator")
    return getattr(importlib.import_module(place), name)


def _encode(value: Any) -> Any:
    """Return an argument of a node as plain data; what is not plain becomes a list that starts with its kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", [_encode(item) for item in value]]
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, _TORCH_CONSTANTS):
        return ["torch", str(value)]
    if isinstance(value, slice):
        return ["slice", [_encode(part) for part in (value.start, value.stop, value.step)]]
    raise UnsupportedModelError(f"the traced model holds a {type(value).__name__} as an argument: {value!r}")


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item, nodes) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "node":
        return nodes[content]
    if kind == "device":
        return torch.device(content)
    if kind == "torch":
        return _constant(content)
    items = [_decode(item, nodes) for item in content]
    return {"list": items, "tuple": tuple(items)}[kind] if kind != "slice" else slice(*items)


def _constant(text: str) -> Any:
    return getattr(torch, text.removeprefix("torch."))


def _template(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype)


def _encode_wire(value: WireValue) -> list[Any]:
    return [value.name, value.shape, str(value.dtype)]


def _decode_wire(record: list[Any]) -> WireValue:
    name, shape, dtype = record
    return WireValue(name=name, shape=tuple(shape), dtype=_constant(dtype))
