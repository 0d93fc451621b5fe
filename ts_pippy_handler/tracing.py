"""Trace a Hugging Face causal model once, without weights.

:func:`trace` exports the model on the meta device with a dynamic number of tokens and every attention call behind
one operator; :mod:`~ts_pippy_handler.splitting` cuts the graph into stages. Knows nothing of weights on disk, of
ranks, or of how a stage is run.

Source: ``torch.export``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ts_pippy_handler import conversion, experts, model_config, own_attention
from ts_pippy_handler.attention import ATTENTION_NAME, AttentionSpec, register_attention
from ts_pippy_handler.config import DTYPES
from ts_pippy_handler.conversion import Conversions
from ts_pippy_handler.costs import LayerCosts, Use
from ts_pippy_handler.errors import CheckpointError, UnsupportedModelError, one_line
from ts_pippy_handler.liveness import live_bytes, viewed
from ts_pippy_handler.weights import Checkpoint

INPUT_NAMES = ("input_ids", "position_ids", "logit_rows")
"""Inputs of the traced graph: tokens [1, T], their positions [1, T], and the rows [R] whose logits are wanted."""

SHAPE = "ts_pippy_shape"
"""Key of ``node.meta``: (shape with None for T, dtype), plain data that survives splitting."""
_MAX_DIM = 1 << 24
_COUNTS = "{} counts positions itself ({}) instead of taking them, so requests cannot share a batch"
_COUNTING = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)


class _Packed(torch.nn.Module):
    """The traced callable: a packed row of tokens in, logits [R, vocabulary] of the wanted rows out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_rows)
        logits: torch.Tensor = output.logits[0]
        return logits


