"""Page pool bookkeeping on its own."""

import random

import numpy as np
import pytest
import torch

from inkling_rocm.engine.pages import PagePool


def make_pool(pages=20, page_size=4, window=0, slots=4, context_length=64):
    return PagePool(
        layers=(0, 2),
        window=window,
        pages=pages,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=2,
        slots=slots,
        context_length=context_length,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_extend_allocates_whole_pages_and_release_returns_them():
    pool = make_pool()
    assert pool.missing(1, 5) == 2
    pool.extend(1, 5)
    pool.extend(1, 8)
    assert pool.used == 2
    pool.extend(1, 9)
    assert pool.used == 3
    assert len(set(pool.table[1, :3].tolist())) == 3
    assert 0 not in pool.table[1, :3]
    assert not pool.table[1, 3:].any()
    pool.release(1)
    assert pool.used == 0
    assert not pool.table.any()


def test_room_counts_what_is_held_and_free():
    pool = make_pool(pages=5)
    pool.extend(1, 3)
    assert pool.room(1) == 16
    assert pool.room(2) == 12


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_keeps_exactly_the_visible_pages(window, page_size):
    pool = make_pool(pages=60, page_size=page_size, window=window)
    for position in range(50):
        pool.trim(1, position)
        pool.extend(1, position + 1)
        first_visible = max(position - (window - 1), 0)
        assert pool.first[1] == first_visible // page_size
        live = np.arange(first_visible // page_size, position // page_size + 1)
        assert (pool.table[1, live] > 0).all()
        assert pool.used == len(live)


@pytest.mark.parametrize("window", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_pages_for_is_the_most_that_is_ever_held(window, chunk):
    for tokens in range(1, 40):
        pool = make_pool(pages=60, window=window)
        most, at = 0, 0
        while at < tokens:
            step = min(chunk, tokens - at)
            pool.trim(1, at)
            pool.extend(1, at + step)
            most, at = max(most, pool.used), at + step
        assert most <= pool.pages_for(tokens, chunk)
        if not window:
            assert most == pool.pages_for(tokens, chunk)


def test_fork_shares_full_pages_and_copies_the_partial_one():
    pool = make_pool()
    pool.extend(1, 10)
    pool.storage.copy_(torch.arange(pool.storage.numel()).view(pool.storage.shape))
    pool.take_changes(np.array([1]))
    pool.fork(1, 2, 10, 10)
    changes = pool.take_changes(np.array([1, 2]))
    assert changes.entries.tolist() == [[2, i, pool.table[2, i]] for i in range(3)]
    pool.copy_pages(changes.copies)
    assert pool.used == 4
    assert (pool.table[1, :2] == pool.table[2, :2]).all()
    mine, copied = pool.table[1, 2], pool.table[2, 2]
    assert mine != copied
    assert torch.equal(pool.storage[:, :, mine], pool.storage[:, :, copied])
    pool.release(1)
    assert pool.used == 3
    assert (pool.table[2, :3] > 0).all()
    pool.release(2)
    assert pool.used == 0


def test_fork_of_a_trimmed_window():
    pool = make_pool(window=4)
    for position in range(21):
        pool.trim(1, position)
        pool.extend(1, position + 1)
    pool.fork(1, 2, 21, 21)
    assert pool.first[2] == pool.first[1] == 4
    assert pool.references[pool.table[1, 4]] == 2
    for position in range(21, 30):
        pool.trim(2, position)
        pool.extend(2, position + 1)
    assert pool.references[pool.table[1, 4]] == 1
    pool.release(1)
    pool.release(2)
    assert pool.used == 0


def test_batch_tables_and_write_slots_agree_with_the_full_table():
    rng = random.Random(0)
    pool = make_pool(pages=40, window=5, slots=6)
    lengths = {slot: rng.randrange(1, 30) for slot in range(1, 6)}
    for slot, length in lengths.items():
        for position in range(length):
            pool.trim(slot, position)
            pool.extend(slot, position + 1)
    slots = np.array([3, 0, 1, 5])
    table = pool.batch_table(slots)
    for row, slot in enumerate(slots):
        first, end = pool.first[slot], pool.end[slot]
        assert (table[row, : end - first] == pool.table[slot, first:end]).all()
        assert not table[row, end - first :].any()
    positions = np.array([lengths[3] - 1, 0, lengths[1] - 1, lengths[5] - 1])
    written = pool.write_slots(slots, positions)
    assert written[1] == 0
    assert (written % 4 == positions % 4).all()
    assert (written // 4 == pool.table[slots, positions // 4]).all()


def test_random_use_never_loses_or_doubles_a_page():
    rng = random.Random(1)
    pool = make_pool(pages=12, window=6, slots=5, context_length=200)
    length = [0] * 5
    for _ in range(3000):
        slot = rng.randrange(1, 5)
        action = rng.random()
        if action < 0.75 and length[slot] < 199:
            pool.trim(slot, length[slot])
            if pool.missing(slot, length[slot] + 1) <= pool.free:
                pool.extend(slot, length[slot] + 1)
                length[slot] += 1
        elif action < 0.9:
            pool.release(slot)
            length[slot] = 0
        else:
            target = rng.randrange(1, 5)
            if length[target] == 0 and target != slot and length[slot] and pool.free:
                pool.fork(slot, target, length[slot], length[slot])
                length[target] = length[slot]
        held: dict[int, int] = {}
        for s in range(1, 5):
            for page in pool.table[s, pool.first[s] : pool.end[s]].tolist():
                held[page] = held.get(page, 0) + 1
        assert 0 not in held
        assert all(pool.references[page] == count for page, count in held.items())
        assert pool.free + len(held) == pool.total
