"""Which cache block holds which tokens: names of full blocks by content, and unowned blocks that keep theirs.

A full block is named by a hash chained over its tokens and the name of the block before it, so that equal names mean
equal prefixes: keys and values depend on every token before them. The hash is cryptographic (BLAKE2b, 256 bits): no
two prefixes that anyone could find share a name. Knows neither requests nor tensors, nor which blocks are free.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence
from itertools import takewhile

from ts_pippy_handler.errors import PippyError


def extend_names(names: list[bytes], tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append to ``names`` what is missing to name the first ``num_blocks`` blocks of ``tokens``."""
    for index in range(len(names), num_blocks):
        block = array("q", tokens[index * block_size : (index + 1) * block_size])
        parent = names[-1] if names else b""
        names.append(hashlib.blake2b(parent + block.tobytes(), digest_size=32).digest())


class KnownBlocks:
    """Contents of blocks, and the order in which unowned ones are given up."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._kept: dict[int, int] = {}  # unowned blocks, least recently used first, and when they were released
        self._now = 0

    @property
    def num_kept(self) -> int:
        """Unowned blocks held back for their contents."""
        return len(self._kept)

    def prefix(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known beginning of a chain of names."""
        found = map(self._block_of.get, names)
        return [block for block in takewhile(lambda block: block is not None, found) if block is not None]

    def learn(self, block: int, name: bytes) -> None:
        """Note what a block holds; nothing changes if another block holds the same already."""
        if name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def has_contents(self, block: int) -> bool:
        """Whether a later request may find the block by its contents."""
        return block in self._name_of

    def is_kept(self, block: int) -> bool:
        """Whether the block is unowned and held back."""
        return block in self._kept

    def tick(self) -> None:
        """Begin a release: blocks kept until the next one count as equally old."""
        self._now += 1

    def keep(self, block: int) -> None:
        """Hold an unowned block back, as the most recently used one."""
        self._kept[block] = self._now

    def reuse(self, block: int) -> None:
        """Take a kept block out of the order, contents and all."""
        del self._kept[block]

    def drop(self, block: int) -> None:
        """Give up a kept block and its contents."""
        del self._kept[block]
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

    def drop_all(self) -> list[int]:
        """Forget all contents, those of owned blocks too; return the blocks that were kept."""
        kept = sorted(self._kept)
        self._kept.clear()
        self._name_of.clear()
        self._block_of.clear()
        return kept

    def first_of_coldest(self, most_of_newest: int) -> int:
        """Return where the least recently used blocks begin: those that lie in a row and were released together.

        When they are the last ones released, perhaps by a request that had to make room and will be back, it is only
        the end of them, ``most_of_newest`` blocks.
        """
        block, released = next(iter(self._kept.items()))
        end = block + 1
        while self._kept.get(block - 1) == released and (released < self._now or end - block < most_of_newest):
            block -= 1
        return block

    def are_together(self, block: int, other: int) -> bool:
        """Whether a kept block and another were released at once."""
        return self._kept[block] == self._kept.get(other)

    def is_cold(self, block: int) -> bool:
        """Whether a kept block belongs to the older half, which new contents may replace first, and not to the last."""
        age = self._now - self._kept[block]
        return age > 0 and 2 * age >= self._now - next(iter(self._kept.values()))

    def check_integrity(self, owned: Collection[int]) -> list[int]:
        """Check that names and blocks belong together and that every named block is kept or owned.

        Returns:
            The kept blocks.

        Raises:
            PippyError: Naming a block that is wrong.
        """
        holders = {*owned, *self._kept}
        for block, name in self._name_of.items():
            if self._block_of.get(name) != block or block not in holders:
                raise PippyError(f"cache block {block} is known by its contents, but nobody keeps it")
        if len(self._block_of) != len(self._name_of):
            raise PippyError(f"{len(self._block_of)} contents are known of {len(self._name_of)} cache blocks")
        return list(self._kept)
