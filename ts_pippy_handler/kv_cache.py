"""Who owns which cache slot: allocation of runs of blocks, numbers only.

A request's cache grows in blocks of ``block_size`` tokens. Blocks are handed out so that a request's slots stay
consecutive where possible (one run), because attention then reads them in place; where memory is fragmented, or the
beginning is shared, a request simply has several runs. Holds no tensors: every stage keeps its own keys and values at
the same slots.

Every block is one of three: *free*; *owned* by one request, or by several that begin with the same tokens; or *kept*,
which nobody owns but whose contents a later request may want. Kept blocks are handed out like free ones when memory
runs short, the least recently used first.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.prefix_cache import KnownBlocks

MOST_ROOM = 16
"""Kept blocks are spared while there is a free gap of this many blocks (of an eighth of a small cache)."""


@dataclass(slots=True)
class _Owned:
    """The blocks of one request, in token order."""

    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    """The same as ``(first_slot, num_slots)``."""
    num_known: int = 0
    """Leading blocks whose contents were shared or registered."""
    num_expected: int = 0
    """Blocks it will have in the end, if it goes on as long as it may."""
    promised_at: int | None = None
    """The block behind its last one, if room from there on is left for it."""


class BlockAllocator:
    """Hands out blocks of cache slots to requests, by request number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._room = min(MOST_ROOM, num_blocks // 8)
        self._free = [(0, num_blocks)]  # sorted, non-adjacent (first_block, num_blocks) intervals
        self._num_in_free = num_blocks
        self._num_owners = [0] * num_blocks
        self._owned: dict[int, _Owned] = {}
        self._promised: dict[
            int, int
        ] = {}  # block behind an owner's last one: how many from there on it may still want
        self._known = KnownBlocks()

    @property
    def num_free(self) -> int:
        """Blocks nobody owns, kept ones included."""
        return self._num_in_free + self._known.num_kept

    @property
    def num_kept(self) -> int:
        """Blocks nobody owns that still hold what they held."""
        return self._known.num_kept

    @property
    def num_used(self) -> int:
        """Blocks owned by requests."""
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens fill."""
        return -(-num_tokens // self.block_size)

    def count_known(self, names: Sequence[bytes]) -> int:
        """Return how many blocks a request that begins with these would share."""
        return len(self._known.prefix(names))

    def admit(self, owner: int, num_tokens: int, names: Sequence[bytes] = (), *, num_expected: int = 0) -> int | None:
        """Give a new owner blocks for ``num_tokens`` tokens, of which it shares those whose names are known.

        Args:
            owner: Who has none yet.
            num_tokens: What it needs now.
            names: Of its leading full blocks.
            num_expected: Tokens it may have in the end. So much room is left behind it, as long as there is other room.

        Returns:
            How many leading blocks hold their tokens already; None, with nothing changed, when there are not enough
            free blocks.
        """
        shared = self._known.prefix(names)
        num_from_kept = sum(not self._num_owners[block] for block in shared)
        if self.blocks_for(num_tokens) - len(shared) > self.num_free - num_from_kept:
            return None
        owned = self._owned[owner] = _Owned(num_known=len(shared), num_expected=self.blocks_for(num_expected))
        for block in shared:
            if not self._num_owners[block]:
                self._known.reuse(block)
            self._add(owned, block, 1)
        self.allocate(owner, num_tokens)
        return len(shared)

    def allocate(self, owner: int, num_tokens: int) -> bool:
        """Give ``owner`` blocks for ``num_tokens`` tokens in all, counting those it has.

        Returns:
            False, with nothing changed, when there are not enough free blocks.
        """
        owned = self._owned.get(owner)
        missing = self.blocks_for(num_tokens) - (len(owned.blocks) if owned else 0)
        if missing > self.num_free:
            return False
        if owned is None:
            owned = self._owned[owner] = _Owned()
        while missing > 0:
            first, count = self._find(missing, owned)
            self._claim(first, count)
            self._add(owned, first, count)
            missing -= count
        self._promise(owned)
        return True

    def slots(self, owner: int) -> list[tuple[int, int]]:
        """Return the owner's runs as ``(first_slot, num_slots)``, in token order."""
        return list(self._owned[owner].runs)

    def register(self, owner: int, names: Sequence[bytes]) -> None:
        """Say what the owner's first ``len(names)`` blocks hold; from now on others may share them.

        The batch that fills them must reach the stages before any batch that is formed later.
        """
        owned = self._owned[owner]
        for index in range(owned.num_known, len(names)):
            self._known.learn(owned.blocks[index], names[index])
        owned.num_known = max(owned.num_known, len(names))

    def free(self, owner: int) -> None:
        """Take back all blocks of ``owner``; nothing happens if it has none. Known contents are kept."""
        owned = self._owned.pop(owner, None)
        if owned is None:
            return
        self._known.tick()
        blocks = owned.blocks
        if owned.promised_at is not None:
            del self._promised[owned.promised_at]
        # The last block is seldom full. It stays with those before it, so that it need not be a free gap of its own.
        tail = blocks[-1] if len(blocks) > 1 and blocks[-1] == blocks[-2] + 1 else None
        if tail is not None and not self._known.has_contents(blocks[-2]):
            tail = None
        empty: list[int] = []
        for block in reversed(blocks):  # the beginning is worth most: it is released last
            self._num_owners[block] -= 1
            if not self._num_owners[block]:
                if block == tail or self._known.has_contents(block):
                    self._known.keep(block)
                else:
                    empty.append(block)
        self._give_back(empty[::-1])

    def forget_contents(self) -> None:
        """Say that no block holds anything any more: every stage has lost its cache."""
        self._give_back(self._known.drop_all())

    def check_integrity(self) -> None:
        """Check that every block is free once, kept once or owned by as many requests as are counted.

        Raises:
            PippyError: If a block is lost, or two things at once.
        """
        owners = Counter(block for owned in self._owned.values() for block in owned.blocks)
        kept = self._known.check_integrity(owners)
        seen = sorted([*self._free, *((block, 1) for block in [*kept, *owners])])
        end = 0
        for first, count in seen:
            if first != end or count < 1:
                raise PippyError(f"cache blocks broken at block {end}: next known run is ({first}, {count})")
            end = first + count
        if end != self.num_blocks:
            raise PippyError(f"cache blocks lost: {end} of {self.num_blocks} accounted for")
        for block, counted in enumerate(self._num_owners):
            if counted != owners[block]:
                raise PippyError(f"cache block {block} has {owners[block]} owners, but {counted} are counted")
        num_in_free = sum(count for _, count in self._free)
        if self._num_in_free != num_in_free:
            raise PippyError(f"{self._num_in_free} free cache blocks are counted, not {num_in_free}")

    def _find(self, wanted: int, owned: _Owned) -> tuple[int, int]:
        """Choose up to ``wanted`` consecutive unowned blocks: in place of growth, else in the largest free gap.

        In a gap, what is promised to the owner before it is left out; when nothing else is free, its end is taken.
        Kept blocks are spared while there is a gap worth the name. After that a request grows over old ones behind
        it; else it takes the oldest, from the first of those released together, to grow into the rest.
        """
        behind = owned.blocks[-1] + 1 if owned.blocks else None
        if behind in self._promised and owned.promised_at != behind:
            behind = None  # two requests end in the same shared block, and the other may grow there
        if behind is not None and self._is_empty(behind):
            return behind, self._reach(behind, wanted, self._is_empty)
        enough = max(wanted, self._room)
        first, count = max(map(self._unpromised, self._free), key=_length, default=(0, 0))
        if count >= enough or (count and not self._known.num_kept):
            return first, min(wanted, count)
        first, count = max(self._free, key=_length, default=(0, 0))
        if count >= enough or not self._known.num_kept:
            return first + max(count - wanted, 0), min(wanted, count)
        if behind is not None and self._is_cheap(behind):
            return behind, self._reach(behind, wanted, self._is_cheap)
        first = self._known.first_of_coldest(max(wanted, self._room))
        return first, self._reach(
            first, wanted, lambda block: self._known.are_together(first, block) or self._is_cheap(block)
        )

    def _unpromised(self, gap: tuple[int, int]) -> tuple[int, int]:
        """Return the part of a gap that nobody is going to grow into."""
        first, count = gap
        promised = min(self._promised.get(first, 0), count)
        return first + promised, count - promised

    def _reach(self, first: int, wanted: int, is_fit: Callable[[int], bool]) -> int:
        """Return how many blocks from a fit ``first`` on are fit, up to ``wanted``."""
        count = 1
        while count < wanted and is_fit(first + count):
            count += 1
        return count

    def _is_empty(self, block: int) -> bool:
        """Whether the block is unowned and nothing is lost by handing it out."""
        return block < self.num_blocks and not self._num_owners[block] and not self._known.has_contents(block)

    def _is_cheap(self, block: int) -> bool:
        """Whether the block is unowned and empty or among the older half of the kept ones."""
        if block >= self.num_blocks or self._num_owners[block]:
            return False
        return not self._known.is_kept(block) or self._known.is_cold(block)

    def _add(self, owned: _Owned, first: int, count: int) -> None:
        """Append blocks to an owner, joining them to its last run where they lie right behind it."""
        slot, num_slots = first * self.block_size, count * self.block_size
        if owned.runs and sum(owned.runs[-1]) == slot:
            start, before = owned.runs[-1]
            owned.runs[-1] = (start, before + num_slots)
        else:
            owned.runs.append((slot, num_slots))
        for block in range(first, first + count):
            self._num_owners[block] += 1
            owned.blocks.append(block)

    def _promise(self, owned: _Owned) -> None:
        """Leave room behind an owner's last block for what it may still want, unless it is another's room."""
        if owned.promised_at is not None:
            del self._promised[owned.promised_at]
            owned.promised_at = None
        if not owned.blocks:
            return
        behind, wanted = owned.blocks[-1] + 1, owned.num_expected - len(owned.blocks)
        if wanted > 0 and behind not in self._promised:
            self._promised[behind] = wanted
            owned.promised_at = behind

    def _claim(self, first: int, count: int) -> None:
        """Remove unowned blocks from the free gaps and the kept blocks."""
        block, end = first, first + count
        while block < end:
            if self._known.is_kept(block):
                self._known.drop(block)
                block += 1
                continue
            index = bisect.bisect_right(self._free, block, key=lambda gap: gap[0]) - 1
            start, size = self._free[index]
            taken = min(end, start + size) - block
            pieces = [(start, block - start), (block + taken, start + size - block - taken)]
            self._free[index : index + 1] = [piece for piece in pieces if piece[1]]
            self._num_in_free -= taken
            block += taken

    def _give_back(self, blocks: list[int]) -> None:
        """Add blocks to the free gaps; the more of them lie side by side in order, the quicker."""
        start = 0
        for index in range(1, len(blocks) + 1):
            if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
                self._insert(blocks[start], index - start)
                start = index
        self._num_in_free += len(blocks)

    def _insert(self, first: int, count: int) -> None:
        """Put a gap into the list, joined to its neighbours."""
        index = bisect.bisect(self._free, (first, count))
        if index < len(self._free) and first + count == self._free[index][0]:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            index -= 1
            before = self._free.pop(index)
            first, count = before[0], before[1] + count
        self._free.insert(index, (first, count))


def _length(gap: tuple[int, int]) -> int:
    return gap[1]
