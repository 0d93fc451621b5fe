"""No block is lost or has two owners, and a request grows in place where it can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_pippy_handler.errors import PippyError
from ts_pippy_handler.kv_cache import BlockAllocator

OWNERS = range(6)
ACTIONS = st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(0, 40)), max_size=60)


def slots_of(allocator: BlockAllocator, owner: int) -> list[int]:
    return [slot for first, count in allocator.slots(owner) for slot in range(first, first + count)]


@given(st.integers(1, 24), st.integers(1, 4), ACTIONS)
def test_random_traffic_keeps_every_block_accounted_for(num_blocks: int, block_size: int, actions: list) -> None:
    allocator = BlockAllocator(num_blocks, block_size)
    owned: dict[int, list[int]] = {}
    for owner, num_tokens in actions:
        before = {each: slots_of(allocator, each) for each in owned}
        if num_tokens == 0:
            allocator.free(owner)
            owned.pop(owner, None)
        else:
            free, have = allocator.num_free, len(before.get(owner, [])) // block_size
            missing = max(0, -(-num_tokens // block_size) - have)
            granted = allocator.allocate(owner, num_tokens)
            assert granted == (missing <= free)
            if granted:
                slots = slots_of(allocator, owner)
                assert len(slots) == (have + missing) * block_size
                assert slots[: have * block_size] == before.get(owner, []), "blocks that hold tokens must not move"
                owned[owner] = slots
        for each in owned:
            if each != owner:
                assert slots_of(allocator, each) == before[each]
        allocator.check_integrity()
        taken = [slot for each in owned for slot in slots_of(allocator, each)]
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < num_blocks * block_size for slot in taken)
        assert allocator.num_used * block_size == len(taken)
        assert allocator.num_free + allocator.num_used == num_blocks
    for owner in list(owned):
        allocator.free(owner)
    assert allocator.allocate(99, num_blocks * block_size)
    assert allocator.slots(99) == [(0, num_blocks * block_size)], "freed neighbours join again"


def test_a_request_grows_in_place() -> None:
    allocator = BlockAllocator(10, 4)
    for num_tokens in range(1, 41):
        assert allocator.allocate(1, num_tokens)
        assert allocator.slots(1) == [(0, -(-num_tokens // 4) * 4)]


def test_two_requests_that_grow_leave_each_other_room() -> None:
    allocator = BlockAllocator(16, 1)
    allocator.allocate(1, 2)
    allocator.allocate(9, 2)
    allocator.allocate(2, 2)
    allocator.free(9)
    # The gap of 2 behind request 1 would fit; the large one behind request 2 leaves room to grow.
    allocator.allocate(3, 2)
    assert allocator.slots(3) == [(6, 2)]
    allocator.allocate(1, 4)
    assert allocator.slots(1) == [(0, 4)]


def test_requests_admitted_together_grow_to_their_whole_length_in_place() -> None:
    allocator = BlockAllocator(100, 4)
    for owner in range(5):
        assert allocator.admit(owner, 10, num_expected=60) == 0
    for num_tokens in range(11, 61):
        for owner in range(5):
            assert allocator.allocate(owner, num_tokens)
    assert [len(allocator.slots(owner)) for owner in range(5)] == [1] * 5
    allocator.check_integrity()


def test_room_that_is_left_for_others_is_taken_when_nothing_else_is_free() -> None:
    allocator = BlockAllocator(10, 4)
    assert allocator.admit(0, 4, num_expected=40) == 0
    assert allocator.admit(1, 12, num_expected=40) == 0
    assert allocator.slots(1) == [(28, 12)], "the end of what may be needed last"
    assert allocator.allocate(0, 28)
    assert allocator.slots(0) == [(0, 28)]
    assert not allocator.allocate(0, 29)
    allocator.free(1)
    assert allocator.allocate(0, 40)
    assert allocator.slots(0) == [(0, 40)]
    allocator.free(0)
    allocator.check_integrity()
    assert allocator._promised == {}


def test_contents_are_kept_while_there_is_room_that_is_only_promised() -> None:
    allocator = BlockAllocator(128, 16)
    for owner in range(20):
        names = [bytes([owner, block]) for block in range(3)]
        assert allocator.admit(owner, 48, names) == 0
        allocator.register(owner, names)
        allocator.free(owner)
    assert allocator.num_kept == 60
    assert allocator.admit(100, 1, num_expected=1024) == 0
    for owner in range(101, 111):
        assert allocator.admit(owner, 48) == 0
    assert allocator.num_kept == 60
    allocator.check_integrity()


def test_the_room_behind_a_shared_block_is_the_first_ones() -> None:
    allocator = BlockAllocator(100, 16)
    names = [b"a", b"b"]
    assert allocator.admit(1, 32, names, num_expected=160) == 0
    allocator.register(1, names)
    assert allocator.admit(2, 33, names, num_expected=160) == 2
    assert allocator.allocate(1, 160)
    assert allocator.slots(1) == [(0, 160)]
    assert allocator.slots(2) == [(0, 32), (160, 16)]
    allocator.free(2)
    allocator.free(1)
    allocator.check_integrity()
    assert allocator._promised == {}


def test_fragmented_memory_gives_several_runs_in_token_order() -> None:
    allocator = BlockAllocator(6, 2)
    for owner in range(6):
        allocator.allocate(owner, 2)
    for owner in (1, 3, 4):
        allocator.free(owner)
    assert allocator.allocate(7, 6)
    assert allocator.slots(7) == [(6, 4), (2, 2)]
    allocator.check_integrity()


def test_a_refusal_changes_nothing() -> None:
    allocator = BlockAllocator(4, 4)
    assert allocator.allocate(1, 9)
    assert not allocator.allocate(1, 17)
    assert not allocator.allocate(2, 5)
    assert allocator.slots(1) == [(0, 12)]
    assert allocator.num_free == 1
    assert allocator.allocate(2, 4)


def test_an_unknown_owner_has_nothing_to_free() -> None:
    allocator = BlockAllocator(4, 4)
    allocator.free(5)
    assert allocator.num_free == 4


@pytest.mark.parametrize(
    ("free", "message"),
    [
        ([(0, 2), (1, 3)], r"cache blocks broken at block 2: next known run is \(1, 3\)"),
        ([(0, 1), (2, 2)], r"cache blocks broken at block 1: next known run is \(2, 2\)"),
        ([(0, 3)], "cache blocks lost: 3 of 4 accounted for"),
    ],
)
def test_damage_is_found(free: list[tuple[int, int]], message: str) -> None:
    allocator = BlockAllocator(4, 1)
    allocator._free = free
    with pytest.raises(PippyError, match=message):
        allocator.check_integrity()
