"""Logits to token ids: pure functions, each row with its own parameters.

The draw of a row depends only on its logits, its parameters, its seed and its position, so a request gets the same
tokens alone, in any batch and with any number of stages. The order is that of transformers::

    logits ─▶ repetition penalty ─▶ presence and frequency penalty ─▶ bias ─▶ suppressed tokens      greedy: ─▶ argmax
           ─▶ temperature ─▶ top_k ─▶ top_p ─▶ min_p ─▶ draw

Reported logprobs come from the model's own logits, before any of this. Knows nothing of requests.

Shapes: R sampled rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import torch

from ts_pippy_handler.request import Processing, SampledRow, TokenLogprobs

_GREEDY_BELOW = 1e-6  # where dividing by the temperature leaves nothing but the most likely token, or overflows
_HUGE = 1e30  # larger logits are cut to this, so that no penalty can turn a row into infinities; see _GREEDY_BELOW
NO_TOKEN = -1
"""Stands for the token of a row whose logits are no numbers: nothing can be chosen from them."""
_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


def sample(logits_RV: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Choose the next token of each row.

    Args:
        logits_RV: Logits of the sampled rows, any float dtype and device.
        rows: How to sample each of them, in the same order.

    Returns:
        One token id per row; ``NO_TOKEN`` where the model computed NaN or infinity.
    """
    likeliest_R = logits_RV.argmax(-1)  # NaN counts as the largest
    is_sound_R = logits_RV.gather(-1, likeliest_R[:, None])[:, 0].isfinite()
    token_ids: list[int] = likeliest_R.where(is_sound_R, NO_TOKEN).tolist()
    for index, row in enumerate(rows):
        if token_ids[index] == NO_TOKEN:
            continue
        if row.temperature >= _GREEDY_BELOW:
            token_ids[index] = _draw(_processed(logits_RV[index], row.processing), row)
        elif row.processing is not None:
            token_ids[index] = int(_processed(logits_RV[index], row.processing).argmax())
    return token_ids


def logprobs_of(
    logits_RV: torch.Tensor, rows: Sequence[SampledRow], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Say how likely the chosen tokens were, by the model's logits as they came.

    Args:
        logits_RV: Logits of the sampled rows, any float dtype and device.
        rows: How they were sampled.
        token_ids: What was chosen.

    Returns:
        One for each row, None where it does not ask; an empty list when no row asks.
    """
    widths = [row.num_logprobs for row in rows]
    if all(width is None for width in widths):
        return []
    return [
        None if width is None else _logprobs(logits_V, token_id, width)
        for logits_V, token_id, width in zip(logits_RV, token_ids, widths, strict=True)
    ]


def _logprobs(logits_V: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    values = torch.log_softmax(logits_V.detach().to(torch.float32), -1)
    values = values.nan_to_num(nan=_LEAST_LOGPROB).clamp(min=_LEAST_LOGPROB)
    num_top = min(num_top, len(values))
    if not num_top:
        return TokenLogprobs(float(values[token_id]), [])
    # topk alone leaves open which of several equal tokens it takes; the first ones are wanted, as argmax takes them.
    ids = (values >= values.topk(num_top).values[-1]).nonzero()[:, 0]
    ids = ids[values[ids].argsort(descending=True, stable=True)[:num_top]]
    return TokenLogprobs(float(values[token_id]), list(zip(ids.tolist(), values[ids].tolist(), strict=True)))


def _processed(logits_V: torch.Tensor, processing: Processing | None) -> torch.Tensor:
    """Return the logits as float32 on the CPU, changed as the row asks; they may still be the given tensor."""
    scores = logits_V.detach().to("cpu", torch.float32)
    if processing is None:
        return scores
    scores = scores.clone()
    if processing.repetition_penalty != 1:
        from transformers import RepetitionPenaltyLogitsProcessor  # here for the same reason as in _warpers

        penalty = min(max(float(processing.repetition_penalty), 1 / _HUGE), _HUGE)
        context = torch.tensor([*processing.prompt, *processing.generated])
        scores = RepetitionPenaltyLogitsProcessor(penalty)(context[None], scores[None])[0]
    if processing.generated and (processing.presence_penalty or processing.frequency_penalty):
        ids, counts = torch.tensor(processing.generated).unique(return_counts=True)
        scores[ids] -= processing.presence_penalty + processing.frequency_penalty * counts
    if processing.logit_bias:
        ids = torch.tensor([token_id for token_id, _ in processing.logit_bias])
        scores.index_add_(0, ids, torch.tensor([bias for _, bias in processing.logit_bias], dtype=torch.float32))
    scores.clamp_(-_HUGE, _HUGE)
    scores[processing.suppressed] = -torch.inf
    return scores


def _draw(scores_V: torch.Tensor, row: SampledRow) -> int:
    scores = scores_V[None]
    for warper in _warpers(row):
        scores = warper(None, scores)
    generator = torch.Generator().manual_seed(_mix(row.seed, row.position))
    probabilities = torch.softmax(scores[0].double(), -1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _warpers(row: SampledRow) -> list[Callable[[None, torch.Tensor], torch.Tensor]]:
    # transformers takes a second to import, and greedy requests need none of it.
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list[Callable[[None, torch.Tensor], torch.Tensor]] = []
    if row.temperature != 1:
        warpers.append(TemperatureLogitsWarper(row.temperature))
    if row.top_k:
        warpers.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        warpers.append(TopPLogitsWarper(row.top_p))
    if row.processing is not None and row.processing.min_p:
        warpers.append(MinPLogitsWarper(row.processing.min_p))
    return warpers


def _mix(seed: int, position: int) -> int:
    """Return a generator seed that depends on every bit of both; torch's CPU generator uses the low 32 bits of it."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=4).digest()
    return int.from_bytes(digest, "little")
