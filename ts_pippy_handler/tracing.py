"""Trace a Hugging Face causal model once, without weights, and cut the trace into stages.

:func:`trace` exports the model on the meta device with a dynamic number of tokens and every attention call behind
one operator. :func:`split` lets torchpippy cut the graph before chosen layers. This is the only module that touches
torchpippy (0.2.0, its last release). Knows nothing of weights on disk, of ranks, or of how a stage is run.

Sources: ``torch.export``; torchpippy 0.2.0 ``pippy/IR.py``.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ts_pippy_handler.attention import ATTENTION_NAME, AttentionSpec, register_attention
from ts_pippy_handler.config import DTYPES
from ts_pippy_handler.errors import CheckpointError, UnsupportedModelError

INPUT_NAMES = ("input_ids", "position_ids", "logit_rows")
"""Inputs of the traced graph: tokens [1, T], their positions [1, T], and the rows [R] whose logits are wanted."""

_SHAPE = "ts_pippy_shape"  # node.meta key: (shape with None for T, dtype), plain data that survives splitting
_MAX_DIM = 1 << 24


class _Packed(torch.nn.Module):
    """The traced callable: a packed row of tokens in, logits [R, vocabulary] of the wanted rows out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_rows)
        logits: torch.Tensor = output.logits[0]
        return logits


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


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest piece a split can move: one layer (the first with the embedding, the last with the head)."""

    weight_bytes: int
    """Memory of its parameters."""
    read_bytes: int
    """Bytes of parameters read to compute one token; an embedding row is next to nothing."""
    num_parameters: int
    kv_values_per_token: int


class TracedModel:
    """The graph of the whole model with what the split needs to know of it."""

    def __init__(
        self, graph: fx.GraphModule, model: torch.nn.Module, config: Any, buffers: dict[str, torch.Tensor]
    ) -> None:
        self.graph = graph
        self.config = config
        self.buffers = buffers
        """Values of buffers as the model's own code computes them, by model name."""
        self.dtype: torch.dtype = model.dtype  # type: ignore[assignment]
        self.base_model_prefix = str(getattr(model, "base_model_prefix", ""))
        self.persistent_buffers = set(model.state_dict()) & set(buffers)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._layer_starts, self._layers_end = _find_layers(graph, model)
        self._check_layers()

    @property
    def num_layers(self) -> int:
        """Layers that can be spread over stages."""
        return len(self._layer_starts)

    def _check_layers(self) -> None:
        """Refuse what would answer wrongly in silence: state between tokens, or a window, that no operator carries.

        Raises:
            UnsupportedModelError: Naming the layer, or the operation.
        """
        kind = self.config.model_type
        layers = self.layer_of()
        windows: dict[int, int] = {}
        for node, layer in layers.items():
            if is_attention(node):
                windows[layer] = _attention_spec(node).window
            elif node.op == "call_function" and "conv" in str(node.target):
                raise UnsupportedModelError(f"{kind}: layer {layer} mixes neighbouring tokens with {node.target}")
        text_config = self.config.get_text_config()
        types = getattr(text_config, "layer_types", None) or ["full_attention"] * self.num_layers
        for layer in range(self.num_layers):
            if layer not in windows:
                raise UnsupportedModelError(
                    f"{kind}: layer {layer} keeps its state without attention (a state-space or linear layer?); "
                    "only layers with attention can be split exactly"
                )
            expected = types[layer] if layer < len(types) else "full_attention"
            if expected not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"{kind}: layer {layer} is of type {expected!r}, which is not supported")
            if expected == "sliding_attention" and not windows[layer]:
                raise UnsupportedModelError(f"{kind}: layer {layer} has a sliding window that attention is not told of")
        wants_window = getattr(text_config, "sliding_window", None) and getattr(text_config, "use_sliding_window", True)
        if wants_window and not hasattr(text_config, "layer_types") and not any(windows.values()):
            raise UnsupportedModelError(f"{kind}: the config sets a sliding window that attention is not told of")

    @cached_property
    def aliases(self) -> dict[str, list[str]]:
        """All names of each parameter: tied weights have several, and a checkpoint may hold any one of them."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            names.setdefault(id(parameter), []).append(name)
        return {name: names[id(parameter)] for name, parameter in self.parameters.items()}

    @property
    def vocab_size(self) -> int:
        """Number of logits of each row."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The model's window in tokens, or None when its config sets none."""
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = getattr(self.config, key, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    def layer_of(self) -> dict[fx.Node, int]:
        """Return the unit of every node that computes something."""
        layers: dict[fx.Node, int] = {}
        current = 0
        for node in self.graph.graph.nodes:
            if current + 1 < self.num_layers and node is self._layer_starts[current + 1]:
                current += 1
            layers[node] = current
        return layers

    @cached_property
    def units(self) -> list[Unit]:
        """Cost of each layer, the embedding counted with the first and the head with the last."""
        return [self.cost(range(layer, layer + 1)) for layer in range(self.num_layers)]

    def cost(self, layers: range) -> Unit:
        """Return the cost of consecutive layers on one stage; a weight they share is counted once."""
        names: dict[str, bool] = {}
        for layer in layers:
            for name, is_read in self._usage[0][layer].items():
                names[name] = names.get(name, False) or is_read
        return self._unit(names, sum(self._usage[1][layer] for layer in layers))

    @cached_property
    def _usage(self) -> tuple[list[dict[str, bool]], list[int]]:
        """Parameters of each layer (whether read whole, or looked up by row), and numbers cached per token."""
        layers = self.layer_of()
        used: list[dict[str, bool]] = [{} for _ in range(self.num_layers)]
        kv = [0] * self.num_layers
        for node in self.graph.graph.nodes:
            if is_attention(node):
                kv[layers[node]] += _attention_spec(node).values_per_token
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source.target.removeprefix("model.") in self.parameters:
                    is_lookup = node.target is torch.ops.aten.embedding.default
                    name = source.target.removeprefix("model.")
                    used[layers[node]][name] = used[layers[node]].get(name, False) or not is_lookup
        return used, kv

    def _unit(self, names: dict[str, bool], kv_values: int) -> Unit:
        sizes = {name: self.parameters[name].numel() for name in names}
        width = self.dtype.itemsize
        return Unit(
            weight_bytes=sum(sizes.values()) * width,
            read_bytes=sum(size for name, size in sizes.items() if names[name]) * width,
            num_parameters=sum(sizes.values()),
            kv_values_per_token=kv_values,
        )


def checkpoint_dtype(config: Any) -> torch.dtype:
    """Return the dtype a checkpoint says its weights have, float32 when it says none."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, DTYPES.get(dtype, dtype), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def read_config(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: If it is missing or unreadable.
    """
    from transformers import AutoConfig  # transformers takes a second to import

    if not (Path(model_path) / "config.json").is_file():
        raise CheckpointError(f"{model_path}: no config.json there, so it is not a Hugging Face checkpoint directory")
    try:
        return AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{model_path}/config.json: {_first_line(error)}") from error


def build_without_weights(config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """Build the model's modules on the meta device.

    Returns:
        The model, and the real values of its buffers: they are computed by its code, not read from a checkpoint.
    """
    from accelerate import init_empty_weights  # both import transformers or torch extensions: not at start-up
    from transformers import AutoModelForCausalLM

    register_attention()
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype).eval()
    except ValueError as error:
        raise UnsupportedModelError(f"{config.model_type}: {_first_line(error)}") from error
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to("meta")
    model.tie_weights()
    return model, buffers


def trace(config: Any, dtype: torch.dtype) -> TracedModel:
    """Export the causal language model of ``config`` as one graph over a packed row of tokens.

    Raises:
        UnsupportedModelError: If the architecture cannot be expressed that way.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type}: encoder-decoder models cannot be split")
    model, buffers = build_without_weights(config, dtype)
    # Every example tensor must be distinct: export takes one tensor passed twice for a single input.
    tokens, positions = (torch.zeros((1, 16), dtype=torch.long, device="meta") for _ in range(2))
    rows = torch.zeros(3, dtype=torch.long, device="meta")
    num_tokens, num_rows = (torch.export.Dim(name, min=2, max=_MAX_DIM) for name in ("T", "R"))
    shapes = ({1: num_tokens}, {1: num_tokens}, {0: num_rows})
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                _Packed(model), (tokens, positions, rows), dynamic_shapes=shapes, strict=False
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{config.model_type}: cannot be traced: {_first_line(error)}") from error
    graph = program.module(check_guards=False)
    _clean(graph)
    return TracedModel(graph, model, config, buffers)


def _clean(graph: fx.GraphModule) -> None:
    """Drop guards, assertions and dead code; keep shapes as plain data that survives splitting."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_module" or (node.op == "call_function" and "_assert" in str(node.target)):
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    tokens = next(n for n in graph.graph.nodes if n.op == "placeholder" and n.name == "input_ids")
    symbol = tokens.meta["val"].shape[1]
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta[_SHAPE] = (tuple(_plain_dim(dim, symbol) for dim in value.shape), value.dtype)
    graph.recompile()


def _plain_dim(dim: Any, symbol: Any) -> int | str | None:
    if isinstance(dim, int):
        return dim
    return None if str(dim) == str(symbol) else str(dim)


def is_attention(node: fx.Node) -> bool:
    """Whether a node of a traced graph is an attention call."""
    return node.target is torch.ops.ts_pippy.attention.default


def _find_layers(graph: fx.GraphModule, model: torch.nn.Module) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the first node of each layer, and the first node behind the last layer."""
    lists = {f"model.{name}" for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    container = None
    for node in graph.graph.nodes:
        if is_attention(node):
            paths = [path.rsplit(".", 1)[0] for path in _module_paths(node)]
            container = next((path for path in paths if path in lists), None)
            break
    if container is None:
        raise UnsupportedModelError("no list of layers with attention was found in the traced model")
    starts: list[fx.Node] = []
    end: fx.Node | None = None
    for node in graph.graph.nodes:
        layer = _layer_index(node, container)
        if layer is None:
            end = node if starts and end is None and node.op == "call_function" else end
            continue
        end = None
        if layer == len(starts):
            starts.append(node)
        elif layer != len(starts) - 1:
            raise UnsupportedModelError(f"layers run out of order: layer {layer} after layer {len(starts) - 1}")
    return starts, end


def _module_paths(node: fx.Node) -> list[str]:
    """Return the module paths that were entered when the node was traced, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path).removeprefix("L['self'].") for path, _ in stack.values()]


