"""The host tier, alone and over the disk tier."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
import torch

from inkling_rocm.engine.prefix_cache.blocks import (
    DEFAULT_BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    Blocks,
    block_bytes_for,
)
from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.store import HostStore
from tests.engine.prefix_cache.entries import (
    DATA_BYTES,
    FINGERPRINT,
    file_of,
    held,
    key_of,
    put,
    same_bits,
    tensors_of,
)

BLOCK = 64
ENTRY_BLOCKS = -(-DATA_BYTES // BLOCK)
PLENTY = 1 << 30


@contextlib.contextmanager
def host(entries: float, lower=None, block_bytes=BLOCK):
    """A store with room for so many entries."""
    store = HostStore(int(entries * ENTRY_BLOCKS * BLOCK), lower, block_bytes=block_bytes)
    try:
        yield store
    finally:
        if isinstance(lower, SlowDisk):
            lower.go.set()
        store.close()


def disk(folder, capacity=PLENTY) -> DiskStore:
    return DiskStore(folder, capacity, FINGERPRINT)


class SlowDisk(DiskStore):
    """Writes nothing until it is let."""

    def __init__(self, folder):
        super().__init__(folder, PLENTY, FINGERPRINT)
        self.go = threading.Event()
        self.begun = threading.Event()

    def write(self, key, layout, data):
        self.begun.set()
        assert self.go.wait(30)
        return super().write(key, layout, data)


@pytest.mark.parametrize("block_bytes", [1, BLOCK - 1, BLOCK, 2 * DATA_BYTES])
def test_what_was_put_is_got_bit_by_bit(block_bytes):
    store = HostStore(6 * DATA_BYTES, block_bytes=block_bytes)
    put(store, 0, 1, 2)
    assert held(store, range(4)) == [0, 1, 2]
    stats = store.stats()
    assert (stats.entries, stats.bytes) == (3, 3 * DATA_BYTES)
    assert (stats.hits, stats.misses) == (3, 1)
    assert (stats.bytes_in, stats.bytes_out) == (3 * DATA_BYTES, 3 * DATA_BYTES)
    store.close()


def test_what_is_given_out_and_taken_in_belongs_to_the_caller():
    with host(2) as store:
        mine = tensors_of(key_of(0))
        store.put(key_of(0), mine)
        mine["kv"].zero_()
        store.get(key_of(0))["kv"].zero_()
        first = store.get(key_of(0))
        put(store, 1, 2, 3)
        assert same_bits(first, tensors_of(key_of(0)))


def test_the_least_recently_used_goes_and_the_capacity_is_exact():
    with host(3.9) as store:
        put(store, 0, 1, 2)
        assert held(store, [0]) == [0]
        put(store, 1)
        put(store, 3)
        assert store.resident(key_of(0))
        assert not store.resident(key_of(2))
        put(store, 4)
        assert held(store, range(5)) == [1, 3, 4]
        stats = store.stats()
        assert (stats.entries, stats.bytes, stats.evictions) == (3, 3 * DATA_BYTES, 2)


def test_entries_of_different_sizes_share_the_memory():
    rng = random.Random(0)
    with host(8) as store:
        sizes = {number: rng.choice([6, 12, 96, 300]) for number in range(400)}
        wanted = {n: tensors_of(key_of(n), values) for n, values in sizes.items()}
        for number, tensors in wanted.items():
            store.put(key_of(number), tensors)
            assert same_bits(store.get(key_of(number)), tensors)
            other = rng.randrange(number + 1)
            got = store.get(key_of(other))
            assert got is None or same_bits(got, wanted[other])
        stats = store.stats()
        kept = [number for number in sizes if store.resident(key_of(number))]
        assert stats.bytes == sum(6 * sizes[number] for number in kept)
        blocks = sum(-(-6 * sizes[number] // BLOCK) for number in kept)
        assert blocks + store._blocks.free == store._blocks.total


def test_an_entry_larger_than_the_tier_is_dropped_and_costs_no_other():
    with host(1) as store:
        put(store, 0)
        store.put(key_of(1), tensors_of(key_of(1), 9_000))
        assert store.stats().dropped == 1
        assert held(store, range(2)) == [0]


def test_a_capacity_below_a_block_is_refused():
    with pytest.raises(ValueError, match="capacity_bytes 63 of the host tier is less than a block"):
        HostStore(63, block_bytes=64)


def test_evicted_entries_come_back_from_the_disk(tmp_path):
    with host(3, disk(tmp_path)) as store:
        for number in range(10):
            put(store, number)
            store.flush()
        assert [n for n in range(10) if store.resident(key_of(n))] == [7, 8, 9]
        assert all(store.contains(key_of(number)) for number in range(10))
        assert not store.contains(key_of(10))
        assert held(store, range(11)) == list(range(10))
        assert store.stats().dropped == 0
        assert store.lower.stats().hits == 10  # each pushes out the one that is asked for next


def test_what_the_disk_has_is_not_written_again(tmp_path):
    with host(2, disk(tmp_path)) as store:
        for number in (0, 1, 2, 0, 1, 2):
            put(store, number)
            store.flush()
        held(store, range(3))
        store.flush()
        assert store.lower.stats().bytes_in == store.lower.stats().bytes


def test_closing_writes_everything_and_a_new_store_finds_it(tmp_path):
    with host(8, disk(tmp_path)) as store:
        put(store, *range(8))
    with host(8, disk(tmp_path)) as store:
        assert held(store, range(9)) == list(range(8))
        assert store.stats().hits == 0
        assert held(store, range(9)) == list(range(8))
        assert store.stats().hits == 8


def test_damage_on_disk_is_a_miss(tmp_path):
    with host(1, disk(tmp_path)) as store:
        put(store, 0)
        store.flush()
        put(store, 1)
        store.flush()
        file = file_of(store.lower, 0)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert held(store, range(2)) == [1]
        assert store.lower.stats().corrupt == 1
        assert store._blocks.free == 0
        put(store, 0)
        store.flush()
        assert held(store, [1, 0]) == [1, 0]


def test_nothing_waits_for_a_slow_disk_and_the_oldest_unwritten_are_dropped(tmp_path):
    lower = SlowDisk(tmp_path)
    with host(4, lower) as store:
        put(store, 0)
        assert lower.begun.wait(30)
        put(store, *range(1, 10))  # 0 is being written and stays
        stats = store.stats()
        assert (stats.evictions, stats.dropped) == (6, 6)
        assert held(store, range(10)) == [0, 7, 8, 9]
    with host(4, disk(tmp_path)) as store:
        assert held(store, range(10)) == [0, 7, 8, 9]


def test_an_entry_without_room_beside_the_one_being_written_is_dropped(tmp_path):
    lower = SlowDisk(tmp_path)
    with host(1, lower) as store:
        put(store, 0)
        assert lower.begun.wait(30)
        put(store, 1)
        assert store.stats().dropped == 1
        assert held(store, [0]) == [0]


def test_prefetched_entries_need_no_disk(tmp_path):
    written = disk(tmp_path)
    put(written, *range(8))
    with host(8, disk(tmp_path)) as store:
        store.prefetch(key_of(number) for number in (2, 3, 50))
        wait_for(store, range(8))
        assert [number for number in range(8) if store.resident(key_of(number))] == [2, 3]
        for file in tmp_path.iterdir():
            file.unlink()
        assert held(store, range(8)) == [2, 3]
        assert store.stats().hits == 2


def wait_for(store, numbers) -> None:
    deadline = time.monotonic() + 30
    while any(store.loading(key_of(number)) for number in numbers):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_prefetch_leaves_room_for_others(tmp_path):
    put(disk(tmp_path), *range(40))
    gate = threading.Event()

    class Waiting(DiskStore):
        def read(self, key, allocate):
            assert gate.wait(30)
            return super().read(key, allocate)

    with host(10, Waiting(tmp_path, PLENTY, FINGERPRINT)) as store:
        put(store, *range(100, 110))
        store.prefetch(key_of(number) for number in range(40))
        begun = [number for number in range(40) if store.loading(key_of(number))]
        assert begun == list(range(len(begun)))
        assert 1 < len(begun) <= 5
        gate.set()
        wait_for(store, range(40))
        store.prefetch(key_of(number) for number in begun)  # nothing is left over
        assert held(store, begun) == begun
        assert store._loading_bytes == 0
        assert store.resident(key_of(109))


@pytest.mark.parametrize("wait_s", [0, 0.001, 0.01])
def test_a_get_meets_a_prefetch_under_way(tmp_path, wait_s):
    put(disk(tmp_path), *range(30))
    with host(60, disk(tmp_path)) as store:
        store.prefetch(key_of(number) for number in range(30))
        time.sleep(wait_s)
        assert held(store, range(29, -1, -1)) == list(range(29, -1, -1))
        assert store.stats().entries == 30
        assert store._loading_bytes == 0


def test_put_get_prefetch_and_eviction_at_once(tmp_path):
    """Random use with a disk smaller than what is put; every answer is right."""
    rng = random.Random(1)
    with host(6, disk(tmp_path, 12 * 1200)) as store:
        for _ in range(600):
            number = rng.randrange(30)
            match rng.randrange(4):
                case 0:
                    put(store, number)
                case 1:
                    store.prefetch(key_of(n) for n in range(number, number + 4))
                case _:
                    held(store, [number])
        store.flush()
        wait_for(store, range(40))
        stats = store.stats()
        resident = [number for number in range(40) if store.resident(key_of(number))]
        assert stats.bytes == len(resident) * DATA_BYTES
        assert store._blocks.free == store._blocks.total - len(resident) * ENTRY_BLOCKS
        assert (store.lower.stats().corrupt, store.lower.stats().errors) == (0, 0)
        assert store.lower.stats().bytes <= 12 * 1200


def test_block_size_follows_the_entries():
    assert block_bytes_for([3 << 20, 14 << 20, 5 << 20]) == 1 << 20
    assert block_bytes_for([360_000]) == 64 * 1024 // 2
    assert block_bytes_for([100]) == SMALLEST_BLOCK_BYTES
    for size in (50_000, 123_456, 10 << 20):
        block = block_bytes_for([size])
        assert -size % block <= size / 16 or block == SMALLEST_BLOCK_BYTES


def test_blocks_lie_in_parts_and_are_never_two_entries(monkeypatch):
    monkeypatch.setattr("inkling_rocm.engine.prefix_cache.blocks.PART_BYTES", 40)
    blocks = Blocks(165, 16, pin=False)
    assert (blocks.total, blocks.free, DEFAULT_BLOCK_BYTES % 4096) == (10, 10, 0)
    taken = blocks.take(10)
    for number, block in enumerate(taken):
        (piece,) = blocks.pieces([block], 16)
        piece.fill_(number)
    values = torch.cat(blocks.pieces(taken, 150))
    assert values.tolist() == [number for number in range(10) for _ in range(16)][:150]
