"""Adapters for attention of its own: what a transformers that has changed leads to."""

from __future__ import annotations

import pytest

from ts_pippy_handler import own_attention
from ts_pippy_handler.errors import UnsupportedModelError


def test_a_transformers_without_the_parts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_neo import modeling_gpt_neo

    monkeypatch.delattr(modeling_gpt_neo, "GPTNeoSelfAttention")
    with pytest.raises(UnsupportedModelError, match=r"gpt_neo: .* adapted to transformers .*GPTNeoSelfAttention"):
        own_attention.let_be_built("gpt_neo")
