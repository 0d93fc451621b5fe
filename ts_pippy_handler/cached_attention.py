"""Attention with a cache: what runs on a stage in the place of the operator that the trace sees (``attention.py``).

A :class:`CachedAttention` owns the keys and values of its layer and reads from an :class:`AttentionPlan` which tokens
belong to which request. Several requests of any lengths share a batch; nothing is padded. Knows nothing of the
scheduler, of sampling or of the network.

Shapes: T rows of the batch, t rows of one request, H query heads, G key/value heads, R query heads of each, D head
width, S cache slots, L context length, N layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from ts_pippy_handler.attention import AttentionSpec
from ts_pippy_handler.native_attention import DecodeRows, NativeAttention, find_native_attention
from ts_pippy_handler.request import Segment


class Cache:
    """Keys and values of attention layers of one shape: a single tensor each, so that one view serves all layers.

    Memory of a CPU is only taken as slots are written.
    """

    def __init__(self, spec: AttentionSpec, num_layers: int, num_slots: int, options: dict[str, Any]) -> None:
        self.keys_NGSD = torch.empty(num_layers, spec.num_kv_heads, num_slots, spec.key_dim, **options)
        self.values_NGSD = torch.empty(num_layers, spec.num_kv_heads, num_slots, spec.value_dim, **options)


def allocate_caches(
    attentions: Sequence[CachedAttention],
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    native: bool = True,
) -> None:
    """Reserve the caches of all attention layers of a stage for ``num_slots`` tokens.

    Args:
        attentions: The layers.
        num_slots: Tokens.
        dtype: Of keys and values.
        device: Where they lie.
        native: Whether decode rows may be left to compiled code of our own, where that is faster than torch's kernels.
    """
    alike: dict[tuple[int, int, int], list[CachedAttention]] = {}
    for attention in attentions:
        spec = attention.spec
        alike.setdefault((spec.num_kv_heads, spec.key_dim, spec.value_dim), []).append(attention)
    for layers in alike.values():
        cache = Cache(layers[0].spec, len(layers), num_slots, {"dtype": dtype, "device": device})
        for index, attention in enumerate(layers):
            attention.use_cache(cache, index, _find_native(attention.spec, dtype, device) if native else None)


def _find_native(spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> NativeAttention | None:
    if spec.softcap:
        return None
    return find_native_attention(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        dtype=dtype,
        device=device,
    )


class SegmentPlan:
    """One request's part of a batch, with what its attention layers share."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.num_tokens = segment.num_tokens
        self.num_cached = segment.num_cached
        self.context_len = segment.context_len
        self._runs = segment.runs
        self._device = device
        self._first_slot = segment.runs[0][0] if segment.runs[0][1] >= segment.context_len else None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._views: dict[tuple[int, int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where the tokens of the context lie; on the CPU."""
        return torch.cat([torch.arange(first, first + count) for first, count in self._runs])[: self.context_len]

    @cached_property
    def _device_slots(self) -> torch.Tensor:
        return self.slots.to(self._device)

    def first_read(self, window: int) -> int:
        """Return the first token that any row attends to; those before are outside every row's window."""
        return max(self.num_cached + 1 - window, 0) if window else 0

    def read(self, cache: Cache, layer: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached keys and values of tokens ``first`` … ``context_len - 1``: in place for one run.

        With several runs they are gathered.

        Returns:
            Tensors of shape [1, G, context_len - first, D].
        """
        if self._first_slot is not None:
            key = (id(cache), first)
            if key not in self._views:
                # Made once for all layers: per layer, they would cost about as much as the attention of a short text.
                start, length = self._first_slot + first, self.context_len - first
                keys = cache.keys_NGSD.narrow(2, start, length).split(1)
                values = cache.values_NGSD.narrow(2, start, length).split(1)
                self._views[key] = keys, values
            keys, values = self._views[key]
            return keys[layer], values[layer]
        slots_L = self._device_slots[first:]
        return (
            cache.keys_NGSD[layer].index_select(1, slots_L)[None],
            cache.values_NGSD[layer].index_select(1, slots_L)[None],
        )

    def mask(self, first: int, window: int) -> torch.Tensor:
        """Return which of the tokens ``first`` … each row may attend to, as a bool tensor [num_tokens, L]."""
        key = (first, window)
        if key not in self._masks:
            row = torch.arange(self.num_cached, self.context_len, device=self._device)[:, None]
            column = torch.arange(first, self.context_len, device=self._device)[None]
            allowed = column <= row
            self._masks[key] = allowed & (column > row - window) if window else allowed
        return self._masks[key]


class AttentionPlan:
    """Which rows of the current batch belong to which request, and where their keys and values lie.

    One object per stage, shared by its attention layers and rewritten before each batch.
    """

    def __init__(self) -> None:
        self.segments: list[SegmentPlan] = []
        self.slots_T = torch.empty(0, dtype=torch.long)
        self._decode_rows: dict[int, DecodeRows] = {}

    @property
    def num_tokens(self) -> list[int]:
        """Rows of each request."""
        return [segment.num_tokens for segment in self.segments]

    def prepare(self, segments: Sequence[Segment], device: torch.device) -> None:
        """Describe the next batch."""
        self.segments = [SegmentPlan(segment, device) for segment in segments]
        self._decode_rows = {}
        self.slots_T = torch.cat([segment.slots[segment.num_cached :] for segment in self.segments]).to(device)

    def decode_rows(self, window: int) -> DecodeRows:
        """Return the rows of requests that have a single one, with what they attend to; the same for many layers."""
        if window not in self._decode_rows:
            starts = itertools.accumulate(self.num_tokens, initial=0)
            rows, slots = [], []
            for row, segment in zip(starts, self.segments, strict=False):
                if segment.num_tokens == 1:
                    rows.append(row)
                    slots.append(segment.slots[segment.first_read(window) :])
            self._decode_rows[window] = DecodeRows(rows, slots)
        return self._decode_rows[window]


class CachedAttention(torch.nn.Module):
    """One layer's attention over the keys and values it keeps for every running request."""

    def __init__(self, spec: AttentionSpec, plan: AttentionPlan) -> None:
        super().__init__()
        self.spec = spec
        self.plan = plan
        self._cache: Cache | None = None
        self._index = 0
        self._native: NativeAttention | None = None

    def use_cache(self, cache: Cache, index: int, native: NativeAttention | None = None) -> None:
        """Keep keys and values at ``index`` of ``cache``; leave decode rows to ``native``, if there is one."""
        self._cache, self._index, self._native = cache, index, native
        self.key_cache_GSD, self.value_cache_GSD = cache.keys_NGSD[index], cache.values_NGSD[index]

    def forward(
        self,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
        slopes_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values, attend to each request's own context.

        Returns:
            Tensor of shape [1, T, H, D], contiguous, in the dtype of the query.
        """
        self.key_cache_GSD.index_copy_(1, self.plan.slots_T, key_1GTD[0])
        self.value_cache_GSD.index_copy_(1, self.plan.slots_T, value_1GTD[0])
        if self._native is not None and sinks_H is None and slopes_H is None:
            return self._attend_natively(self._native, query_1HTD)
        pieces_tHD = [
            self._attend(segment, query_1HtD, sinks_H, slopes_H)
            for segment, query_1HtD in zip(self.plan.segments, query_1HTD.split(self.plan.num_tokens, 2), strict=True)
        ]
        return torch.cat(pieces_tHD)[None]

    def _attend_natively(self, native: NativeAttention, query_1HTD: torch.Tensor) -> torch.Tensor:
        """Attend with compiled code for decode rows and with torch's kernels for the others."""
        out_1THD = query_1HTD.new_empty(1, query_1HTD.shape[2], self.spec.num_heads, self.spec.value_dim)
        decode = self.plan.decode_rows(self.spec.window)
        if len(decode.rows):
            native.attend(query_1HTD[0], self.key_cache_GSD, self.value_cache_GSD, decode, self.spec.scale, out_1THD[0])
        start = 0
        for segment in self.plan.segments:
            stop = start + segment.num_tokens
            if segment.num_tokens > 1:
                out_1THD[0, start:stop] = self._attend(segment, query_1HTD[:, :, start:stop], None, None)
            start = stop
        return out_1THD

    @property
    def _group(self) -> int:
        """Query heads that share a key/value head."""
        return self.spec.num_heads // self.spec.num_kv_heads

    def _attend(
        self,
        segment: SegmentPlan,
        query_1HtD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        slopes_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what the rows of one request attend to, [t, H, D]."""
        assert self._cache is not None
        spec = self.spec
        first = segment.first_read(spec.window)
        key_1GLD, value_1GLD = segment.read(self._cache, self._index, first)
        bias_1HtL = None
        if slopes_H is not None:
            bias_1HtL = self._bias(segment, first, slopes_H, query_1HtD.dtype)
        is_wider = bias_1HtL is not None and bias_1HtL.dtype != query_1HtD.dtype
        if spec.softcap or sinks_H is not None or is_wider:
            mask_tL = segment.mask(first, spec.window)
            attended_1HtD = self._attend_eagerly(mask_tL, query_1HtD, key_1GLD, value_1GLD, sinks_H, bias_1HtL)
            return attended_1HtD[0].transpose(0, 1)
        if bias_1HtL is not None:
            attended_1HtD = F.scaled_dot_product_attention(
                query_1HtD, key_1GLD, value_1GLD, attn_mask=bias_1HtL, scale=spec.scale, enable_gqa=self._group > 1
            )
            return attended_1HtD[0].transpose(0, 1)
        if segment.num_tokens == 1:
            # A single row attends to everything that was read: the query heads of a group become its rows.
            query_1GRD = query_1HtD.reshape(1, spec.num_kv_heads, self._group, spec.key_dim)
            attended_1GRD = F.scaled_dot_product_attention(query_1GRD, key_1GLD, value_1GLD, scale=spec.scale)
            return attended_1GRD.reshape(1, spec.num_heads, spec.value_dim)
        causal = segment.num_cached == 0 and not 0 < spec.window < segment.num_tokens
        attended_1HtD = F.scaled_dot_product_attention(
            query_1HtD,
            key_1GLD,
            value_1GLD,
            attn_mask=None if causal else segment.mask(first, spec.window),
            is_causal=causal,
            scale=spec.scale,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )
        return attended_1HtD[0].transpose(0, 1)

    def _bias(self, segment: SegmentPlan, first: int, slopes_H: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the scores: slope times position (ALiBi), and -inf where a row may not attend.

        The product is rounded to the dtype of the slopes and, unless the bias is wide, to that of the scores, as the
        models' own code does. Position counts from the beginning of the text: what all scores of a row have in common
        does not change their softmax.
        """
        position_L = torch.arange(first, segment.context_len, device=slopes_H.device)
        bias_dtype = torch.promote_types(dtype, torch.float32) if self.spec.wide_bias else dtype
        bias_H1L = (slopes_H[:, None, None] * position_L).to(bias_dtype) * self.spec.bias_scale
        return bias_H1L.masked_fill(~segment.mask(first, self.spec.window), -torch.inf)[None]

    def _attend_eagerly(
        self,
        mask_tL: torch.Tensor,
        query_1HtD: torch.Tensor,
        key_1GLD: torch.Tensor,
        value_1GLD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        bias_1HtL: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention with capped scores, sinks or a wide bias, which torch's fused kernels do not offer.

        The softmax is computed in float32.
        """
        spec = self.spec
        group = self._group
        scores = query_1HtD @ key_1GLD.repeat_interleave(group, 1).transpose(2, 3) * spec.scale
        if spec.softcap:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if bias_1HtL is not None:
            scores = scores + bias_1HtL
        scores = scores.masked_fill(~mask_tL, torch.finfo(scores.dtype).min)
        if sinks_H is not None:
            sinks = sinks_H.reshape(1, -1, 1, 1).expand(1, spec.num_heads, scores.shape[2], 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query_1HtD.dtype)
        if sinks_H is not None:
            weights = weights[..., :-1]
        return weights @ value_1GLD.repeat_interleave(group, 1)
