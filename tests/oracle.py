"""What the right answer is: plain ``transformers`` ``generate``, one prompt at a time, with its cache."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

MIN_MARGIN = 1e-4
"""Logit gap above which two float32 computations of these small models must choose the same token."""


@dataclass(frozen=True)
class Reference:
    """The continuation of one prompt."""

    token_ids: list[int]
    """New tokens, with the end-of-sequence token when it came."""
    margin: float
    """Smallest gap between the best and the second best logit over all steps."""
    finish_reason: Literal["stop", "length"]


def hf_generate(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    ignore_eos: bool = False,
) -> list[Reference]:
    """Continue each prompt greedily and alone, as ``transformers`` does by itself.

    End-of-sequence tokens are those of the checkpoint's generation config.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Two processes of two threads on two cores wait for each other: twelve times as long for SmolLM2.
        torch.set_num_threads(1)
    return [_reference(str(model_dir), tuple(prompt), max_new_tokens, dtype, ignore_eos) for prompt in prompts]


def token_lists(references: Sequence[Reference]) -> list[list[int]]:
    """Return only the new tokens of each reference."""
    return [reference.token_ids for reference in references]


def smallest_margin(references: Sequence[Reference]) -> float:
    """Return the closest decision of all; below ``MIN_MARGIN`` a difference would prove nothing."""
    return min(reference.margin for reference in references)


def random_prompts(num: int, min_len: int, max_len: int, vocab: int, seed: int) -> list[list[int]]:
    """Return token lists of unequal lengths, the shortest and the longest allowed among them."""
    generator = random.Random(seed)
    lengths = [min_len, max_len, *(generator.randint(min_len, max_len) for _ in range(num - 2))][:num]
    generator.shuffle(lengths)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


@lru_cache(maxsize=2)
def _model(model_dir: str, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


@lru_cache(maxsize=4096)
def _reference(
    model_dir: str, prompt: tuple[int, ...], max_new_tokens: int, dtype: torch.dtype, ignore_eos: bool
) -> Reference:
    model = _model(model_dir, dtype)
    with _threads_for(model):
        return _generate(model, prompt, max_new_tokens, ignore_eos)


@contextmanager
def _threads_for(model: PreTrainedModel) -> Iterator[None]:
    """Compute a tiny model on one thread: on a busy machine, two that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    if model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _generate(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int, ignore_eos: bool) -> Reference:
    ids_1T = torch.tensor([list(prompt)])
    eos = model.generation_config.eos_token_id
    options = {"eos_token_id": None} if ignore_eos else {}
    out = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    top_S2 = torch.cat(out.logits).float().topk(2, dim=-1).values
    tokens = out.sequences[0, len(prompt) :].tolist()
    stops = set() if ignore_eos or eos is None else {eos} if isinstance(eos, int) else set(eos)
    margin = float((top_S2[:, 0] - top_S2[:, 1]).min())
    return Reference(tokens, margin, "stop" if tokens[-1] in stops else "length")
