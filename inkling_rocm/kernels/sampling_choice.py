"""The third launch of sampling: cut by top-k, top-p and min-p, then choose. See
sampling_kernels.py.

The candidates of a row are one tile of CANDIDATES blocks. When they are proved to hold every kept
token the row is that one tile, loaded once; else it is all of its blocks, tile by tile, and every
step of the searches reads them again (from L2). A step looks at three values between the bounds at
once and keeps the quarter that holds the answer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_rocm.kernels.sampling_kernels import (
    _NO_ID,
    BLOCK,
    BLOCK_STREAM,
    LOWEST_KEY,
    TOKEN_STREAM,
    _best,
    _between,
    _choose_in_block,
    _finish,
    _gumbel,
    _key,
    _row_key,
    _value,
    _values_at,
)


@triton.jit
def _tile(j, tiles, listed, logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row,
          vocabulary, stride_logits, EDITS: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    """(x, ids) of the candidates, or of the j-th CANDIDATES blocks of the row, ids ascending."""
    block = tl.where(tiles == 1, listed, j * CANDIDATES + tl.arange(0, CANDIDATES))
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = (block >= 0)[:, None] & (token < vocabulary)
    x = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, token, real,
                   vocabulary, stride_logits, EDITS)  # fmt: skip
    return x, token


@triton.jit
def _rank(level):
    """Number of true elements up to and including each, in row-major order."""
    ones = level.to(tl.int32)
    each = tl.sum(ones, 1)
    return (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1)


@triton.jit
def _total(per_element):
    return tl.sum(tl.sum(per_element, 1), 0)


@triton.jit
def _weight(x, key, level, top, COUNT: tl.constexpr):
    """What an element adds at `level`: one or its mass, if it is as large."""
    mass = tl.exp(x - top)
    if COUNT:  # counts below 2^24 are exact
        mass = tl.full(x.shape, 1.0, tl.float32)
    return tl.where(key >= level, mass, 0.0)


@triton.jit
def _search(wanted, low, high, x, top, tiles, listed, logits_ptr, edited_ptr, edited,
            temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
            COUNT: tl.constexpr, EDITS: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    """The largest key in [low, high] with at least `wanted` tokens, or mass, at or above it; low is
    known to have that."""
    while low < high:
        q1, q2, q3 = _between(low, high, 1), _between(low, high, 2), _between(low, high, 3)
        key = _key(x)
        a = _weight(x, key, q1, top, COUNT)
        b = _weight(x, key, q2, top, COUNT)
        c = _weight(x, key, q3, top, COUNT)
        for j in tl.range(1, tiles, num_stages=3):
            y, _ = _tile(j, tiles, listed, logits_ptr, edited_ptr, edited, temperature_ptr,
                         top_k_ptr, row, vocabulary, stride_logits, EDITS, CANDIDATES)  # fmt: skip
            key = _key(y)
            a += _weight(y, key, q1, top, COUNT)
            b += _weight(y, key, q2, top, COUNT)
            c += _weight(y, key, q3, top, COUNT)
        a_ok, b_ok, c_ok = _total(a) >= wanted, _total(b) >= wanted, _total(c) >= wanted
        low, high = (
            tl.where(c_ok, q3, tl.where(b_ok, q2, tl.where(a_ok, q1, low))),
            tl.where(c_ok, high, tl.where(b_ok, q3 - 1, tl.where(a_ok, q2 - 1, q1 - 1))),
        )
    return low


@triton.jit
def _above(level, x, top, tiles, listed, logits_ptr, edited_ptr, edited, temperature_ptr,
           top_k_ptr, row, vocabulary, stride_logits,
           EDITS: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    """Number and mass of the tokens above a key."""
    key = _key(x)
    number = (key > level).to(tl.int32)
    mass = tl.where(key > level, tl.exp(x - top), 0.0)
    for j in tl.range(1, tiles, num_stages=3):
        y, _ = _tile(j, tiles, listed, logits_ptr, edited_ptr, edited, temperature_ptr,
                     top_k_ptr, row, vocabulary, stride_logits, EDITS, CANDIDATES)  # fmt: skip
        key = _key(y)
        number += (key > level).to(tl.int32)
        mass += tl.where(key > level, tl.exp(y - top), 0.0)
    return _total(number), _total(mass).to(tl.float64)


@triton.jit
def _choose_kernel(
    tokens_ptr, logprobs_ptr, blocks_in_ptr, rows_in_ptr, totals_in_ptr, edited_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr,
    counts_ptr, count_row_ptr, vocabulary, blocks, stride_logits, stride_counts,
    EDITS: tl.constexpr, LOGPROBS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    listed_number = tl.load(rows_in_ptr + row * 5)
    if listed_number == 0:  # the second launch has chosen
        return
    bound = tl.load(rows_in_ptr + row * 5 + 1)
    edited = tl.load(rows_in_ptr + row * 5 + 2)
    top = tl.load(rows_in_ptr + row * 5 + 3).to(tl.float32, bitcast=True)
    raw_total = tl.load(rows_in_ptr + row * 5 + 4).to(tl.float32, bitcast=True)
    key = _row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    floor = top + tl.load(log_min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    limited = (top_k > 0) & (top_k < vocabulary)
    cut = (top_k > 0) | (top_p < 1.0)
    c = tl.arange(0, CANDIDATES)
    listed = tl.load(blocks_in_ptr + row * CANDIDATES + c, mask=c < listed_number, other=-1)
    x, token = _tile(0, 1, listed, logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row,
                     vocabulary, stride_logits, EDITS, CANDIDATES)  # fmt: skip
    total = tl.load(totals_in_ptr + row)
    # Every value above `bound` lies in a candidate block.
    safe = _key(x) > bound
    start = tl.where(listed_number == blocks, LOWEST_KEY, bound)
    if cut:
        if limited:
            enough = (top_k <= CANDIDATES) | (_total(safe.to(tl.int32)) >= top_k)
        else:
            enough = _total(tl.where(safe, tl.exp(x - top), 0.0)) >= top_p * total
    else:
        enough = _key(floor) > bound
    enough = enough | (listed_number == blocks)
    start = tl.where(enough, start, LOWEST_KEY)
    tiles = tl.where(enough, 1, tl.cdiv(blocks, CANDIDATES))
    if tiles > 1:  # the candidates make way for the first tile of the whole row
        x, token = _tile(0, tiles, listed, logits_ptr, edited_ptr, edited, temperature_ptr,
                         top_k_ptr, row, vocabulary, stride_logits, EDITS,
                         CANDIDATES)  # fmt: skip

    if cut:
        level, ties = start, _NO_ID
        if limited:
            level = _search(top_k, start, _key(top), x, top, tiles, listed, logits_ptr, edited_ptr,
                            edited, temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                            True, EDITS, CANDIDATES)  # fmt: skip
            above, total = _above(level, x, top, tiles, listed, logits_ptr, edited_ptr, edited,
                                  temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                                  EDITS, CANDIDATES)  # fmt: skip
            ties = top_k - above
            total += tl.exp(_value(level) - top).to(tl.float64) * ties
        if top_p < 1.0:
            target = top_p * total
            lowest = level
            level = _search(target, lowest, _key(top), x, top, tiles, listed, logits_ptr,
                            edited_ptr, edited, temperature_ptr, top_k_ptr, row, vocabulary,
                            stride_logits, False, EDITS, CANDIDATES)  # fmt: skip
            _, mass = _above(level, x, top, tiles, listed, logits_ptr, edited_ptr, edited,
                             temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                             EDITS, CANDIDATES)  # fmt: skip
            each = tl.exp(_value(level) - top).to(tl.float64)
            # Ties are kept while less than the target lies before them; the first token always.
            wanted = tl.where(each > 0, (target - mass) / tl.where(each > 0, each, 1.0), 1e9)
            wanted = tl.ceil(tl.minimum(tl.maximum(wanted, 1.0), 1e9)).to(tl.int32)
            ties = tl.where(level == lowest, tl.minimum(ties, wanted), wanted)
        best, chosen, before = float("-inf"), 0, 0
        for j in range(tiles):
            if j > 0:
                x, token = _tile(j, tiles, listed, logits_ptr, edited_ptr, edited,
                                 temperature_ptr, top_k_ptr, row, vocabulary,
                                 stride_logits, EDITS, CANDIDATES)  # fmt: skip
            order = _key(x)
            tied = order == level
            kept = (order > level) | (tied & (before + _rank(tied) <= ties))
            kept &= (x >= floor) & (x > float("-inf"))
            before += _total(tied.to(tl.int32))
            noisy = tl.where(kept, x + _gumbel(key, token, TOKEN_STREAM), float("-inf"))
            most = tl.max(tl.max(noisy, 1), 0)
            first = tl.min(tl.min(tl.where(noisy == most, token, _NO_ID), 1), 0)
            chosen = tl.where(most > best, first, chosen)
            best = tl.maximum(best, most)
    else:  # min-p alone: a block by its log-sum-exp above the floor, then a token in it
        best, block = float("-inf"), 0
        for j in range(tiles):
            if j > 0:
                x, token = _tile(j, tiles, listed, logits_ptr, edited_ptr, edited,
                                 temperature_ptr, top_k_ptr, row, vocabulary,
                                 stride_logits, EDITS, CANDIDATES)  # fmt: skip
            x = tl.where(x >= floor, x, float("-inf"))
            own = tl.max(x, 1)
            sums = tl.sum(tl.exp(x - tl.maximum(own, -1e38)[:, None]), 1)
            at = tl.where(tiles == 1, listed, j * CANDIDATES + c)
            noisy = tl.log(sums) + own + _gumbel(key, at, BLOCK_STREAM)
            most, first = _best(tl.where(own > float("-inf"), noisy, float("-inf")), at)
            block = tl.where(most > best, first, block)
            best = tl.maximum(best, most)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        y = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, ids,
                       ids < vocabulary, vocabulary, stride_logits, EDITS)  # fmt: skip
        _, chosen = _choose_in_block(tl.where(y >= floor, y, float("-inf")), ids, key, True)
    _finish(tokens_ptr, logprobs_ptr, logits_ptr, counts_ptr, count_row_ptr, row, chosen, True,
            raw_total, stride_logits, stride_counts, EDITS, LOGPROBS)  # fmt: skip