class TracedModel:
    """The graph of the whole model with what the split needs to know of it."""

    def __init__(
        self, graph: fx.GraphModule, model: torch.nn.Module, config: Any, buffers: dict[str, torch.Tensor]
    ) -> None:
        self.graph = graph
        self.model = model
        """The Hugging Face model, without weights."""
        self.config = config
        self.conversions = Conversions()
        """What the checkpoint stores otherwise; nothing, unless it was asked (:meth:`ask_checkpoint`)."""
        self.unread: list[str] = []
        """Tensors of the checkpoint that nothing reads, if it was asked."""
        self.buffers = buffers
        """Values of buffers as the model's own code computes them, by model name."""
        self.dtype: torch.dtype = model.dtype  # type: ignore[assignment]
        self.base_model_prefix = str(getattr(model, "base_model_prefix", ""))
        self.persistent_buffers = set(model.state_dict()) & set(buffers)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.layer_starts = _find_layers(graph, model)
        self._check_layers()
        _check_positions(graph, config.model_type)

    @property
    def num_layers(self) -> int:
        """Layers that can be spread over stages."""
        return len(self.layer_starts)

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
                windows[layer] = attention_spec(node).window
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
            if windows[layer] == 1:
                # Its cache keeps the last "window - 1" tokens as [-0:], which is all of them.
                raise UnsupportedModelError(
                    f"{kind}: layer {layer} has a sliding window of 1 token, for which transformers itself gives other "
                    "answers with its cache than without"
                )
            expected = types[layer] if layer < len(types) else "full_attention"
            if expected not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"{kind}: layer {layer} is of type {expected!r}, which is not supported")
            if expected == "sliding_attention" and not windows[layer]:
                raise UnsupportedModelError(f"{kind}: layer {layer} has a sliding window that attention is not told of")
        wants_window = getattr(text_config, "sliding_window", None) and getattr(text_config, "use_sliding_window", True)
        if wants_window and not hasattr(text_config, "layer_types") and not any(windows.values()):
            raise UnsupportedModelError(f"{kind}: the config sets a sliding window that attention is not told of")

    def ask_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Find out what a checkpoint stores under other names or in other shapes, and what of it nothing reads.

        Raises:
            CheckpointError: If one cannot be converted.
        """
        self.conversions = conversion.plan(self.model, checkpoint)
        self.unread = conversion.unread(self.model, checkpoint, self.conversions)

    @property
    def aliases(self) -> dict[str, list[str]]:
        """All names of each parameter and saved buffer: a checkpoint may hold any one. Tied weights have several."""
        renamed = self.conversions.renamed
        names: dict[int, list[str]] = {}
        for name, parameter in self.parameters.items():
            names.setdefault(id(parameter), []).extend([name, *renamed.get(name, ())])
        of_buffers = {name: [name, *renamed.get(name, ())] for name in self.persistent_buffers}
        return of_buffers | {name: names[id(parameter)] for name, parameter in self.parameters.items()}

    @property
    def vocab_size(self) -> int:
        """Number of logits of each row."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The model's window in tokens, or None when its config sets none.

        Where rotary frequencies change beyond the length the model was trained for, the window ends there.
        """
        configs = (self.config, self.config.get_text_config())
        values = (getattr(config, key, None) for config in configs for key in model_config.WINDOW_KEYS)
        windows = [value for value in values if isinstance(value, int) and value > 0][:1]
        return min([*windows, *(length for config in configs for length in _trained_positions(config))], default=None)

    def layer_of(self) -> dict[fx.Node, int]:
        """Return the unit of every node that computes something."""
        layers: dict[fx.Node, int] = {}
        current = 0
        for node in self.graph.graph.nodes:
            if current + 1 < self.num_layers and node is self.layer_starts[current + 1]:
                current += 1
            layers[node] = current
        return layers

    @cached_property
    def costs(self) -> LayerCosts:
        """What each layer costs, the embedding counted with the first and the head with the last."""
        layers = self.layer_of()
        of_logits = _following(self.graph, "logit_rows")
        uses: list[dict[str, int]] = [{} for _ in range(self.num_layers)]
        kv, windows, operators = ([0] * self.num_layers for _ in range(3))
        shares: dict[str, float] = {}
        for node in self.graph.graph.nodes:
            operators[layers[node]] += _num_operators(node)
            if is_attention(node):
                spec = attention_spec(node)
                kv[layers[node]] += spec.values_per_token
                windows[layers[node]] = spec.window
            elif (choice := experts.choice(node)) is not None:
                shares[choice.parameter.removeprefix("model.")] = choice.row_share
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source.target.removeprefix("model.") in self.parameters:
                    use = Use.LOOKUP if node.target is torch.ops.aten.embedding.default else Use.EVERY_ROW
                    use = Use.LOGIT_ROWS if node in of_logits else use
                    name = source.target.removeprefix("model.")
                    uses[layers[node]][name] = uses[layers[node]].get(name, 0) | use
        work = [0] * self.num_layers
        for node, num_bytes in live_bytes(self.graph.graph).items():
            work[layers[node]] = max(work[layers[node]], num_bytes)
        return LayerCosts(
            uses=uses,
            num_values={name: self.parameters[name].numel() for layer in uses for name in layer},
            value_bytes=self.dtype.itemsize,
            kv_values_per_token=kv,
            work_bytes_per_row=work,
            windows=windows,
            num_operators=operators,
            row_shares=shares,
            max_positions=self.max_positions,
        )


def _num_operators(node: fx.Node) -> int:
    """Return how many operators start for a node: none for a view, one for each expert."""
    if node.op != "call_function" or viewed(node) is not None or node.target is torch.ops.aten.sym_size.int:
        return 0
    choice = experts.choice(node)
    return 1 if choice is None else choice.num_experts


def checkpoint_dtype(config: Any) -> torch.dtype:
    """Return the dtype a checkpoint says its weights have, float32 when it says none."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, DTYPES.get(dtype, dtype), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def build_without_weights(config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """Build the model's modules on the meta device.

    Returns:
        The model, and the real values of its buffers: they are computed by its code, not read from a checkpoint.
    """
    from accelerate import init_empty_weights  # both import transformers or torch extensions: not at start-up
    from transformers import AutoModelForCausalLM

    register_attention()
    own_attention.let_be_built(config.model_type)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype).eval()
    except ValueError as error:
        raise UnsupportedModelError(f"{config.model_type}: {one_line(error)}") from error
    except Exception as error:
        reason = model_config.reason(error, config.to_dict())
        file = f"{config.name_or_path}/config.json" if config.name_or_path else "config.json"
        raise CheckpointError(f"{file}: transformers cannot build a {config.model_type} from it: {reason}") from error
    own_attention.lead_to_operator(model)
    _fix_rotary_frequencies(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to("meta")
    model.tie_weights()
    return model, buffers


def _fix_rotary_frequencies(model: torch.nn.Module) -> None:
    """Keep rotary frequencies as they are up to the length the model was trained for.

    The types ``dynamic`` and ``longrope`` choose them anew for longer texts, from the longest text of a batch: in a
    packed row that of another request. Up to that length they are constant, and :attr:`TracedModel.max_positions` lets
    no text grow longer.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(kinds)  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(kind) for layer, kind in kinds.items()}  # type: ignore[assignment]


