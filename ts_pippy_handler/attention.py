"""Attention with a cache: the operator the trace sees, and the module that runs in its place on a stage.

Tracing: every attention call of a Hugging Face model goes through transformers' attention interface to one opaque
operator, ``ts_pippy::attention``, so the traced graph is a pure function of a packed row of tokens and positions.
Running: each operator call is replaced by a :class:`CachedAttention` that owns the keys and values of its layer and
reads from an :class:`AttentionPlan` which tokens belong to which request. Several requests of any lengths share a
batch; nothing is padded. Knows nothing of the scheduler, of sampling or of the network.

Shapes: T rows of the batch, H query heads, G key/value heads, R query heads of each, D head width, S cache slots,
L context length, N layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ts_pippy_handler.errors import UnsupportedModelError
from ts_pippy_handler.request import Segment

ATTENTION_NAME = "ts_pippy"
"""Name under which the operator is registered with transformers."""

NUM_TENSORS = 5
"""Leading arguments of the operator that are tensors, or None; the others are the same for every batch."""

# Arguments of transformers' attention functions that do not change what our operator computes: the attention mask
# and the cache are ours, and positions are already in the queries and keys.
_IGNORED_ARGUMENTS = frozenset(
    "dropout position_ids position_embeddings cache_position use_cache output_attentions is_causal cache "
    "past_key_values output_hidden_states output_router_logits return_dict logits_to_keep layer_type "
    "num_items_in_batch".split()
)


@torch.library.custom_op("ts_pippy::attention", mutates_args=())
def attention_op(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    slopes_H: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    bias_scale: float,
    wide_bias: bool,
) -> torch.Tensor:
    """Stand for one attention call in a traced graph; stages replace it before anything runs."""
    raise NotImplementedError("ts_pippy::attention is replaced by CachedAttention before a stage runs")


@attention_op.register_fake
def _attention_shape(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    sinks_H: torch.Tensor | None,
    slopes_H: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    bias_scale: float,
    wide_bias: bool,
) -> torch.Tensor:
    return like_attended(query_1HTD, value_1GTD)


def like_attended(query_1HTD: torch.Tensor, value_1GTD: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor [1, T, H, D] like what attention makes of these."""
    _, heads, rows, _ = query_1HTD.shape
    return query_1HTD.new_empty(1, rows, heads, value_1GTD.shape[3])


def _route(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: hand the call to the operator, or refuse what it cannot express."""
    for name, value_given in arguments.items():
        if value_given is not None and name not in _IGNORED_ARGUMENTS:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to attention, which pipeline stages do not support yet"
            )
    if attention_mask is not None:
        raise UnsupportedModelError(f"{type(module).__name__} builds an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{type(module).__name__} is not causal; only causal language models can be split")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{type(module).__name__} does not know its layer index")
    scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
    window = int(sliding_window or 0)
    return attention_op(query, key, value, s_aux, None, layer, scale, window, float(softcap or 0.0), 1.0, False), None


def register_attention() -> None:
    """Make ``attn_implementation="ts_pippy"`` known to transformers. Safe to call again."""
    # Imported here: transformers takes a second to import, and TorchServe gives a worker 30 s to open its socket.
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _route)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def _mask(*args: object, config: Any = None, **kwargs: object) -> torch.Tensor | None:
    """Transformers' mask interface: no mask, but for MPT, which asks for one that nothing reads."""
    return torch.ones((), dtype=torch.bool) if getattr(config, "model_type", None) == "mpt" else None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one attention layer needs to run: read off the traced operator call."""

    layer: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int
    """Tokens a row attends to, itself included; 0 for all."""
    softcap: float
    """Bound of ``softcap * tanh(score / softcap)``; 0 for none."""
    bias_scale: float = 1.0
    """Factor of the linear bias ``slope * position`` (ALiBi), where a layer has slopes."""
    wide_bias: bool = False
    """Whether the bias stays float32, and so do the scores it is added to, when the model computes in less."""

    @property
    def values_per_token(self) -> int:
        """Numbers cached for each token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class Cache:
    """Keys and values of attention layers of one shape: a single tensor each, so that one view serves all layers.

    Memory of a CPU is only taken as slots are written.
    """

    def __init__(self, spec: AttentionSpec, num_layers: int, num_slots: int, options: dict[str, Any]) -> None:
        self.keys_NGSD = torch.empty(num_layers, spec.num_kv_heads, num_slots, spec.key_dim, **options)
        self.values_NGSD = torch.empty(num_layers, spec.num_kv_heads, num_slots, spec.value_dim, **options)


def allocate_caches(
    attentions: Sequence[CachedAttention], num_slots: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Reserve the caches of all attention layers of a stage for ``num_slots`` tokens."""
    alike: dict[tuple[int, int, int], list[CachedAttention]] = {}
    for attention in attentions:
        spec = attention.spec
        alike.setdefault((spec.num_kv_heads, spec.key_dim, spec.value_dim), []).append(attention)
    for layers in alike.values():
        cache = Cache(layers[0].spec, len(layers), num_slots, {"dtype": dtype, "device": device})
        for index, attention in enumerate(layers):
            attention.use_cache(cache, index)


class SegmentPlan:
    """One request's part of a batch, with what its attention layers share."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.num_tokens = segment.num_tokens
        self.num_cached = segment.num_cached
        self.context_len = segment.context_len
        self._device = device
        self._first_slot = segment.runs[0][0] if segment.runs[0][1] >= segment.context_len else None
        self.slots_L = None if self._first_slot is not None else self._all_slots(segment)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._views: dict[tuple[int, int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}

    def _all_slots(self, segment: Segment) -> torch.Tensor:
        pieces = [torch.arange(first, first + count) for first, count in segment.runs]
        return torch.cat(pieces)[: segment.context_len].to(self._device)

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
        assert self.slots_L is not None
        slots_L = self.slots_L[first:]
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

    def prepare(self, segments: Sequence[Segment], device: torch.device) -> None:
        """Describe the next batch."""
        self.segments = []
        slots: list[int] = []
        for segment in segments:
            self.segments.append(SegmentPlan(segment, device))
            slots += _new_slots(segment)
        self.slots_T = torch.tensor(slots, dtype=torch.long, device=device)


def _new_slots(segment: Segment) -> list[int]:
    """Return the slots of the segment's own tokens: logical positions num_cached … context_len - 1."""
    slots: list[int] = []
    skipped = 0
    for first, count in segment.runs:
        start = max(segment.num_cached - skipped, 0)
        stop = min(segment.context_len - skipped, count)
        slots.extend(range(first + start, first + stop))
        skipped += count
    return slots


class CachedAttention(torch.nn.Module):
    """One layer's attention over the keys and values it keeps for every running request."""

    def __init__(self, spec: AttentionSpec, plan: AttentionPlan) -> None:
        super().__init__()
        self.spec = spec
        self.plan = plan
        self._cache: Cache | None = None
        self._index = 0

    def use_cache(self, cache: Cache, index: int) -> None:
        """Keep keys and values at ``index`` of ``cache``."""
        self._cache, self._index = cache, index
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
        queries_1HtD = query_1HTD.split([segment.num_tokens for segment in self.plan.segments], 2)
        pieces_tHD = [
            self._attend(segment, query_1HtD, sinks_H, slopes_H)
            for segment, query_1HtD in zip(self.plan.segments, queries_1HtD, strict=True)
        ]
        return torch.cat(pieces_tHD)[None]

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
        # Tokens before this one are outside every row's window, so they need not be read.
        first = max(segment.num_cached + 1 - spec.window, 0) if spec.window else 0
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
