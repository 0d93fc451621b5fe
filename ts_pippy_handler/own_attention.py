"""Architectures whose attention does not go through transformers' attention interface, led to our operator.

Each function here takes the place of one attention module's ``forward``: it computes queries, keys and values as the
module does, calls the operator, and finishes as the module does. What an architecture does differently is written
down next to it; a table of positions is among that. Used while tracing only; knows nothing of stages.

Source: transformers 5.24 and 5.25, ``models/{bloom,falcon,gpt_neo,mpt,openai,xglm}/modeling_*.py``.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ts_pippy_handler.attention import ATTENTION_NAME, attention_op
from ts_pippy_handler.errors import UnsupportedModelError

_TESTED = "5.24 and 5.25"
_SLOPES = "ts_pippy_slopes"  # a buffer of the attention module: its value travels with the trace like any other


def let_be_built(model_type: str) -> None:
    """Let a model be built with our attention, where its code looks the module up by the name of the attention.

    Raises:
        UnsupportedModelError: If the installed transformers has not the parts of the model that this module replaces.
    """
    with _known_parts(model_type):
        _let_be_built(model_type)


def _let_be_built(model_type: str) -> None:
    if model_type == "gpt_neo":
        from transformers.models.gpt_neo import modeling_gpt_neo

        modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES[ATTENTION_NAME] = modeling_gpt_neo.GPTNeoSelfAttention
    elif model_type == "falcon":
        from transformers.models.falcon import modeling_falcon

        # Up to transformers 5.24; later ones have one class for every attention.
        classes = getattr(modeling_falcon, "FALCON_ATTENTION_CLASSES", None)
        if classes is not None:
            classes[ATTENTION_NAME] = modeling_falcon.FalconAttention


def lead_to_operator(model: torch.nn.Module) -> None:
    """Replace the attention of the architectures of this module; others are left as they are.

    Raises:
        UnsupportedModelError: If the installed transformers has not the parts of the model that this module replaces.
    """
    model_type = str(getattr(model.config, "model_type", None))
    with _known_parts(model_type):
        _lead_to_operator(model, model_type)


@contextlib.contextmanager
def _known_parts(model_type: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError, KeyError) as error:
        import transformers

        raise UnsupportedModelError(
            f"{model_type}: its attention is adapted to transformers {_TESTED}, and in the installed "
            f"{transformers.__version__} a part of it is missing ({error}); install one of the former"
        ) from error


def _lead_to_operator(model: torch.nn.Module, model_type: str) -> None:
    if model_type == "openai-gpt":
        for layer, block in enumerate(model.transformer.h):  # type: ignore[union-attr, arg-type]
            block.attn.layer_idx = layer
    elif model_type == "falcon":
        # The bias is ours to add; from transformers 5.25 on the model adds it to the mask, which a trace has none of.
        model.transformer.use_alibi = False  # type: ignore[union-attr]
    for module in model.modules():
        file = type(module).__module__.rpartition(".")[2]
        prepared = _ADAPTERS.get(f"{file}.{type(module).__name__}")
        if prepared is not None:
            module.forward = types.MethodType(prepared(module), module)


def _bloom(module: Any) -> Callable[..., Any]:
    """BLOOM: the bias is slope times position, added after scaling."""
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    _add_slopes(module, _get_alibi_slopes(module.num_heads, torch.device("cpu")))

    def forward(
        self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        attended = _attend(self, self.layer_idx, query, key, value, self.inv_norm_factor)
        return residual + self.dense(attended), None

    return forward


def _falcon(module: Any) -> Callable[..., Any]:
    """Falcon: rotary positions, or a bias whose product is rounded to bfloat16 and scaled with the scores."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

    if module.config.alibi:
        # The bias at position 1 is the slope itself.
        bias_H1L = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), module.num_heads, torch.bfloat16)
        _add_slopes(module, bias_H1L[:, 0, 1])

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed = self.query_key_value(hidden_states)
        if self.new_decoder_architecture:
            # As the module does, without repeating each key and value for all the queries of its group.
            mixed = mixed.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
            heads = mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]
        elif self.multi_query:
            mixed = mixed.unflatten(-1, (self.num_heads + 2, self.head_dim))
            heads = mixed[..., :-2, :], mixed[..., -2:-1, :], mixed[..., -1:, :]
        else:
            heads = mixed.unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        query, key, value = (each.transpose(1, 2) for each in heads)
        if not self.config.alibi:
            assert position_embeddings is not None
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        scale = 1 / math.sqrt(self.head_dim)
        attended = _attend(self, self.layer_idx, query, key, value, scale, bias_scale=scale)
        return self.dense(attended), None

    return forward