def _fixed(rope_type: str) -> str:
    return "default" if "dynamic" in rope_type or rope_type == "longrope" else rope_type


def _trained_positions(config: Any) -> list[int]:
    """Return the lengths beyond which rotary embeddings of type ``longrope`` change."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    found = [each for each in per_layer_type if each.get("rope_type") == "longrope"]
    lengths = [each.get("original_max_position_embeddings") for each in found]
    return [length for length in lengths if isinstance(length, int)]


@dataclass(kw_only=True)
class Untraced:
    """A Hugging Face model without weights, which its checkpoint has been found to hold."""

    model: Any
    config: Any
    buffers: dict[str, torch.Tensor]
    """Values of buffers as the model's own code computes them."""
    conversions: Conversions = field(default_factory=Conversions)
    unread: list[str] = field(default_factory=list)

    def trace(self) -> TracedModel:
        """Export the model as one graph over a packed row of tokens.

        Raises:
            UnsupportedModelError: If the architecture cannot be expressed that way.
        """
        kind = self.config.model_type
        # Every example tensor must be distinct: export takes one tensor passed twice for a single input.
        tokens, positions = (torch.zeros((1, 16), dtype=torch.long, device="meta") for _ in range(2))
        rows = torch.zeros(3, dtype=torch.long, device="meta")
        num_tokens, num_rows = (torch.export.Dim(name, min=2, max=_MAX_DIM) for name in ("T", "R"))
        shapes = ({1: num_tokens}, {1: num_tokens}, {0: num_rows})
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = torch.export.export(
                    _Packed(self.model), (tokens, positions, rows), dynamic_shapes=shapes, strict=False
                )
        except UnsupportedModelError:
            raise
        except Exception as error:
            reason = one_line(error)
            if reason.startswith("Constraints violated"):
                reason = "its code treats texts of different lengths differently, as state-space and chunked layers do"
            raise UnsupportedModelError(f"{kind}: cannot be traced: {reason}") from error
        graph = program.module(check_guards=False)
        _clean(graph)
        traced = TracedModel(graph, self.model, self.config, self.buffers)
        traced.conversions, traced.unread = self.conversions, self.unread
        return traced


