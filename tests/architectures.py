"""A tiny random model of any architecture that transformers calls a causal language model, and what becomes of it.

The settings of an architecture's own default configuration are kept, but for sizes, which become small wherever the
configuration has them under one of their usual names. Weights are wide, and drawn anew with smaller embeddings while
the model only repeats itself, so that a mistake in positions, masks or weights changes the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.oracle import MIN_MARGIN, Reference, hf_generate, smallest_margin
from tests.unit.pipelines import Pipeline, traced
from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.request import Batch, SampledRow, Segment

LAYERS = 4
VOCAB = 128
NEW_TOKENS = 30
PROMPTS = [[5, 9, 77], [3 + (index * 37) % 120 for index in range(17)], [100, 11, 45, 8, 99, 3, 7, 60, 20]]
"""Unequal lengths; with the new tokens, well past the sliding window."""
_ROOM = 64
_MIN_DISTINCT = 8
_MAX_PARAMETERS = 20_000_000
_EMBEDDING_SCALES = (1.0, 0.2, 0.05, 0.02)
_MATRIX_SCALES = {"openai-gpt": 3.0}
"""Of models that only repeat themselves whatever the scale of their embeddings: this one norms after every sum."""

_SMALL: dict[str, Any] = {
    **dict.fromkeys("hidden_size n_embd d_model dim word_embed_proj_dim".split(), 64),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers".split(), LAYERS),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads decoder_attention_heads".split(), 4),
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys("head_dim kv_channels v_head_dim query_pre_attn_scalar".split(), 16),
    **dict.fromkeys("intermediate_size ffn_hidden_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim".split(), 96),
    **dict.fromkeys("max_position_embeddings n_positions max_sequence_length max_seq_len".split(), 256),
    **dict.fromkeys("vocab_size vocab_size_per_layer_input".split(), VOCAB),
    **dict.fromkeys("sliding_window attention_window window_size".split(), 8),
    "attention_types": [[["global", "local"], 2]],
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size".split(), 32),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("num_experts_per_tok moe_k index_num_heads".split(), 2),
    **dict.fromkeys("n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace".split(), 1),
    **dict.fromkeys("q_lora_rank kv_lora_rank hidden_size_per_layer_input".split(), 16),
    **dict.fromkeys("qk_rope_head_dim qk_nope_head_dim rotary_dim".split(), 8),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EVEN_IF_NONE = frozenset(
    "num_key_value_heads head_dim pad_token_id n_inner num_experts_per_tok n_group topk_group n_routed_experts "
    "n_shared_experts moe_intermediate_size num_experts".split()
)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (new decoder)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon (multi-head)": ("falcon", {"multi_query": False}),
    "falcon (ALiBi)": ("falcon", {"alibi": True, "hidden_size": 160}),
    "falcon (sequential)": ("falcon", {"parallel_attn": False}),
    "bloom (6 heads)": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "mpt (6 heads)": ("mpt", {"n_heads": 6, "d_model": 96}),
    "opt (norm after, projected)": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt (projected)": ("opt", {"word_embed_proj_dim": 32}),
    "llama (tied)": ("llama", {"tie_word_embeddings": True}),
    "llama (one key/value head)": ("llama", {"num_key_value_heads": 1}),
    "llama (5 heads)": ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 80}),
    "qwen2 (window)": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "layer_types": None}),
    "gpt2 (no scaling)": ("gpt2", {"scale_attn_weights": False}),
    "stablelm (parallel)": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "gpt_neox (sequential)": ("gpt_neox", {"use_parallel_residual": False}),
}
"""Settings that make an architecture compute something else: name, model type and what differs."""

Status = Literal["exact", "refused", "wrong", "broken", "no reference"]


@dataclass(frozen=True)
class Verdict:
    """What became of an architecture."""

    name: str
    status: Status
    detail: str
    """Why it was refused, or how it differs; ``no reference`` says why transformers gave none."""


def all_names() -> list[str]:
    """Return every model type that transformers maps to a causal language model, and the variants."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


@cache
def tiny_config(name: str) -> PreTrainedConfig:
    """Return a small configuration of a model type or a variant."""
    kind, changes = VARIANTS.get(name, (name, {}))
    return AutoConfig.for_model(kind, **{**_shrunk(AutoConfig.for_model(kind)), **changes})


def _shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    latent = hasattr(default, "kv_lora_rank") and hasattr(default, "qk_rope_head_dim")
    small = {key: value for key, value in _SMALL.items() if _has(default, key)}
    if latent:  # its head width follows from others, and it has no groups
        small.pop("head_dim", None)
        small["num_key_value_heads"] = small["num_attention_heads"]
    if _has(default, "layer_types"):
        kinds = list(dict.fromkeys(default.layer_types))
        small["layer_types"] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            small[key] = _shrunk(value)
    return small


