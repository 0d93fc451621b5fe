"""Checkpoints that store weights otherwise than the model's modules hold them: other names, experts one by one.

Which tensors become which parameters is transformers' knowledge (``conversion_mapping.py``, since version 5). It is
asked once, while tracing, for the names a checkpoint has; what its operations do is recorded as a graph of torch
operators, so that a rank that loads a stage needs neither transformers nor the rest of the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ts_pippy_handler.errors import CheckpointError, one_line
from ts_pippy_handler.weights import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How some tensors of a checkpoint become parameters of the model."""

    sources: tuple[str, ...]
    """Names in the checkpoint, one for each placeholder of the graph."""
    targets: tuple[str, ...]
    """Names in the model, one for each value the graph returns."""
    graph: fx.Graph

    def check_shape(self, name: str, value: torch.Tensor, shape: Sequence[int]) -> None:
        """Check the shape of a parameter that was made.

        Raises:
            CheckpointError: If the model needs another: a source is missing, or one too many.
        """
        if value.shape != torch.Size(shape):
            raise CheckpointError(
                f"{self.sources[0]!r} and its like make a {name!r} of shape {list(value.shape)}, "
                f"the model needs {list(shape)}"
            )

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute the parameters, reading each tensor when it is first needed and forgetting it after its last use.

        Args:
            read: Returns a tensor of the checkpoint by its name.
        """
        values: dict[fx.Node, Any] = {}
        waiting = dict(zip(self.graph.find_nodes(op="placeholder"), self.sources, strict=True))

        def value(node: fx.Node) -> Any:
            if node in waiting:
                values[node] = read(waiting.pop(node))
            return values[node]

        remaining = {node: len(node.users) for node in self.graph.nodes}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), value)
            values[node] = node.target(*arguments, **keywords)
            del arguments, keywords
            for source in node.all_input_nodes:
                remaining[source] -= 1
                if not remaining[source]:
                    del values[source]
        results = self.graph.output_node().args[0]
        assert isinstance(results, (list, tuple))
        return dict(zip(self.targets, (value(node) for node in results), strict=True))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Conversions:
    """Everything a checkpoint needs to become the model."""

    renamed: dict[str, list[str]] = field(default_factory=dict)
    """Names in the checkpoint of parameters that are stored as they are, under another name."""
    converted: dict[str, Conversion] = field(default_factory=dict)
    """By each parameter that comes of it."""


class _Source(NamedTuple):
    name: str
    pattern: str


def plan(model: Any, checkpoint: Checkpoint) -> Conversions:
    """Ask transformers what becomes of the tensors of a checkpoint.

    Args:
        model: The Hugging Face model, on the meta device.
        checkpoint: Only its names and shapes are read.

    Raises:
        CheckpointError: If an operation cannot be recorded, because it looks at values.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # before version 5, models were stored as they are
        return Conversions()
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    found = Conversions()
    groups: dict[str, list[_Source]] = {}
    for name in sorted(checkpoint.names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state or target == name:
            continue
        if pattern is None:
            found.renamed.setdefault(target, []).append(name)
        else:
            groups.setdefault(target, []).append(_Source(name, pattern))
    for target, sources in groups.items():
        conversion = _record(model, checkpoint, by_pattern[sources[0].pattern], target, sources)
        found.converted.update(dict.fromkeys(conversion.targets, conversion))
    return found


def untie(model: Any, checkpoint: Checkpoint) -> None:
    """Give weights that the model ties, but the checkpoint stores each by itself, parameters of their own.

    transformers ties them only if they are equal; read from where each is stored, the answer is the same without
    comparing them, and no stage reads the other one's.

    Args:
        model: The Hugging Face model, on the meta device.
        checkpoint: Only its names are read.
    """
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        stored = [checkpoint.find([name], model.base_model_prefix) for name in (target, source)]
        if stored[0] is None or stored[1] is None or not checkpoint.is_stored_apart(stored[0], stored[1]):
            continue
        owner, _, leaf = target.rpartition(".")
        tied = model.get_parameter(target)
        own = torch.nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
        setattr(model.get_submodule(owner), leaf, own)


def check(model: Any, checkpoint: Checkpoint, conversions: Conversions) -> None:
    """Check by names and headers, before anything is traced, that a checkpoint holds what the model is made from.

    Args:
        model: The Hugging Face model, on the meta device.
        checkpoint: No values are read.
        conversions: What :func:`plan` found.

    Raises:
        CheckpointError: If a weight is missing, or of another shape or kind; transformers would guess it.
    """
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    shapes: dict[int, tuple[list[str], torch.Size]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shapes.setdefault(id(parameter), ([], parameter.shape))[0].extend([name, *conversions.renamed.get(name, ())])
    for names, shape in shapes.values():
        found = checkpoint.find(names, model.base_model_prefix)
        if found is not None:
            checkpoint.check(found, shape)
        elif not any(name in conversions.converted or _matches(ignored, name) for name in names):
            raise CheckpointError(checkpoint.where_missing(names, model.base_model_prefix))
    for each in {id(each): each for each in conversions.converted.values()}.values():
        for source in each.sources:
            checkpoint.check_dtype(source)
        made = each.run(lambda name: torch.empty(checkpoint.shape(name), device="meta"))
        for name, value in made.items():
            each.check_shape(name, value, model.get_parameter(name).shape)


def _matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(each.search(name) for each in patterns)


_OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|(^|\.)(attn|attention|self_attn|self_attention)\.(masked_)?bias$")
"""Constants of the code that old checkpoints hold: rotary frequencies, causal masks. A real bias has one axis."""


def unread(model: Any, checkpoint: Checkpoint, conversions: Conversions) -> list[str]:
    """Return the tensors of a checkpoint that no part of the model is made from, but for known harmless ones.

    Args:
        model: The Hugging Face model, on the meta device.
        checkpoint: Only its names and shapes are read.
        conversions: What :func:`plan` found.
    """
    own = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    made = {name for names in conversions.renamed.values() for name in names}
    made |= {name for each in conversions.converted.values() for name in each.sources}
    prefix = f"{model.base_model_prefix}."
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def is_known(name: str) -> bool:
        if name in made or own & {name, name.removeprefix(prefix), prefix + name}:
            return True
        is_old = _OLD_BUFFERS.search(name) is not None and (name.endswith("freq") or len(checkpoint.shape(name)) != 1)
        return is_old or _matches(ignored, name)

    return [name for name in checkpoint.names if not is_known(name)]


def _record(model: Any, checkpoint: Checkpoint, converter: Any, target: str, sources: Sequence[_Source]) -> Conversion:
    """Run a converter on tensors without values and keep the operators it calls."""
    from torch.fx.experimental.proxy_tensor import make_fx

    targets: list[str] = []

    def convert(*tensors: torch.Tensor) -> list[torch.Tensor]:
        own = copy.deepcopy(converter)
        for source, tensor in zip(sources, tensors, strict=True):
            own.add_tensor(target, source.name, source.pattern, tensor)
        made = own.convert(target, model=model, config=model.config)
        targets[:] = made
        return [each[0] if isinstance(each, list) else each for each in made.values()]

    dtype = model.state_dict()[target].dtype
    examples = [torch.empty(checkpoint.shape(source.name), dtype=dtype, device="meta") for source in sources]
    try:
        graph = make_fx(convert)(*examples).graph
    except Exception as error:
        reason = one_line(error, 200)
        raise CheckpointError(f"{sources[0].name!r} cannot be turned into {target!r}: {reason}") from error
    graph.eliminate_dead_code()
    return Conversion(sources=tuple(source.name for source in sources), targets=tuple(targets), graph=graph)