def build(config: Any, dtype: torch.dtype, checkpoint: Checkpoint | None = None) -> Untraced:
    """Build the causal language model of ``config``, and check that a checkpoint holds its weights.

    Args:
        config: Of transformers.
        dtype: Of the weights.
        checkpoint: What will be loaded, which may hold two copies of a weight that the model ties.

    Raises:
        CheckpointError: If the checkpoint does not hold the model's weights.
        UnsupportedModelError: If it is no plain causal language model.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{config.model_type}: encoder-decoder models cannot be split")
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{config.model_type}: the checkpoint is quantised ({str(method)[:60]}); "
            "only float32, float16 and bfloat16 weights can be served"
        )
    model, buffers = build_without_weights(config, dtype)
    untraced = Untraced(model=model, config=config, buffers=buffers)
    if checkpoint is not None:
        conversion.untie(model, checkpoint)
        untraced.conversions = conversion.plan(model, checkpoint)
        conversion.check(model, checkpoint, untraced.conversions)
        untraced.unread = conversion.unread(model, checkpoint, untraced.conversions)
    return untraced


def trace(config: Any, dtype: torch.dtype, checkpoint: Checkpoint | None = None) -> TracedModel:
    """Build a model and trace it, as :func:`build` and :meth:`Untraced.trace`."""
    return build(config, dtype, checkpoint).trace()


def _clean(graph: fx.GraphModule) -> None:
    """Drop guards, assertions and dead code; keep shapes as plain data that survives splitting."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_module" or (node.op == "call_function" and "_assert" in str(node.target)):
            graph.graph.erase_node(node)
    experts.use_own_operator(graph)
    graph.graph.eliminate_dead_code()
    tokens, _, rows = graph.graph.find_nodes(op="placeholder")
    if not rows.users:  # the model does not know ``logits_to_keep`` and computes the logits of all rows
        output = graph.graph.output_node()
        [logits] = output.all_input_nodes
        with graph.graph.inserting_before(output):
            kept = graph.graph.call_function(torch.ops.aten.index_select.default, (logits, 0, rows))
        output.replace_input_with(logits, kept)
    symbol = tokens.meta["val"].shape[1]
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta[SHAPE] = (tuple(_plain_dim(dim, symbol) for dim in value.shape), value.dtype)
    graph.recompile()


def _following(graph: fx.GraphModule, placeholder: str) -> set[fx.Node]:
    """Return the nodes whose value follows from an input."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if (node.op == "placeholder" and node.name == placeholder) or any(
            each in found for each in node.all_input_nodes
        ):
            found.add(node)
    return found


def _check_positions(graph: fx.GraphModule, kind: str) -> None:
    """Refuse a model that counts positions itself: in a packed row they would run through all requests.

    Row numbers may serve to sort and gather rows; they must not be looked up in a table of the model, nor become
    numbers to compute with.

    Raises:
        UnsupportedModelError: Naming the operation.
    """
    counted: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_attention(node):
            continue
        depends_on_length = any(isinstance(each, fx.Node) for each in node.args[1:])
        if node.target is torch.ops.aten.slice.Tensor and depends_on_length and _is_table(node.args[0]):
            raise UnsupportedModelError(_COUNTS.format(kind, node.name))
        if node.target in _COUNTING and (depends_on_length or isinstance(node.args[0], fx.Node)):
            counted.add(node)
            continue
        used = [each for each in node.all_input_nodes if each in counted]
        if not used:
            continue
        tables = [each for each in node.all_input_nodes if _is_table(each)]
        _, dtype = node.meta.get(SHAPE, ((), None))
        if tables or (dtype is not None and dtype.is_floating_point and used == node.all_input_nodes):
            raise UnsupportedModelError(_COUNTS.format(kind, node.name))
        if dtype is not None and not dtype.is_floating_point:
            counted.add(node)


def _is_table(value: object) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _plain_dim(dim: Any, symbol: Any) -> int | str | None:
    if isinstance(dim, int):
        return dim
    return None if str(dim) == str(symbol) else str(dim)


def is_attention(node: fx.Node) -> bool:
    """Whether a node of a traced graph is an attention call."""
    return node.target is torch.ops.ts_pippy.attention.default


def _find_layers(graph: fx.GraphModule, model: torch.nn.Module) -> list[fx.Node]:
    """Return the first node of each layer."""
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
    for node in graph.graph.nodes:
        layer = _layer_index(node, container)
        if layer is None:
            continue
        if layer == len(starts):
            starts.append(node)
        elif layer != len(starts) - 1:
            raise UnsupportedModelError(f"layers run out of order: layer {layer} after layer {len(starts) - 1}")
    return starts


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


def attention_spec(node: fx.Node) -> AttentionSpec:
    """Return what an attention call needs to run."""
    query, key, value, _, _, layer, scale, window, softcap, bias_scale, wide_bias = node.args

    def dim(tensor: Any, index: int) -> int:
        size = tensor.meta[SHAPE][0][index]
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
        bias_scale=float(bias_scale),  # type: ignore[arg-type]
        wide_bias=bool(wide_bias),
    )