def _layer_index(node: fx.Node, container: str) -> int | None:
    if node.op != "call_function":
        return None
    for path in _module_paths(node):
        if path.startswith(container + "."):
            return int(path[len(container) + 1 :].split(".")[0])
    return None


def _attention_spec(node: fx.Node) -> AttentionSpec:
    query, key, value, _, layer, scale, window, softcap = node.args

    def dim(tensor: Any, index: int) -> int:
        size = tensor.meta[_SHAPE][0][index]
        if not isinstance(size, int):
            raise UnsupportedModelError(f"attention of layer {layer}: dimension {index} is not fixed")
        return size

    return AttentionSpec(
        layer=int(layer),  # type: ignore[arg-type]
        num_heads=dim(query, 1),
        num_kv_heads=dim(key, 1),
        key_dim=dim(key, 3),
        value_dim=dim(value, 3),
        scale=float(scale),  # type: ignore[arg-type]
        window=int(window),  # type: ignore[arg-type]
        softcap=float(softcap),  # type: ignore[arg-type]
    )


def attention_specs(graph: fx.GraphModule) -> dict[fx.Node, AttentionSpec]:
    """Return every attention call of a stage, in order, with what it needs to run."""
    return {node: _attention_spec(node) for node in graph.graph.nodes if is_attention(node)}


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
    starts = [traced._layer_starts[layer] for layer in firsts]
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
    return _stage_graphs(pipe, firsts, layers_per_stage)


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


def _stage_graphs(pipe: Any, firsts: Sequence[int], layers: Sequence[int]) -> list[StageGraph]:
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
        shape, dtype = outputs[position].meta.get(_SHAPE, ((), None))
        if dtype is None or any(isinstance(dim, str) for dim in shape):
            raise UnsupportedModelError(
                f"{outputs[position].name} is needed by a later stage but is no tensor of one row per token"
            )
        values[node] = WireValue(name=names[position], shape=shape, dtype=dtype)
    return names


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
