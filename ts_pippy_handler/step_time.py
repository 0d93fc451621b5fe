"""How long a stage computes for one batch, as far as a split depends on it: reading, multiplying, starting operators.

Stages are compared, so only the proportions of the three speeds count. They were fitted to one thread of an AMD EPYC
(AVX2, torch 2.13, float32, packed weights) and are used for every device; ``docs/performance.md`` compares predictions
with measurements. Attention among the tokens of a prompt and what is done value by value are left out: a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass

_READ_PS = 65
"""Picoseconds to read a byte of weights or cache."""
_MULTIPLY_PS = 27
"""Picoseconds of one multiplication with its addition."""
_OPERATOR_PS = 20_000_000
"""Picoseconds to start an operator of the graph, whatever its size."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The batch that stages are compared by."""

    answer_rows: int = 32
    """Requests that get a token each; logits are wanted of these rows only."""
    prompt_rows: int = 64
    """Tokens of prompts beside them: two for each new one."""
    context_len: int = 192
    """Tokens that an answering row attends to."""

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.answer_rows + self.prompt_rows


MIX = Mix()


def touched(share: float, num_rows: int) -> float:
    """Return how much of a weight a batch reads, of which each row needs a part: experts, chosen as if at random."""
    return 1 - (1 - share) ** num_rows


def nanoseconds(*, read_bytes: float, multiplications: float, num_operators: int) -> int:
    """Return the time that the work of one batch takes."""
    return round((read_bytes * _READ_PS + multiplications * _MULTIPLY_PS + num_operators * _OPERATOR_PS) / 1000)
