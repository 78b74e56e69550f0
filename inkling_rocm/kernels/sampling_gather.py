"""The third and fourth launch of sampling: the head of each row with top-k or top-p, as a list.

LEVELS values between a row's maximum and a low block maximum (facts 1) are tried; the last is below
every finite value. `_count_kernel` counts, per CHUNK ids and level, the tokens at or above it;
`_gather_kernel` takes the lowest level that no more than LIST tokens reach and writes these, by id
ascending. So what the cut looks at is as much of the head as fits, however the ids lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_rocm.kernels.sampling_kernels import BLOCK, CUT_ROW, LOWEST_KEY, _key, _values_at

LIST = tl.constexpr(4096)
LEVELS = tl.constexpr(16)
CHUNK_BLOCKS = tl.constexpr(16)
_WIDE = tl.constexpr(32.0)  # where too few blocks have a finite value to tell how deep to look


@triton.jit
def _ids(block):
    return block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _blocks_at(block, logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, vocabulary,
               stride_logits, EDITS: tl.constexpr):  # fmt: skip
    """x of some blocks; -1 is an empty one."""
    token = _ids(block)
    real = (block >= 0)[:, None] & (token < vocabulary)
    x = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, token, real,
                   vocabulary, stride_logits, EDITS)  # fmt: skip
    return x


@triton.jit
def _total(per_element):
    return tl.sum(tl.sum(per_element, 1), 0)


@triton.jit
def _level_key(j, top, low):
    """The key of level j: LEVELS - 1 equal steps from top down to low, then every finite value."""
    depth = tl.where(low > float("-inf"), top - low, _WIDE)
    value = top - depth * ((j + 1).to(tl.float32) / (LEVELS - 1))
    return tl.where(j == LEVELS - 1, LOWEST_KEY + 1, tl.maximum(_key(value), LOWEST_KEY + 1))


@triton.jit
def _levels_of(facts):
    """The row's maximum and the block maximum below it that bounds the levels."""
    return (
        tl.load(facts + 3).to(tl.float32, bitcast=True),
        tl.load(facts + 1).to(tl.float32, bitcast=True),
    )


@triton.jit
def _chosen_level(counts_ptr, row, chunk, chunks, CHUNKS: tl.constexpr):
    """(level, tokens at or above it in the row, those in chunks before `chunk`); level -1: even the
    first has more than LIST."""
    j, c = tl.arange(0, LEVELS), tl.arange(0, CHUNKS)
    counts = tl.load(
        counts_ptr + (row * LEVELS + j[:, None]) * chunks + c[None, :],
        mask=(c < chunks)[None, :],
        other=0,
    )
    totals = tl.sum(counts, 1)  # grows with the level
    level = tl.sum((totals <= LIST).to(tl.int32), 0) - 1
    total = tl.sum(tl.where(j == level, totals, 0), 0)
    before = tl.sum(tl.where(c[None, :] < chunk, counts, 0), 1)
    return level, total, tl.sum(tl.where(j == level, before, 0), 0)


@triton.jit
def _count_kernel(
    counts_ptr, rows_ptr, edited_ptr, logits_ptr, temperature_ptr, top_k_ptr,
    vocabulary, chunks, stride_logits, EDITS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    facts = rows_ptr + row * 8
    if tl.load(facts) != CUT_ROW:
        return
    top, low = _levels_of(facts)
    block = chunk * CHUNK_BLOCKS + tl.arange(0, CHUNK_BLOCKS)
    order = _key(_blocks_at(block, logits_ptr, edited_ptr, tl.load(facts + 2), temperature_ptr,
                            top_k_ptr, row, vocabulary, stride_logits, EDITS))  # fmt: skip
    for j in range(LEVELS):
        at_or_above = order >= _level_key(j, top, low)
        tl.store(counts_ptr + (row * LEVELS + j) * chunks + chunk, _total(at_or_above.to(tl.int32)))


@triton.jit
def _gather_kernel(
    list_ptr, list_ids_ptr, rows_ptr, counts_ptr, edited_ptr, logits_ptr, temperature_ptr,
    top_k_ptr, vocabulary, chunks, stride_logits, EDITS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Writes the list, and to facts 5 and 6 how long it is and its level's key; no tokens: the
    whole row must be looked at."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    facts = rows_ptr + row * 8
    if tl.load(facts) != CUT_ROW:
        return
    top, low = _levels_of(facts)
    level, total, before = _chosen_level(counts_ptr, row, chunk, chunks, CHUNKS)
    key = _level_key(level, top, low)
    if chunk == 0:
        tl.store(facts + 5, tl.where(level < 0, 0, total))
        tl.store(facts + 6, tl.where(level == LEVELS - 1, LOWEST_KEY, key))
    if level >= 0:
        block = chunk * CHUNK_BLOCKS + tl.arange(0, CHUNK_BLOCKS)
        x = _blocks_at(block, logits_ptr, edited_ptr, tl.load(facts + 2), temperature_ptr,
                       top_k_ptr, row, vocabulary, stride_logits, EDITS)  # fmt: skip
        taken = _key(x) >= key
        at = row * LIST + before + _rank(taken) - 1
        tl.store(list_ptr + at, x, mask=taken)
        tl.store(list_ids_ptr + at, _ids(block), mask=taken)


@triton.jit
def _rank(level):
    """Number of true elements up to and including each, in row-major order."""
    ones = level.to(tl.int32)
    each = tl.sum(ones, 1)
    return (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1)
