"""The references themselves: they decide clearly, and they notice each mistake they are there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.models import FAMILIES, SLIDING_WINDOW, Checkpoints, copy_checkpoint
from tests.oracle import MIN_MARGIN, hf_generate, random_prompts, smallest_margin, token_lists

PROMPTS = random_prompts(8, 1, 100, 256, seed=1)
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 12_000.0}}


def continued(model_dir: Path) -> list[list[int]]:
    return token_lists(hf_generate(model_dir, PROMPTS, 24))


@pytest.mark.parametrize("family", FAMILIES)
def test_decisions_are_far_above_float_noise(checkpoints: Checkpoints, family: str) -> None:
    references = hf_generate(checkpoints(family), PROMPTS, 24)
    assert smallest_margin(references) > MIN_MARGIN
    assert all(len(reference.token_ids) == 24 or reference.finish_reason == "stop" for reference in references)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": SLIDING_WINDOW + 1}),
        ("gemma2", {"sliding_window": SLIDING_WINDOW + 1}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("llama", THETA),
        ("qwen3", THETA),
    ],
)
def test_wrong_attention_changes_the_tokens(checkpoints: Checkpoints, family: str, change: dict[str, Any]) -> None:
    right, wrong = continued(checkpoints(family)), continued(checkpoints(family, config=change))
    assert sum(one != other for one, other in zip(right, wrong, strict=True)) >= 6


@pytest.mark.parametrize(("family", "table"), [("gpt2", "wpe.weight"), ("opt", "embed_positions.weight")])
def test_shifted_positions_change_the_tokens(checkpoints: Checkpoints, tmp_path: Path, family: str, table: str) -> None:
    shifted = copy_checkpoint(checkpoints(family), tmp_path / "shifted")
    for path in shifted.glob("*.safetensors"):
        tensors = load_file(path)
        tensors = {name: t.roll(1, 0) if name.endswith(table) else t for name, t in tensors.items()}
        save_file(tensors, path, metadata={"format": "pt"})
    right, wrong = continued(checkpoints(family)), continued(shifted)
    assert all(one != other for one, other in zip(right, wrong, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"file_format": "bin"},
        {"file_format": "bin", "shard_bytes": None},
        {"shard_bytes": None},
        {"head": "tied"},
        {"head": "tied-present"},
        {"head": "tied-present", "file_format": "bin"},
    ],
    ids=str,
)
def test_every_way_of_writing_holds_the_same_model(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    head = "tied" if "head" in options else "untied"
    assert continued(checkpoints("llama", **options)) == continued(checkpoints("llama", head=head))
