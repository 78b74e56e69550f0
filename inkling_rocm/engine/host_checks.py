"""The host invariants as assertions, for tests and for hunting a fault in the field.

I1 every key a row may see lies in its page table; I2 tokens without a slot belong to dummy rows, or
lie behind the allocated pages (in rounds, host/round.py); I5 host bounds bound the device lengths;
I6 rows may be empty; I7 no two rows share a writable slot.
(I3, re-running overwrites, and I4, independence of the batch, are properties of a run:
tests/host_invariants.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from inkling_rocm.host import Host

if TYPE_CHECKING:
    from inkling_rocm.engine.pages import PagePool


class PooledHost(Host, Protocol):
    """A host over page pools."""

    pools: tuple[PagePool, ...]


def check_step(host: PooledHost) -> None:
    """Raises: AssertionError: an invariant is broken; the message names it."""
    meta = host.meta
    cu_seqlens = meta.cu_seqlens_q.cpu().numpy().astype(np.int64)
    q_start, kv_len = meta.q_start.cpu().numpy(), meta.kv_len.cpu().numpy()
    q_len = np.diff(cu_seqlens)
    assert cu_seqlens[0] == min(0, q_len.min(initial=0)), f"I6: cu_seqlens_q {cu_seqlens}"
    assert cu_seqlens[-1] == meta.num_tokens, f"I6: {cu_seqlens[-1]} != {meta.num_tokens} tokens"
    assert (kv_len == q_start + q_len).all(), f"kv_len {kv_len} != {q_start} + {q_len}"
    assert q_len.max(initial=0) <= meta.max_q, f"I5: max_q {meta.max_q} < {q_len.max()}"
    assert kv_len.max(initial=0) <= meta.max_kv, f"I5: max_kv {meta.max_kv} < {kv_len.max()}"

    ring = host.conv(0, "k")
    slots = ring.slot.cpu().numpy()
    real = slots[slots > 0]
    assert len(real) == len(set(real.tolist())), f"I7: two rows share a ring slot: {slots}"
    history = ring.history.cpu().numpy()
    assert (history <= q_start).all(), f"history {history} reaches before position 0 of {q_start}"
    for pool in host.pools:
        _check_pool(host, pool, slots, q_start, kv_len)


def _check_pool(host: PooledHost, pool: PagePool, slots, q_start, kv_len) -> None:
    view, page_size = host.kv(pool.layers[0]), pool.page_size
    table, first = view.page_table.cpu().numpy(), view.first_page.cpu().numpy()
    write = view.slot.cpu().numpy()
    token_row = host.meta.token_row.cpu().numpy()
    positions = host.meta.positions.cpu().numpy()
    written = write[write > 0]
    assert len(written) == len(set(written.tolist())), f"I7: {pool.name} slots written twice"
    covered = pool.end.astype(np.int64) * page_size  # positions with a page, by sequence slot
    real_tokens = (slots[token_row] > 0) & (positions < covered[slots[token_row]])
    assert ((write > 0) == real_tokens).all(), f"I2: {pool.name} slots, dummy rows, missing pages"
    for row in np.flatnonzero(slots):
        floor = max(int(q_start[row]) - (pool.window - 1), 0) if pool.window else 0
        end = min(int(kv_len[row]), int(covered[slots[row]]))
        pages = np.arange(floor // page_size, -(-end // page_size)) - first[row]
        assert (pages >= 0).all(), f"I1: {pool.name} row {row}: a visible page was freed"
        assert (table[row, pages] > 0).all(), f"I1: {pool.name} row {row}: a visible page is unset"
    real = np.flatnonzero(write)
    page = table[token_row[real], positions[real] // page_size - first[token_row[real]]]
    expected = page.astype(np.int64) * page_size + positions[real] % page_size
    assert (write[real] == expected).all(), f"I1: {pool.name} writes go where the table is not"
    shared = [p for p in set((written // page_size).tolist()) if pool.references[p] != 1]
    assert not shared, f"I7: {pool.name} pages {shared} are written while shared"
