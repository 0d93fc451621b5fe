"""Shared blocks hold what their names say, nobody writes what another reads, and every block is accounted for."""

from __future__ import annotations

import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.kv_cache import BlockAllocator
from ts_pippy_handler.prefix_cache import extend_names

TOKENS = st.lists(st.integers(0, 1), max_size=24)


def names_of(tokens: list[int], block_size: int = 4) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, tokens, block_size, len(tokens) // block_size)
    return names


def blocks_of(allocator: BlockAllocator, owner: int) -> list[int]:
    size = allocator.block_size
    return [block for first, count in allocator.slots(owner) for block in range(first // size, (first + count) // size)]


class Allocations(RuleBasedStateMachine):
    """Owners write tokens to their blocks, as batches would, and read their whole context back from there."""

    owners = Bundle("owners")

    @initialize(num_blocks=st.integers(1, 20), block_size=st.integers(1, 3))
    def begin(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.slots: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}
        self.next_owner = 0

    @rule(target=owners, tokens=TOKENS, shares=st.booleans())
    def admit(self, tokens: list[int], shares: bool) -> int:
        allocator, owner = self.allocator, self.next_owner
        self.next_owner += 1
        names = names_of(tokens, allocator.block_size) if shares else []
        free, num_known = allocator.num_free, allocator.count_known(names)
        before = {each: blocks_of(allocator, each) for each in self.tokens}
        num_shared = allocator.admit(owner, len(tokens), names)
        needed = allocator.blocks_for(len(tokens))
        if num_shared is None:
            assert needed - num_known > free - len(names), "it would have fitted, however much was kept"
            assert allocator.num_free == free
            return owner
        assert num_shared == num_known
        assert free - needed <= allocator.num_free <= free - needed + num_known
        assert before == {each: blocks_of(allocator, each) for each in self.tokens}, "blocks that are owned stay"
        self.tokens[owner] = tokens
        self.written[owner] = num_shared * allocator.block_size
        return owner

    @rule(owner=owners, more=TOKENS)
    def grow(self, owner: int, more: list[int]) -> None:
        if owner not in self.tokens:
            return
        allocator, wanted = self.allocator, self.tokens[owner] + more
        free, before = allocator.num_free, blocks_of(allocator, owner)
        missing = allocator.blocks_for(len(wanted)) - len(before)
        assert allocator.allocate(owner, len(wanted)) == (missing <= free)
        assert blocks_of(allocator, owner)[: len(before)] == before
        if missing <= free:
            self.tokens[owner] = wanted
            assert allocator.num_free == free - missing

    @rule(owner=owners, num=st.integers(1, 30), registers=st.booleans())
    def write(self, owner: int, num: int, registers: bool) -> None:
        if owner not in self.tokens:
            return
        size = self.allocator.block_size
        stop = min(self.written[owner] + num, len(self.tokens[owner]))
        for position in range(self.written[owner], stop):
            self.slots[self.slot(owner, position)] = self.tokens[owner][position]
        self.written[owner] = stop
        if registers:
            self.allocator.register(owner, names_of(self.tokens[owner][:stop], size))

    @rule(owner=consumes(owners))
    def free(self, owner: int) -> None:
        self.allocator.free(owner)
        self.tokens.pop(owner, None)

    @rule()
    def lose_everything(self) -> None:
        for owner in list(self.tokens):
            self.free(owner)
        self.allocator.forget_contents()
        self.slots.clear()
        assert self.allocator._free == [(0, self.allocator.num_blocks)]

    @invariant()
    def every_owner_reads_what_it_should(self) -> None:
        for owner, tokens in getattr(self, "tokens", {}).items():
            context = [self.slots[self.slot(owner, position)] for position in range(self.written[owner])]
            assert context == tokens[: self.written[owner]]

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check_integrity()
            owned = {block for owner in self.tokens for block in blocks_of(self.allocator, owner)}
            assert self.allocator.num_used == len(owned)

    def slot(self, owner: int, position: int) -> int:
        block, offset = divmod(position, self.allocator.block_size)
        return blocks_of(self.allocator, owner)[block] * self.allocator.block_size + offset


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=150, stateful_step_count=40)


def filled(allocator: BlockAllocator, owner: int, tokens: list[int]) -> list[int]:
    """Admit an owner, fill its blocks and return them."""
    names = names_of(tokens, allocator.block_size)
    assert allocator.admit(owner, len(tokens), names) is not None
    allocator.register(owner, names)
    return blocks_of(allocator, owner)


def test_a_name_says_everything_before_its_block() -> None:
    one, same, other = names_of([1, 2, 3, 4, 5, 6, 7, 8]), names_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), names_of([0] * 4)
    assert one == same
    assert len(one) == 2
    assert names_of([0, 0, 0, 0, 5, 6, 7, 8])[1] != one[1], "equal tokens after another beginning"
    assert names_of([5, 6, 7, 8])[0] not in one + other
    assert names_of([256])[:] == [] != names_of([256] * 4) != names_of([1, 0, 0, 0])


