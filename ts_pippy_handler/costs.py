"""What the layers of a model cost: weights, what is read of them for a token, cache, memory to compute in, and time.

:mod:`~ts_pippy_handler.tracing` takes it from a traced graph; splits are chosen by it. Plain data that can be kept
without the graph; knows no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ts_pippy_handler import step_time
from ts_pippy_handler.step_time import MIX


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
    """Bytes of parameters read to compute one token, of experts those it is sent to; an embedding row is next to
    nothing."""
    time_cost: int
    """Predicted nanoseconds for the batch :data:`~ts_pippy_handler.step_time.MIX`; only to be compared."""
    num_parameters: int
    kv_bytes_per_token: int
    doubled_bytes: int = 0
    """Those of ``weight_bytes`` that exist twice where linear layers read packed weights: a tied embedding."""
    work_bytes_per_row: int = 0
    """Most memory of intermediate values at a time, for each row of a batch."""


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
    windows: Sequence[int]
    """For each layer the tokens a row attends to at most; 0 for all."""
    num_operators: Sequence[int]
    """Operators of each layer that compute something."""
    row_shares: dict[str, float] = field(default_factory=dict)
    """Part of a parameter that one row needs, where that is not all of it: experts."""
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
        kv_values = attended = work = operators = 0
        for layer in range(start, stop):
            for name, use in self.uses[layer].items():
                uses[name] = uses.get(name, 0) | use
            kv_values += self.kv_values_per_token[layer]
            attended += self.kv_values_per_token[layer] * min(self.windows[layer] or MIX.context_len, MIX.context_len)
            work = max(work, self.work_bytes_per_row[layer])
            operators += self.num_operators[layer]
            sizes = {name: self.num_values[name] * self.value_bytes for name in uses}
            yield Unit(
                weight_bytes=sum(sizes.values()),
                read_bytes=round(sum(sizes[name] * self._row_share(name, use) for name, use in uses.items())),
                time_cost=self._time(uses, attended, operators),
                num_parameters=sum(self.num_values[name] for name in uses),
                kv_bytes_per_token=kv_values * self.value_bytes,
                doubled_bytes=sum(sizes[name] for name, use in uses.items() if use & Use.LOOKUP and use != Use.LOOKUP),
                work_bytes_per_row=work,
            )

    def _row_share(self, name: str, use: int) -> float:
        return 0.0 if use == Use.LOOKUP else self.row_shares.get(name, 1.0)

    def _time(self, uses: dict[str, int], attended: int, num_operators: int) -> int:
        """Predict the time of layers that use these parameters, and whose rows attend to so many cached values."""
        read = multiplications = 0.0
        for name, use in uses.items():
            rows = MIX.num_rows if use & Use.EVERY_ROW else MIX.answer_rows
            share = self._row_share(name, use)
            read += self.num_values[name] * step_time.touched(share, rows)
            multiplications += self.num_values[name] * share * rows
        return step_time.nanoseconds(
            read_bytes=(read + attended * MIX.answer_rows) * self.value_bytes,
            multiplications=multiplications,
            num_operators=num_operators,
        )

    def encode(self) -> bytes:
        """Return the costs as bytes."""
        return msgspec.msgpack.encode(self)


def decode_costs(data: bytes) -> LayerCosts:
    """Return what :meth:`LayerCosts.encode` wrote."""
    return msgspec.msgpack.decode(data, type=LayerCosts)
