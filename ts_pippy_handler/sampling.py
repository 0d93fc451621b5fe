"""Logits to token ids: pure functions, each row with its own parameters.

The draw of a row depends only on its logits, its seed and its position, so a request gets the same tokens alone, in
any batch and with any number of stages. Filters are those of transformers, in its order. Knows nothing of requests.

Shapes: R sampled rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import torch

from ts_pippy_handler.request import SampledRow

_GREEDY_BELOW = 1e-6  # where dividing by the temperature leaves nothing but the most likely token, or overflows


def sample(logits_RV: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Choose the next token of each row.

    Args:
        logits_RV: Logits of the sampled rows, any float dtype and device.
        rows: How to sample each of them, in the same order.

    Returns:
        One token id per row.
    """
    token_ids: list[int] = logits_RV.argmax(-1).tolist()
    for index, row in enumerate(rows):
        if row.temperature >= _GREEDY_BELOW:
            token_ids[index] = _draw(logits_RV[index], row)
    return token_ids


def _draw(logits_V: torch.Tensor, row: SampledRow) -> int:
    scores = logits_V.detach().to("cpu", torch.float32)[None]
    for warper in _warpers(row):
        scores = warper(None, scores)
    generator = torch.Generator().manual_seed(_mix(row.seed, row.position))
    probabilities = torch.softmax(scores[0].double(), -1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _warpers(row: SampledRow) -> list[Callable[[None, torch.Tensor], torch.Tensor]]:
    # transformers takes a second to import, and greedy requests need none of it.
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Callable[[None, torch.Tensor], torch.Tensor]] = []
    if row.temperature != 1:
        warpers.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k:
        warpers.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        warpers.append(TopPLogitsWarper(row.top_p))
    return warpers


def _mix(seed: int, position: int) -> int:
    """Return a generator seed that depends on every bit of both; torch's CPU generator uses the low 32 bits of it."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=4).digest()
    return int.from_bytes(digest, "little")
