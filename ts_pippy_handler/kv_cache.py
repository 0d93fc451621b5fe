"""Who owns which cache slot: allocation of runs of blocks, numbers only.

A request's cache grows in blocks of ``block_size`` tokens. Blocks are handed out so that a request's slots stay
consecutive where possible (one run), because attention then reads them in place; where memory is fragmented a
request simply has several runs. Holds no tensors: every stage keeps its own keys and values at the same slots.
"""

from __future__ import annotations

import bisect

from ts_pippy_handler.errors import PippyError


class BlockAllocator:
    """Hands out blocks of cache slots to requests, by request number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = [(0, num_blocks)]  # sorted, non-adjacent (first_block, num_blocks) intervals
        self._owned: dict[int, list[tuple[int, int]]] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return sum(count for _, count in self._free)

    @property
    def num_used(self) -> int:
        """Blocks owned by requests."""
        return sum(count for runs in self._owned.values() for _, count in runs)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner: int, num_tokens: int) -> bool:
        """Give ``owner`` blocks for ``num_tokens`` tokens in all, counting those it has.

        Returns:
            False, with nothing changed, when there are not enough free blocks.
        """
        runs = self._owned.get(owner, [])
        missing = self.blocks_for(num_tokens) - sum(count for _, count in runs)
        if missing > self.num_free:
            return False
        runs = list(runs)
        while missing > 0:
            first, count = self._take(missing, after=sum(runs[-1]) if runs else None)
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((first, count))
            missing -= count
        self._owned[owner] = runs
        return True

    def slots(self, owner: int) -> list[tuple[int, int]]:
        """Return the owner's runs as ``(first_slot, num_slots)``, in token order."""
        return [(first * self.block_size, count * self.block_size) for first, count in self._owned[owner]]

    def free(self, owner: int) -> None:
        """Take back all blocks of ``owner``; nothing happens if it has none."""
        for run in self._owned.pop(owner, []):
            self._give_back(run)

    def check_integrity(self) -> None:
        """Check that every block is owned once or free once.

        Raises:
            PippyError: If a block is lost or has two owners.
        """
        seen = sorted([*self._free, *(run for runs in self._owned.values() for run in runs)])
        end = 0
        for first, count in seen:
            if first != end or count < 1:
                raise PippyError(f"cache blocks broken at block {end}: next known run is ({first}, {count})")
            end = first + count
        if end != self.num_blocks:
            raise PippyError(f"cache blocks lost: {end} of {self.num_blocks} accounted for")

    def _take(self, wanted: int, after: int | None) -> tuple[int, int]:
        """Remove up to ``wanted`` blocks from the free list: right behind ``after``, else the best single run."""
        index = next((i for i, (first, _) in enumerate(self._free) if first == after), None)
        if index is None:
            fitting = [i for i, (_, count) in enumerate(self._free) if count >= wanted]
            # The largest gap leaves room to grow in place; without a fitting one, it makes the fewest runs.
            index = max(fitting or range(len(self._free)), key=lambda i: self._free[i][1])
        first, count = self._free[index]
        taken = min(wanted, count)
        self._free[index : index + 1] = [(first + taken, count - taken)] if count > taken else []
        return first, taken

    def _give_back(self, run: tuple[int, int]) -> None:
        index = bisect.bisect(self._free, run)
        first, count = run
        if index < len(self._free) and first + count == self._free[index][0]:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            index -= 1
            before = self._free.pop(index)
            first, count = before[0], before[1] + count
        self._free.insert(index, (first, count))
