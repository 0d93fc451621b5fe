"""Architectures that cannot be split exactly are refused before weights are read, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ts_pippy_handler import tracing
from ts_pippy_handler.errors import UnsupportedModelError

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64}

WINDOWED = {"mistral", "gemma2", "gemma3_text", "phi3"}


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("t5", {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4}, "t5: encoder-decoder models"),
        ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "mamba: |no list of layers"),
        ("lfm2", {**GQA, "layer_types": ["conv", "full_attention"]}, "lfm2: |layers run out of order"),
        (
            "falcon_h1",
            {**GQA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
            "falcon_h1: ",
        ),
        (
            "bart",
            {"vocab_size": 64, "d_model": 32, "decoder_layers": 2, "is_encoder_decoder": False},
            "bart counts positions itself",
        ),
        ("vit", {}, "vit: "),
    ],
)
def test_refused(model_type: str, options: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(model_type, **options)
    with pytest.raises(UnsupportedModelError, match=f"^({reason})"):
        tracing.trace(config, torch.float32)


@pytest.mark.parametrize("quantization", [{"quant_method": "fp8"}, {"bits": 4}])
def test_quantised_weights(quantization: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", **GQA, quantization_config=quantization)
    with pytest.raises(
        UnsupportedModelError, match=r"^llama: the checkpoint is quantised \((fp8|None)\); only float32"
    ):
        tracing.trace(config, torch.float32)


def test_a_window_that_no_layer_is_told_of() -> None:
    config = AutoConfig.for_model("llama", **GQA)
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModelError, match=r"^llama: layer 1 has a sliding window that attention is not told"):
        tracing.trace(config, torch.float32)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2"])
def test_not_refused(model_type: str) -> None:
    options = {**GQA, "head_dim": 8, "pad_token_id": 0} | ({"sliding_window": 8} if model_type in WINDOWED else {})
    assert tracing.trace(AutoConfig.for_model(model_type, **options), torch.float32).num_layers == 2


@pytest.mark.parametrize("model_type", sorted(WINDOWED))
def test_a_window_for_which_transformers_disagrees_with_itself(model_type: str) -> None:
    options = {**GQA, "head_dim": 8, "pad_token_id": 0, "sliding_window": 1}
    config = AutoConfig.for_model(model_type, **options)
    with pytest.raises(UnsupportedModelError, match=f"^{model_type}: layer 0 has a sliding window of 1 token"):
        tracing.trace(config, torch.float32)
