"""The fifth and sixth launch of sampling: where top-k and top-p cut, then the draw. See
sampling_kernels.py.

Where the list of a row (sampling_gather.py) is proved to hold every kept token it is all that is
looked at; else it is the whole row, read again (from L2) in every step of the searches. A step
looks at three values between the bounds at once and keeps the quarter that holds the answer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_rocm.kernels.sampling_gather import LIST, _blocks_at, _ids, _rank, _total
from inkling_rocm.kernels.sampling_kernels import (
    _NO_ID,
    BLOCK,
    BLOCK_STREAM,
    CUT_ROW,
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
def _weight(x, level, top, COUNT: tl.constexpr):
    """What an element adds at `level`: one or its mass, if its key is as large."""
    weight = tl.exp(x - top)
    if COUNT:  # below 2^24 exact
        weight = tl.full(x.shape, 1.0, tl.float32)
    return tl.where(_key(x) >= level, weight, 0.0)


@triton.jit
def _search(wanted, low, high, x, top, blocks, logits_ptr, edited_ptr, edited,
            temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
            COUNT: tl.constexpr, WHOLE: tl.constexpr, EDITS: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """The largest key in [low, high] with at least `wanted` tokens, or mass, at or above it; low is
    known to have that. x: the list, all that is looked at unless WHOLE."""
    while low < high:
        q1, q2, q3 = _between(low, high, 1), _between(low, high, 2), _between(low, high, 3)
        if WHOLE:
            a = tl.zeros([TILE, BLOCK], tl.float32)
            b, c = a, a
            for j in tl.range(0, blocks, TILE, num_stages=3):
                y = _blocks_at(j + tl.arange(0, TILE), logits_ptr, edited_ptr, edited,
                                    temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                                    EDITS)  # fmt: skip
                a += _weight(y, q1, top, COUNT)
                b += _weight(y, q2, top, COUNT)
                c += _weight(y, q3, top, COUNT)
            in_a, in_b, in_c = _total(a), _total(b), _total(c)
        else:
            in_a = _total(_weight(x, q1, top, COUNT))
            in_b = _total(_weight(x, q2, top, COUNT))
            in_c = _total(_weight(x, q3, top, COUNT))
        a_ok, b_ok, c_ok = in_a >= wanted, in_b >= wanted, in_c >= wanted
        upper = tl.where(b_ok, q3 - 1, tl.where(a_ok, q2 - 1, q1 - 1))
        high = tl.where(c_ok, high, upper)
        low = tl.where(c_ok, q3, tl.where(b_ok, q2, tl.where(a_ok, q1, low)))
    return low


@triton.jit
def _above(level, x, top, blocks, logits_ptr, edited_ptr, edited, temperature_ptr,
           top_k_ptr, row, vocabulary, stride_logits,
           WHOLE: tl.constexpr, EDITS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Number and mass of the tokens above a key."""
    if WHOLE:
        numbers = tl.zeros([TILE, BLOCK], tl.float32)
        masses = numbers
        for j in tl.range(0, blocks, TILE, num_stages=3):
            y = _blocks_at(j + tl.arange(0, TILE), logits_ptr, edited_ptr, edited,
                                temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                                EDITS)  # fmt: skip
            numbers += _weight(y, level + 1, top, True)
            masses += _weight(y, level + 1, top, False)
        number, mass = _total(numbers), _total(masses)
    else:
        number = _total(_weight(x, level + 1, top, True))
        mass = _total(_weight(x, level + 1, top, False))
    return number.to(tl.int32), mass.to(tl.float64)


