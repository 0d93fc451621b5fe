"""Where each weight of a stage comes from: a tensor of the checkpoint, or several that become it.

A parameter has several names where weights are tied or architectures were renamed, and a checkpoint may store it in
parts. Knows no devices and no packing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ts_pippy_handler.conversion import Conversion
from ts_pippy_handler.errors import CheckpointError
from ts_pippy_handler.graph_data import ModelFacts
from ts_pippy_handler.splitting import StageGraph
from ts_pippy_handler.tracing import TracedModel
from ts_pippy_handler.weights import Checkpoint


class WeightSource:
    """Reads one parameter.

    Args:
        name: Of the parameter, in the Hugging Face model.
        facts: All names of the model's weights, and what they may be made from.
        checkpoint: Where they are.
        template: Shape and dtype that the stage needs.

    Raises:
        CheckpointError: If the tensor is missing or of another shape.
    """

    def __init__(
        self,
        name: str,
        facts: ModelFacts | TracedModel,
        checkpoint: Checkpoint,
        template: torch.Tensor,
    ) -> None:
        self._checkpoint = checkpoint
        self._converted: torch.Tensor | None = None
        self._place = _locate(name, facts, checkpoint)
        conversion = self._place.conversion
        if conversion is None:
            checkpoint.check(self._place.name, template.shape)
            return
        self._converted = conversion.run(lambda each: self._read(each, template.dtype))[self._place.name]
        conversion.check_shape(name, self._converted, template.shape)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        value = torch.empty(self._checkpoint.shape(name), dtype=dtype)
        self._checkpoint.read_into(name, value)
        return value

    def read_into(self, target: torch.Tensor, rows: slice | None = None) -> None:
        """Copy the value, or some of its rows."""
        if self._converted is not None:
            target.copy_(self._converted if rows is None else self._converted[rows])
        else:
            self._checkpoint.read_into(self._place.name, target, rows)


@dataclass(frozen=True)
class _Place:
    name: str
    """Of the tensor in the checkpoint, or of what the conversion makes."""
    conversion: Conversion | None


def _locate(name: str, facts: ModelFacts | TracedModel, checkpoint: Checkpoint) -> _Place:
    names = facts.aliases.get(name, [name])
    if (found := checkpoint.find_equal(names, facts.base_model_prefix)) is not None:
        return _Place(found, None)
    for target in names:
        if (conversion := facts.conversions.converted.get(target)) is not None:
            return _Place(target, conversion)
    raise CheckpointError(checkpoint.where_missing(names, facts.base_model_prefix))


def find_buffer(name: str, facts: ModelFacts | TracedModel, checkpoint: Checkpoint) -> str | None:
    """Return the tensor of a checkpoint that a buffer is saved as; None if it is computed instead."""
    if name not in facts.persistent_buffers:
        return None
    return checkpoint.find(facts.aliases[name], facts.base_model_prefix)


def needed_tensors(graph: StageGraph, facts: ModelFacts, checkpoint: Checkpoint) -> list[str]:
    """Return the tensors of a checkpoint that a stage is made from, in the order they are read.

    Raises:
        CheckpointError: If one is missing, or two that should be equal differ.
    """
    needed: list[str] = []
    for key, _ in graph.module.named_parameters():
        place = _locate(graph.tensors.get(key, key), facts, checkpoint)
        needed += [place.name] if place.conversion is None else place.conversion.sources
    for key, _ in graph.module.named_buffers():
        found = find_buffer(graph.tensors.get(key, key), facts, checkpoint)
        needed += [found] if found is not None else []
    return list(dict.fromkeys(needed))
