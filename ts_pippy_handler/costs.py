"""What the layers of a model cost: weights, what is read of them for a token, cache, and memory to compute in.

:mod:`~ts_pippy_handler.tracing` takes it from a traced graph; splits are chosen by it. Plain data that can be kept
without the graph; knows no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec


class Use(enum.IntFlag):
    """How a parameter is read; several of them for a tied embedding."""

    LOOKUP = 1
    """By row, as an embedding."""
    LOGIT_ROWS = 2
    """Whole, for the rows whose logits are wanted."""
    EVERY_ROW = 4


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What consecutive layers cost together (the first of a model with the embedding, the last with the head)."""

    weight_bytes: int
    """Memory of the parameters."""
    read_bytes: int
    """Bytes of parameters read to compute one token; an embedding row is next to nothing."""
    head_bytes: int
    """Those of ``read_bytes`` that are read only where logits are wanted: the head's."""
    num_parameters: int
    kv_bytes_per_token: int
    doubled_bytes: int = 0
    """Those of ``weight_bytes`` that exist twice where linear layers read packed weights: a tied embedding."""
    work_bytes_per_row: int = 0
    """Most memory of intermediate values at a time, for each row of a batch."""

    @property
    def time_cost(self) -> int:
        """What a stage's time per token is proportional to, where logits are wanted of every other token.

        Prompt tokens need none but for the last. Counting the head in full would leave its stage idle while prompts
        are computed, and counting it not at all while answers are.
        """
        return self.read_bytes - self.head_bytes // 2


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The costs of a whole model, from which those of any consecutive layers follow."""

    uses: Sequence[dict[str, int]]
    """For each layer its parameters by name, with how they are read (:class:`Use`)."""
    num_values: dict[str, int]
    """Numbers in each parameter."""
    value_bytes: int
    """Of a number, of parameters and cache alike."""
    kv_values_per_token: Sequence[int]
    """For each layer."""
    work_bytes_per_row: Sequence[int]
    """For each layer, with what later layers need of earlier ones."""
    max_positions: int | None = None
    """The model's window in tokens, if it has one."""

    @property
    def num_layers(self) -> int:
        """Layers that can be spread over stages."""
        return len(self.uses)

    @cached_property
    def units(self) -> list[Unit]:
        """Cost of each layer."""
        return [self.cost(range(layer, layer + 1)) for layer in range(self.num_layers)]

    def cost(self, layers: range) -> Unit:
        """Return the cost of consecutive layers on one stage; a weight they share is counted once."""
        *_, unit = self.growing(layers.start, layers.stop)
        return unit

    def growing(self, start: int, stop: int) -> Iterator[Unit]:
        """Yield the costs of the layers ``start`` … ``end`` for each ``end`` before ``stop``."""
        uses: dict[str, int] = {}
        kv_values = work = 0
        for layer in range(start, stop):
            for name, use in self.uses[layer].items():
                uses[name] = uses.get(name, 0) | use
            kv_values += self.kv_values_per_token[layer]
            work = max(work, self.work_bytes_per_row[layer])
            yield self._unit(uses, kv_values, work)

    def _unit(self, uses: dict[str, int], kv_values: int, work: int) -> Unit:
        sizes = {name: self.num_values[name] * self.value_bytes for name in uses}
        of_head = {name for name, use in uses.items() if use & Use.LOGIT_ROWS and not use & Use.EVERY_ROW}
        return Unit(
            weight_bytes=sum(sizes.values()),
            read_bytes=sum(size for name, size in sizes.items() if uses[name] != Use.LOOKUP),
            head_bytes=sum(sizes[name] for name in of_head),
            num_parameters=sum(self.num_values[name] for name in uses),
            kv_bytes_per_token=kv_values * self.value_bytes,
            doubled_bytes=sum(sizes[name] for name, use in uses.items() if use & Use.LOOKUP and use != Use.LOOKUP),
            work_bytes_per_row=work,
        )

    def encode(self) -> bytes:
        """Return the costs as bytes."""
        return msgspec.msgpack.encode(self)


def decode_costs(data: bytes) -> LayerCosts:
    """Return what :meth:`LayerCosts.encode` wrote."""
    return msgspec.msgpack.decode(data, type=LayerCosts)
