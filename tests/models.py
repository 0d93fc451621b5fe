"""Small random checkpoints, built offline: one Hugging Face directory each, with a byte-level tokenizer.

The weights are drawn wide (a standard deviation of 0.4, not 0.02), so that a wrong position, mask, window or soft cap
changes the chosen tokens instead of only the last digits of the logits. Same arguments, same weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

BOS_ID, EOS_ID, PAD_ID, IM_START_ID, IM_END_ID = range(256, 261)
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>")
VOCAB = 263
"""Two more than the tokenizer has: padded vocabularies are common, and such ids must not break decoding."""
WINDOW = 512
SLIDING_WINDOW = 8

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Format = Literal["safetensors", "bin"]
Head = Literal["tied", "tied-present", "untied"]
"""Whether the output matrix is the embedding, and if so whether the checkpoint holds a second copy of it."""


def _common(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": WINDOW,
    }


def _gpt2(layers: int) -> dict[str, Any]:
    return {"vocab_size": VOCAB, "n_embd": 64, "n_layer": layers, "n_head": 4, "n_positions": WINDOW}


def _opt(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": WINDOW,
    }


def _mistral(layers: int) -> dict[str, Any]:
    return _common(layers) | {"sliding_window": SLIDING_WINDOW, "head_dim": 16}


def _qwen3(layers: int) -> dict[str, Any]:
    return _common(layers) | {"head_dim": 16}


def _gemma2(layers: int) -> dict[str, Any]:
    return _common(layers) | {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": SLIDING_WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 15.0,
    }


FAMILIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "llama": _common,
    "gpt2": _gpt2,
    "opt": _opt,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
}
TIED_BY_DEFAULT = frozenset({"gpt2", "opt", "gemma2"})


def tiny_checkpoint(
    directory: Path,
    family: str,
    *,
    layers: int = 5,
    head: Head | None = None,
    file_format: Format = "safetensors",
    shard_bytes: int | None = 60_000,
    tokenizer: bool = True,
    bos: bool = False,
    chat_template: bool = True,
    std: float = 0.4,
    seed: int = 0,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a tiny model of ``family`` to ``directory`` and return it.

    Args:
        directory: Created; must not exist.
        family: One of ``FAMILIES``.
        layers: Number of decoder layers.
        head: See ``Head``; by default what the family's own models have.
        file_format: Of the weight files.
        shard_bytes: Largest weight file, so that there are several; None writes a single file without an index.
        tokenizer: Whether the directory holds one.
        bos: Whether the tokenizer puts a beginning-of-sequence token before every text.
        chat_template: Whether the tokenizer has one.
        std: Standard deviation of the matrices.
        seed: Decides the weights.
        config: Further or other entries of config.json.
    """
    head = head or ("tied" if family in TIED_BY_DEFAULT else "untied")
    specials = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    settings = FAMILIES[family](layers) | specials | {"tie_word_embeddings": head != "untied"} | (config or {})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    randomise(model, std=std, seed=seed)
    model.generation_config = GenerationConfig(do_sample=False, **specials)
    model.save_pretrained(directory, max_shard_size=shard_bytes or "50GB")
    if head == "tied-present" or file_format == "bin":
        rewrite_weights(directory, model, keep_tied=head == "tied-present", file_format=file_format, limit=shard_bytes)
    if tokenizer:
        byte_tokenizer(bos=bos, chat_template=chat_template).save_pretrained(directory)
    return directory


def big_checkpoint(directory: Path) -> Path:
    """Write a llama of about 340 MB of float32 weights in at least four shards: for measuring memory."""
    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    return tiny_checkpoint(directory, "llama", layers=8, shard_bytes=70_000_000, std=0.02, config=size)


def randomise(model: PreTrainedModel, *, std: float, seed: int) -> None:
    """Redraw all weights: matrices around 0, norm weights around the value that leaves their input as it is."""
    gemma = model.config.model_type == "gemma2"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() > 1
            parameter.normal_(0.0, std if matrix else 0.2, generator=generator)
            if gemma and "embed" in name:
                parameter.mul_(0.4)  # scaled up by 8 and tied: else every token would only repeat itself
            elif gemma and "post_" in name:
                parameter.add_(2.0)
            elif not gemma and not matrix and name.endswith("weight"):
                parameter.add_(1.0)  # gemma adds this itself


def byte_tokenizer(*, bos: bool = False, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0..255 are the bytes of UTF-8, followed by ``SPECIAL_TOKENS``."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    core = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level tokenizers."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def rewrite_weights(
    directory: Path,
    model: PreTrainedModel,
    *,
    keep_tied: bool = False,
    file_format: Format = "safetensors",
    limit: int | None = None,
) -> None:
    """Replace the weight files of ``directory``, in the names they have there.

    Args:
        directory: A saved checkpoint of ``model``.
        model: Gives the tied output matrix.
        keep_tied: Write the output matrix although it equals the embedding.
        file_format: Of the new files.
        limit: Most bytes per file; None writes a single file without an index.
    """
    old = [*directory.glob("*.safetensors*")]
    tensors = {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}
    if keep_tied:
        tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    for path in old:
        path.unlink()
    shards = _in_shards(tensors, limit)
    base, suffix = ("model", "safetensors") if file_format == "safetensors" else ("pytorch_model", "bin")
    names = [f"{base}-{i:05d}-of-{len(shards):05d}.{suffix}" for i in range(1, len(shards) + 1)]
    if limit is None:
        names = [f"{base}.{suffix}"]
    for name, shard in zip(names, shards, strict=True):
        if file_format == "safetensors":
            save_file(shard, directory / name, metadata={"format": "pt"})
        else:
            torch.save(shard, directory / name)
    if limit is not None:
        total = sum(t.nbytes for t in tensors.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / f"{base}.{suffix}.index.json").write_text(json.dumps(index, indent=2))


def _in_shards(tensors: dict[str, torch.Tensor], limit: int | None) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def copy_checkpoint(source: Path, target: Path) -> Path:
    """Copy a checkpoint in order to damage it, and return the copy."""
    return Path(shutil.copytree(source, target))


class Checkpoints:
    """Makes each checkpoint once and remembers where it lies."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Path] = {}

    def __call__(self, family: str, **options: Any) -> Path:
        """Return the directory of ``tiny_checkpoint(..., family, **options)``, which must not be changed."""
        key = json.dumps([family, options], sort_keys=True)
        if key not in self._made:
            self._made[key] = tiny_checkpoint(self._root / f"{len(self._made)}-{family}", family, **options)
        return self._made[key]

    def big(self) -> Path:
        """Return the directory of ``big_checkpoint``, which must not be changed."""
        if "big" not in self._made:
            self._made["big"] = big_checkpoint(self._root / "big")
        return self._made["big"]
