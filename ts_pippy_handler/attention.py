"""Attention as the trace sees it: one opaque operator.

Every attention call of a Hugging Face model goes through transformers' attention interface to ``ts_pippy::attention``,
so the traced graph is a pure function of a packed row of tokens and positions. What runs in its place on a stage is
in ``cached_attention.py``.

Shapes: T rows of the batch, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ts_pippy_handler.errors import UnsupportedModelError

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
    raise NotImplementedError("ts_pippy::attention is replaced by cached attention before a stage runs")


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