@triton.jit
def _lowest_kept(level, x, top, total, top_k, top_p, limited, blocks, logits_ptr, edited_ptr,
                 edited, temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                 WHOLE: tl.constexpr, EDITS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The lowest kept key, at least `level`, and how many of the tokens with it are kept."""
    ties = _NO_ID
    if limited:
        level = _search(top_k, level, _key(top), x, top, blocks, logits_ptr,
                        edited_ptr, edited, temperature_ptr, top_k_ptr, row, vocabulary,
                        stride_logits, True, WHOLE, EDITS, TILE)  # fmt: skip
        above, total = _above(level, x, top, blocks, logits_ptr, edited_ptr, edited,
                              temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                              WHOLE, EDITS, TILE)  # fmt: skip
        ties = top_k - above
        total += tl.exp(_value(level) - top).to(tl.float64) * ties
    if top_p < 1.0:
        target = top_p * total
        lowest = level
        level = _search(target, lowest, _key(top), x, top, blocks, logits_ptr,
                        edited_ptr, edited, temperature_ptr, top_k_ptr, row, vocabulary,
                        stride_logits, False, WHOLE, EDITS, TILE)  # fmt: skip
        above, mass = _above(level, x, top, blocks, logits_ptr, edited_ptr, edited,
                             temperature_ptr, top_k_ptr, row, vocabulary, stride_logits,
                             WHOLE, EDITS, TILE)  # fmt: skip
        each = tl.exp(_value(level) - top).to(tl.float64)
        # Ties are kept while less than the target lies before them; the first token always.
        wanted = tl.where(each > 0, (target - mass) / tl.where(each > 0, each, 1.0), 1e9)
        wanted = tl.ceil(tl.minimum(tl.maximum(wanted, 1.0), 1e9)).to(tl.int32)
        ties = tl.where(level == lowest, tl.minimum(ties, wanted), wanted)
    return level, ties


@triton.jit
def _cut_kernel(
    list_ptr, rows_ptr, totals_ptr, edited_ptr, logits_ptr, temperature_ptr, top_k_ptr,
    top_p_ptr, vocabulary, blocks, stride_logits, EDITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes, per row with top-k or top-p: the lowest kept key, how many of the tokens with this
    key are kept (the lowest ids), and how many tokens of the list to draw from, 0 = the whole
    row."""
    row = tl.program_id(0).to(tl.int64)
    facts = rows_ptr + row * 8
    if tl.load(facts) != CUT_ROW:
        return
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    edited = tl.load(facts + 2)
    top = tl.load(facts + 3).to(tl.float32, bitcast=True)
    listed, low = tl.load(facts + 5), tl.load(facts + 6)
    limited = (top_k > 0) & (top_k < vocabulary)
    at = tl.arange(0, LIST // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(list_ptr + row * LIST + at, mask=at < listed, other=float("-inf"))
    total = tl.load(totals_ptr + row)
    # The list holds every token from `low` up: with LOWEST_KEY, every one that can be drawn.
    if limited:
        enough = listed >= top_k
    else:
        enough = _total(_weight(x, low, top, False)) >= top_p * total
    whole = (listed == 0) | ((enough == 0) & (low > LOWEST_KEY))
    low = tl.where(whole, LOWEST_KEY, low)
    # Two copies of the same steps: in the one that reads the whole row, the list would take
    # registers away from the loads.
    if whole:
        level, ties = _lowest_kept(low, x, top, total, top_k, top_p, limited, blocks, logits_ptr,
                                   edited_ptr, edited, temperature_ptr, top_k_ptr, row, vocabulary,
                                   stride_logits, True, EDITS, TILE)  # fmt: skip
    else:
        level, ties = _lowest_kept(low, x, top, total, top_k, top_p, limited, blocks, logits_ptr,
                                   edited_ptr, edited, temperature_ptr, top_k_ptr, row, vocabulary,
                                   stride_logits, False, EDITS, TILE)  # fmt: skip
    tl.debug_barrier()  # every thread has read facts 5 and 6
    tl.store(facts + 5, level)
    tl.store(facts + 6, ties)
    tl.store(facts + 7, tl.where(whole, 0, listed))


@triton.jit
def _draw_kernel(
    tokens_ptr, logprobs_ptr, blocks_in_ptr, list_ptr, list_ids_ptr, rows_ptr, edited_ptr,
    logits_ptr, temperature_ptr,
    top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr, counts_ptr, count_row_ptr,
    vocabulary, blocks, stride_logits, stride_counts,
    EDITS: tl.constexpr, COUNT: tl.constexpr, LOGPROBS: tl.constexpr, CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    facts = rows_ptr + row * 8
    number = tl.load(facts)
    if number == 0:  # the second launch has chosen
        return
    edited = tl.load(facts + 2)
    top = tl.load(facts + 3).to(tl.float32, bitcast=True)
    raw_total = tl.load(facts + 4).to(tl.float32, bitcast=True)
    key = _row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    floor = top + tl.load(log_min_p_ptr + row)
    cut = number == CUT_ROW
    level, ties, listed = LOWEST_KEY, _NO_ID, 0
    if cut:
        level, ties, listed = tl.load(facts + 5), tl.load(facts + 6), tl.load(facts + 7)
        whole = listed == 0
        number = tl.where(whole, blocks, tl.cdiv(listed, BLOCK))
    else:
        whole = (_key(floor) <= tl.load(facts + 1)) & (number < blocks)
        number = tl.where(whole, blocks, number)
    best, chosen, before = float("-inf"), 0, 0
    for j in range(tl.cdiv(number, TILE)):
        at = j * TILE + tl.arange(0, TILE)
        if listed > 0:
            block = at
            place = _ids(at)
            inside = place < listed
            token = tl.load(list_ids_ptr + row * LIST + place, mask=inside, other=_NO_ID)
            x = tl.load(list_ptr + row * LIST + place, mask=inside, other=float("-inf"))
        else:
            some = (at < number) & (whole == 0)
            block = tl.load(blocks_in_ptr + row * CANDIDATES + at, mask=some, other=-1)
            block = tl.where(whole, at, block)
            token = _ids(block)
            x = _blocks_at(block, logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr,
                           row, vocabulary, stride_logits, EDITS)  # fmt: skip
        if cut:
            order = _key(x)
            tied = order == level
            kept = (order > level) | (tied & (before + _rank(tied) <= ties))
            kept &= (x >= floor) & (x > float("-inf"))
            before += tl.sum(tl.sum(tied.to(tl.int32), 1), 0)
            noisy = tl.where(kept, x + _gumbel(key, token, TOKEN_STREAM), float("-inf"))
            most = tl.max(tl.max(noisy, 1), 0)
            first = tl.min(tl.min(tl.where(noisy == most, token, _NO_ID), 1), 0)
        else:  # min-p alone: a block by its log-sum-exp above the floor
            x = tl.where(x >= floor, x, float("-inf"))
            own = tl.max(x, 1)
            sums = tl.sum(tl.exp(x - tl.maximum(own, -1e38)[:, None]), 1)
            noisy_b = tl.log(sums) + own + _gumbel(key, block, BLOCK_STREAM)
            most, first = _best(tl.where(own > float("-inf"), noisy_b, float("-inf")), block)
        chosen = tl.where(most > best, first, chosen)
        best = tl.maximum(best, most)
    if cut == 0:  # then a token in that block
        ids = chosen * BLOCK + tl.arange(0, BLOCK)
        y = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, ids,
                       ids < vocabulary, vocabulary, stride_logits, EDITS)  # fmt: skip
        _, chosen = _choose_in_block(tl.where(y >= floor, y, float("-inf")), ids, key, True)
    _finish(tokens_ptr, logprobs_ptr, logits_ptr, counts_ptr, count_row_ptr, row, chosen, True,
            raw_total, stride_logits, stride_counts, COUNT, LOGPROBS)  # fmt: skip