def test_names_are_continued_where_they_stop() -> None:
    tokens = list(range(40))
    names: list[bytes] = []
    for num_blocks in (0, 3, 3, 1, 10):
        extend_names(names, tokens, 4, num_blocks)
    assert names == names_of(tokens)


def test_running_and_finished_requests_share_their_beginning() -> None:
    allocator = BlockAllocator(64, 4)
    tokens = list(range(14))
    first = filled(allocator, 1, tokens)
    assert allocator.admit(2, 14, names_of(tokens)) == 3
    assert blocks_of(allocator, 2)[:3] == first[:3]
    assert allocator.num_used == 5
    allocator.free(1)
    allocator.check_integrity()
    assert (allocator.num_used, allocator.num_kept) == (4, 1), "the rest of the first one's last block lies idle"
    allocator.free(2)
    assert allocator.num_used == 0
    assert allocator.num_free == 64
    assert allocator.admit(3, 14, names_of(tokens[:9])) == 2
    allocator.check_integrity()


def test_a_request_that_goes_on_grows_in_place() -> None:
    """The next turn of a conversation: one run, as if it had been one request."""
    allocator = BlockAllocator(64, 4)
    filled(allocator, 1, list(range(18)))
    allocator.free(1)
    filled(allocator, 2, [7] * 30)
    allocator.free(2)
    assert allocator.admit(3, 20, names_of(list(range(16)))) == 4
    assert allocator.slots(3) == [(0, 20)]


def test_kept_blocks_are_spared_while_others_are_free() -> None:
    allocator = BlockAllocator(32, 4)
    filled(allocator, 1, [1] * 16)
    allocator.free(1)
    allocator.admit(2, 28 * 4)
    assert allocator.slots(2) == [(16, 112)]
    assert allocator.count_known(names_of([1] * 16)) == 4
    allocator.check_integrity()


def test_the_least_recently_used_are_given_up_first() -> None:
    allocator = BlockAllocator(6, 4)
    for owner in range(3):
        filled(allocator, owner, [owner] * 8)
    for owner in (1, 0, 2):
        allocator.free(owner)
    allocator.admit(3, 8, names_of([1] * 8))  # used again
    allocator.free(3)
    known = []
    for owner in range(4, 7):
        allocator.admit(owner, 8)
        known.append([allocator.count_known(names_of([each] * 8)) for each in range(3)])
    assert known == [[0, 2, 2], [0, 2, 0], [0, 0, 0]]


def test_what_makes_room_loses_its_end_first() -> None:
    allocator = BlockAllocator(8, 4)
    filled(allocator, 1, [1] * 8)
    filled(allocator, 2, [2] * 24)
    allocator.free(2)
    allocator.allocate(1, 12)
    assert allocator.count_known(names_of([2] * 24)) == 5
    allocator.check_integrity()


def test_full_memory_still_gives_one_run_that_grows() -> None:
    """Requests one after the other that share nothing: each lies in a row, though all memory holds old contents."""
    allocator = BlockAllocator(256, 4)
    in_one_run = 0
    for owner in range(100):
        tokens = [owner] * 40
        filled(allocator, owner, tokens)
        for _ in range(50):
            tokens.append(owner)
            assert allocator.allocate(owner, len(tokens))
        allocator.register(owner, names_of(tokens))
        in_one_run += len(allocator.slots(owner)) == 1
        allocator.free(owner)
    assert in_one_run >= 85, "only at the end of memory there may be two"


def test_twice_the_same_content_is_known_once() -> None:
    allocator = BlockAllocator(8, 2)
    allocator.admit(1, 4)
    allocator.admit(2, 4)
    for owner in (1, 2):
        allocator.register(owner, names_of([5] * 4, 2))
    allocator.free(2)
    assert allocator.num_kept == 0
    allocator.free(1)
    assert allocator.num_kept == 2
    allocator.check_integrity()


def test_damage_is_found() -> None:
    def damaged() -> BlockAllocator:
        allocator = BlockAllocator(4, 1)
        filled(allocator, 1, [1, 2])
        return allocator

    allocator = damaged()
    allocator._num_owners[0] = 2
    with pytest.raises(PippyError, match=r"^cache block 0 has 1 owners, but 2 are counted$"):
        allocator.check_integrity()
    allocator = damaged()
    allocator._known.keep(1)
    with pytest.raises(PippyError, match=re.escape("cache blocks broken at block 2: next known run is (1, 1)")):
        allocator.check_integrity()
    allocator = damaged()
    allocator._known.learn(3, b"name")
    with pytest.raises(PippyError, match=r"^cache block 3 is known by its contents, but nobody keeps it$"):
        allocator.check_integrity()
    allocator = damaged()
    allocator._num_in_free = 1
    with pytest.raises(PippyError, match=r"^1 free cache blocks are counted, not 2$"):
        allocator.check_integrity()