def _has(config: PreTrainedConfig, key: str) -> bool:
    own = getattr(type(config), key, None)
    if isinstance(own, property) and own.fset is None:
        return False
    try:
        return getattr(config, key) is not None or key in _EVEN_IF_NONE
    except AttributeError:
        return False
    except Exception:  # noqa: BLE001 - a setting of its own for each layer has no value here, but can be given one
        return key != "layer_types"


def write_checkpoint(name: str, directory: Path) -> tuple[Path, list[Reference]]:
    """Save a tiny random model below ``directory``; return where, and how transformers continues the prompts.

    Raises:
        Exception: Whatever transformers does when it cannot build, save or run such a model.
    """
    config = tiny_config(name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"no tiny configuration: {size / 1e6:.0f} million parameters")
    for scale in _EMBEDDING_SCALES:
        target = directory / f"embedding-{scale}"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, scale, _MATRIX_SCALES.get(config.model_type, 1.0))
        model.generation_config = GenerationConfig(do_sample=False, bos_token_id=1, pad_token_id=0)
        model.save_pretrained(target)
        references = hf_generate(target, PROMPTS, NEW_TOKENS, ignore_eos=True)
        if len({token for reference in references for token in reference.token_ids}) >= _MIN_DISTINCT:
            break
    return target, references


def _randomise(model: PreTrainedModel, embedding_scale: float, matrix_scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.4, generator=generator)
                if any(part in name for part in ("embed", "wte", "tok")):
                    parameter.mul_(embedding_scale)
                else:
                    parameter.mul_(matrix_scale * (64 / max(parameter.shape[-1], 16)) ** 0.5)
            else:
                parameter.normal_(0.0, 0.2, generator=generator)
                if name.endswith("weight"):
                    parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and name.endswith("_bias") and buffer.is_floating_point():
                buffer.normal_(0.0, 0.2, generator=generator)  # routers of experts keep theirs so


def judge(name: str, directory: Path, stages: Sequence[int] = (1, 2, 3, 4)) -> Verdict:
    """Build a tiny model, split it into each number of stages, and compare all prompts in one batch with transformers.

    The stages run in this process, one after the other.
    """
    try:
        directory, references = write_checkpoint(name, directory)
    except Exception as error:  # noqa: BLE001 - the verdict tells
        return Verdict(name, "no reference", _reason(error))
    try:
        num_layers = traced(directory).num_layers
        for num_stages in (each for each in stages if each <= num_layers):
            outputs = run_batch(directory, [len(part) for part in _spread(range(num_layers), num_stages)])
            if outputs != [reference.token_ids for reference in references]:
                return Verdict(name, "wrong", f"other tokens over {num_stages} stages")
    except PippyError as error:
        return Verdict(name, "refused", str(error).replace(f"{directory}/", ""))
    except Exception as error:  # noqa: BLE001 - the verdict tells
        return Verdict(name, "broken", _reason(error))
    if (margin := smallest_margin(references)) < MIN_MARGIN:
        return Verdict(name, "no reference", f"two tokens were as good as each other: margin {margin:.0e}")
    return Verdict(name, "exact", "")


def run_batch(directory: Path, layers_per_stage: Sequence[int], dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """Continue all prompts greedily, together in each batch, with the cache."""
    pipeline = Pipeline(directory, layers_per_stage, num_slots=_ROOM * len(PROMPTS), dtype=dtype)
    runs = [[(_ROOM * index, _ROOM)] for index in range(len(PROMPTS))]
    tokens = [list(prompt) for prompt in PROMPTS]
    done = [0] * len(PROMPTS)
    for number in range(NEW_TOKENS):
        parts = [own[start:] for own, start in zip(tokens, done, strict=True)]
        segments = [Segment(len(part), *each) for part, *each in zip(parts, done, runs, strict=True)]
        done = [len(own) for own in tokens]
        ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts))]
        rows = [SampledRow(end - 1, 0, 0.0, 0, 1.0, 0) for end in ends]
        logits = pipeline.run(Batch(number, [token for part in parts for token in part], segments, rows))
        for own, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
            own.append(token)
    return [own[len(prompt) :] for own, prompt in zip(tokens, PROMPTS, strict=True)]


def _spread(layers: range, num_stages: int) -> Iterator[range]:
    for stage in range(num_stages):
        yield layers[len(layers) * stage // num_stages : len(layers) * (stage + 1) // num_stages]


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
