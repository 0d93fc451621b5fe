"""In bfloat16 the split model is as exact as transformers in bfloat16, and equal to it wherever rounding allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.architectures import write_checkpoint
from tests.unit.pipelines import Pipeline, batch_of

LENGTH = 200
_ROUNDINGS = 6
"""Two logits further apart than this many times the rounding of bfloat16 must not change places."""


def _logits(directory: Path, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma2", "bloom", "falcon", "mpt"])
def test_tokens_equal_where_the_margin_exceeds_rounding(name: str, tmp_path: Path) -> None:
    directory, _ = write_checkpoint(name, tmp_path)
    token_ids = torch.randint(3, 125, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = _logits(directory, token_ids, torch.float32)
    theirs = _logits(directory, token_ids, torch.bfloat16)
    pipeline = Pipeline(directory, [2, 2], num_slots=256, dtype=torch.bfloat16)
    ours = pipeline.run(batch_of(0, [(token_ids, 0, [(0, 256)])])).float()

    rounding = (theirs - exact).pow(2).mean().sqrt()
    assert (ours - exact).pow(2).mean().sqrt() <= 1.1 * rounding
    best = theirs.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > _ROUNDINGS * rounding
    assert is_clear.sum() >= 5
    assert torch.equal(ours.argmax(-1)[is_clear], theirs.argmax(-1)[is_clear])