def _gpt_neo(module: Any) -> Callable[..., Any]:
    """GPT-Neo: scores are not scaled; every other layer has a window."""
    window = module.config.window_size if module.attention_type == "local" else 0
    # A square of the model's window for each layer, which only its own attention reads.
    del module.bias

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (
            self._split_heads(projection(hidden_states), self.num_heads, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = _attend(self, self.layer_id, query, key, value, 1.0, window=window)
        return self.out_proj(attended), None

    return forward


def _mpt(module: Any) -> Callable[..., Any]:
    """MPT: as BLOOM, with other slopes, a bias that stays float32, and the three projections side by side."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    # MPT's bias counts back from 0 at the last position, so at the one before it is minus the slope.
    _add_slopes(module, -build_mpt_alibi_tensor(module.n_heads, 2)[:, 0, 0])

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            each.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for each in mixed.chunk(3, dim=2)
        )
        attended = _attend(self, self.layer_idx, query, key, value, self.softmax_scale, wide_bias=True)
        return self.out_proj(attended), None

    return forward


def _openai_gpt(module: Any) -> Callable[..., Any]:
    """The first GPT, which has no cache in transformers."""
    scale = (module.split_size // module.n_head) ** -0.5 if module.scale else 1.0
    del module.bias  # a square of the model's window, as in GPT-Neo

    def forward(self: Any, x: torch.Tensor, *_: Any, **__: Any) -> list[torch.Tensor]:
        query, key, value = (
            each.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for each in self.c_attn(x).split(self.split_size, 2)
        )
        return [self.c_proj(_attend(self, self.layer_idx, query, key, value, scale))]

    return forward


def _xglm(_: Any) -> Callable[..., Any]:
    """XGLM: queries are scaled before they meet the keys."""

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (
            each.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for each in (
                self.q_proj(hidden_states) * self.scaling,
                self.k_proj(hidden_states),
                self.v_proj(hidden_states),
            )
        )
        return self.out_proj(_attend(self, self.layer_idx, query, key, value, 1.0)), None

    return forward


def _xglm_positions(_: Any) -> Callable[..., Any]:
    """XGLM's table of positions, without the branch that lets it grow beyond the model's window."""

    def forward(self: Any, position_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.nn.functional.embedding(position_ids + self.offset, self.weights)

    return forward


_ADAPTERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "modeling_bloom.BloomAttention": _bloom,
    "modeling_falcon.FalconAttention": _falcon,
    "modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "modeling_mpt.MptAttention": _mpt,
    "modeling_openai.Attention": _openai_gpt,
    "modeling_xglm.XGLMAttention": _xglm,
    "modeling_xglm.XGLMSinusoidalPositionalEmbedding": _xglm_positions,
}


def _add_slopes(module: torch.nn.Module, slopes_H: torch.Tensor) -> None:
    module.register_buffer(_SLOPES, slopes_H.clone(), persistent=False)


def _attend(
    module: torch.nn.Module,
    layer: int,
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    bias_scale: float = 1.0,
    wide_bias: bool = False,
) -> torch.Tensor:
    """Return the attended values of all heads side by side, [1, T, H * D]."""
    slopes_H = getattr(module, _SLOPES, None)
    attended_1THD: torch.Tensor = attention_op(
        query_1HTD, key_1GTD, value_1GTD, None, slopes_H, layer, scale, window, 0.0, bias_scale, wide_bias
    )
    return attended_1THD.flatten(2)
