"""Sampling in six launches: block statistics, bounds, count, gather, the cut, the draw.

    x     = edited logit / temperature
    order = by x descending, equal values by id ascending
    kept  = top-k of the order, then those before which less than top_p of the mass lies,
            then those with x >= max + log(min_p)
    token = arg-max over kept of x + Gumbel(key of the row, id)       (Gumbel-max)

Nothing is sorted. A block is BLOCK neighbouring ids. `_scan_kernel` reads the logits once and
leaves every block's maximum and sum of exponentials. Of rows with top-k or top-p,
sampling_gather.py then lists the head, some thousand tokens; sampling_choice.py searches the lowest
kept value in the list (counts for top-k, masses for top-p), or in the whole row where the list does
not hold all that may be kept, and draws. `_bound_kernel` prepares that: how deep the list should
reach, and for rows with min-p alone the CANDIDATES blocks with the largest maxima.
Rows without top-k and top-p choose a block by its log-sum-exp first and a token in it second, as
inkling_rocm.engine.sampler does; so do greedy rows, by the maximum.

Sums are added in a fixed order: a row's token depends on nothing
but the row. Random numbers are those of inkling_rocm.engine.random (splitmix64 of a key and a
counter); the Gumbel transform is fp32 here.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
# The finaliser of 1 and 2: engine.sampler's streams for blocks and tokens.
BLOCK_STREAM = tl.constexpr(0x5692161D100B05E5)
TOKEN_STREAM = tl.constexpr(0xDBD238973A2B148A)
LOWEST = tl.constexpr(-3.4028234663852886e38)
_NO_ID = tl.constexpr(2147483647)
LOWEST_KEY = tl.constexpr(-2139095041)  # _key of -inf
GREEDY_BELOW = tl.constexpr(1e-6)
CUT_ROW = tl.constexpr(-1)  # facts 0: the row is cut by top-k or top-p


@triton.jit
def _finalise(x):
    """splitmix64's finaliser on uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _row_key(seed, position):
    step = tl.full([], _STEP, tl.uint64)
    return _finalise(_finalise(seed.to(tl.uint64) + step) + (position + 1).to(tl.uint64) * step)


@triton.jit
def _hash(key, counter, STREAM: tl.constexpr):
    """53 random bits as their upper 32 and lower 21."""
    step = tl.full([], _STEP, tl.uint64)
    h = _finalise((counter + 1).to(tl.uint64) * step + (key ^ STREAM))
    return (h >> 32).to(tl.uint32), ((h >> 11) & 0x1FFFFF).to(tl.uint32)


@triton.jit
def _fraction(high, low):
    """(53 bits + 1/2) / 2^53, fp32."""
    return high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-53


@triton.jit
def _gumbel(key, counter, STREAM: tl.constexpr):
    """-log(-log(u)) of u = (hash's upper 53 bits + 1/2) / 2^53, fp32.

    Near u = 1, where the largest numbers come from, -log(u) is the series of the exact 1 - u.
    """
    high, low = _hash(key, counter, STREAM)
    u, v = _fraction(high, low), _fraction(~high, low ^ 0x1FFFFF)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(u)))


@triton.jit
def _key(x):
    """int32 numbers in the order of fp32 values; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _between(low, high, part: tl.constexpr):
    """The key `part` quarters of the way from low to high, rounded up."""
    span = high.to(tl.int64) - low.to(tl.int64)
    return (low.to(tl.int64) + (span * part + 3) // 4).to(tl.int32)


@triton.jit
def _block_statistics(x):
    """Maximum of every block (+inf for one with a NaN) and the sum of exp(x - maximum)."""
    x = tl.where(x != x, float("inf"), x)
    most = tl.max(x, 1)
    return most, tl.sum(tl.exp(x - tl.maximum(most, LOWEST)[:, None]), 1)


@triton.jit
def _scan_kernel(
    stats_ptr, edited_ptr, logits_ptr, temperature_ptr, top_k_ptr, penalties_ptr, counts_ptr,
    count_row_ptr, cu_extra_ptr, extra_ids_ptr, extra_ptr, allowed_ptr, allowed_row_ptr,
    drafts_ptr, vocabulary, blocks, stride_logits, stride_counts, stride_allowed, drafts,
    EDITS: tl.constexpr, LOGPROBS: tl.constexpr, SCAN_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * SCAN_BLOCKS + tl.arange(0, SCAN_BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real, mask_b = token < vocabulary, block < blocks
    x = tl.load(logits_ptr + row * stride_logits + token, mask=real, other=float("-inf"))
    stats = stats_ptr + row * 4 * blocks + block
    if LOGPROBS:
        most, total = _block_statistics(x)
        tl.store(stats + 2 * blocks, most, mask=mask_b)
        tl.store(stats + 3 * blocks, total, mask=mask_b)
    if EDITS:
        slot = tl.load(count_row_ptr + row).to(tl.int64)
        if slot >= 0:
            counts = tl.load(counts_ptr + slot * stride_counts + token, mask=real, other=0)
            frequency = tl.load(penalties_ptr + row * 3)
            presence = tl.load(penalties_ptr + row * 3 + 1)
            repetition = tl.load(penalties_ptr + row * 3 + 2)
            counts = counts.to(tl.int32)
            if drafts_ptr is not None:  # those before this position would be generated by then
                first_draft = drafts_ptr + row // (drafts + 1) * drafts
                for d in range(0, (row % (drafts + 1)).to(tl.int32)):
                    counts += tl.where(token == tl.load(first_draft + d), 2, 0)
            times = (counts >> 1).to(tl.float32)
            y = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            y = y - frequency * times
            y = y - tl.where(times > 0, presence, 0.0)
            x = tl.where(counts != 0, y, x)
        first, last = tl.load(cu_extra_ptr + row), tl.load(cu_extra_ptr + row + 1)
        for e in range(first, last):
            here = token == tl.load(extra_ids_ptr + e)
            extra = tl.load(extra_ptr + e)
            x = tl.where(here, tl.where(extra == float("-inf"), extra, x + extra), x)
        mask_row = tl.load(allowed_row_ptr + row).to(tl.int64)
        if mask_row >= 0:
            words = allowed_ptr + mask_row * stride_allowed + (token >> 5)
            word = tl.load(words, mask=real, other=0)
            x = tl.where(((word >> (token & 31)) & 1) != 0, x, float("-inf"))
        if (slot >= 0) | (last > first) | (mask_row >= 0):
            tl.store(edited_ptr + row * vocabulary + token, x, mask=real)
    x = _scaled(x, temperature_ptr, top_k_ptr, row)
    most, total = _block_statistics(x)
    tl.store(stats, most, mask=mask_b)
    tl.store(stats + blocks, total, mask=mask_b)


@triton.jit
def _scaled(x, temperature_ptr, top_k_ptr, row):
    """Logits over temperature, greedy rows' as they are."""
    greedy = _is_greedy(temperature_ptr, top_k_ptr, row)
    divisor = tl.where(greedy, 1.0, tl.load(temperature_ptr + row))
    if divisor != 1.0:
        x = tl.div_rn(x, tl.zeros_like(x) + divisor)
    return x


@triton.jit
def _is_greedy(temperature_ptr, top_k_ptr, row):
    return (tl.load(temperature_ptr + row) < GREEDY_BELOW) | (tl.load(top_k_ptr + row) == 1)


@triton.jit
def _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, token, real,
               vocabulary, stride_logits, EDITS: tl.constexpr):  # fmt: skip
    """x of some tokens of a row; -inf where not real. Edited rows come from their own buffer."""
    base = logits_ptr + row * stride_logits
    if EDITS:  # an integer: a pointer chosen between two bases makes AMD's compiler fail
        address = tl.where(
            edited != 0,
            (edited_ptr + row * vocabulary).to(tl.int64, bitcast=True),
            base.to(tl.int64, bitcast=True),
        )
        base = address.to(tl.pointer_type(tl.float32), bitcast=True)
    x = tl.load(base + token, mask=real, other=float("-inf"))
    return _scaled(x, temperature_ptr, top_k_ptr, row)


@triton.jit
def _best(value, index):
    """Largest value and the lowest index that has it."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, index, _NO_ID), 0)


@triton.jit
def _finish(tokens_ptr, logprobs_ptr, logits_ptr, counts_ptr, count_row_ptr, row, token, valid,
            raw_total, stride_logits, stride_counts,
            COUNT: tl.constexpr, LOGPROBS: tl.constexpr):  # fmt: skip
    """Write the token (-1 if there is none), its log probability, and count it."""
    tl.store(tokens_ptr + row, tl.where(valid, token, -1).to(tl.int64))
    if LOGPROBS:
        raw = tl.load(logits_ptr + row * stride_logits + tl.where(valid, token, 0))
        tl.store(logprobs_ptr + row, raw - raw_total)
    if COUNT:
        slot = tl.load(count_row_ptr + row).to(tl.int64)
        if (slot >= 0) & valid:
            at = counts_ptr + slot * stride_counts + token
            count = tl.load(at)
            tl.store(at, tl.where(count < 32766, count + 2, count))


@triton.jit
def _choose_in_block(x, token, key, noisy):
    """A token of one block by Gumbel-max, or by the maximum: (its value, its id)."""
    noise = tl.where(noisy, _gumbel(key, token, TOKEN_STREAM), 0.0)
    return _best(tl.where(x == float("-inf"), x, x + noise), token)


@triton.jit
def _bound_kernel(
    tokens_ptr, logprobs_ptr, blocks_out_ptr, rows_out_ptr, totals_out_ptr, stats_ptr, edited_ptr,
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr,
    counts_ptr, count_row_ptr, cu_extra_ptr, allowed_row_ptr,
    vocabulary, blocks, stride_logits, stride_counts,
    EDITS: tl.constexpr, COUNT: tl.constexpr, LOGPROBS: tl.constexpr, ALL_BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, ALL_BLOCKS)
    stats = stats_ptr + row * 4 * blocks + b
    most = tl.load(stats, mask=b < blocks, other=float("-inf"))
    sums = tl.load(stats + blocks, mask=b < blocks, other=0.0)
    top = tl.max(most, 0)
    finite = tl.abs(top) < float("inf")
    raw_total = 0.0
    if LOGPROBS:
        raw_most = tl.load(stats + 2 * blocks, mask=b < blocks, other=float("-inf"))
        raw_sums = tl.load(stats + 3 * blocks, mask=b < blocks, other=0.0)
        raw_top = tl.max(raw_most, 0)
        raw_total = raw_top + tl.log(tl.sum(raw_sums * tl.exp(raw_most - raw_top), 0))
    edited = 0
    if EDITS:
        extra = tl.load(cu_extra_ptr + row + 1) > tl.load(cu_extra_ptr + row)
        counted = tl.load(count_row_ptr + row) >= 0
        edited = (extra | counted | (tl.load(allowed_row_ptr + row) >= 0)).to(tl.int32)
    greedy = _is_greedy(temperature_ptr, top_k_ptr, row)
    cut = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0)
    whole = greedy | ((cut == 0) & (tl.load(log_min_p_ptr + row) == float("-inf")))
    key = _row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    listed, low = 0, 0
    if whole | (finite == 0):
        score = most
        if greedy == 0:
            score = tl.where(sums > 0, most + tl.log(sums), float("-inf"))
            score += _gumbel(key, b, BLOCK_STREAM)
        _, block = _best(tl.where(b < blocks, score, float("-inf")), b)
        token = tl.minimum(block, blocks - 1) * BLOCK + tl.arange(0, BLOCK)
        x = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, token,
                       token < vocabulary, vocabulary, stride_logits, EDITS)  # fmt: skip
        _, chosen = _choose_in_block(x, token, key, greedy == 0)
        _finish(tokens_ptr, logprobs_ptr, logits_ptr, counts_ptr, count_row_ptr, row, chosen,
                finite, raw_total, stride_logits, stride_counts, COUNT, LOGPROBS)  # fmt: skip
    else:
        order = _key(most)
        wanted = tl.where(cut, blocks - blocks // 6, CANDIDATES)
        lowest, high = tl.full([], LOWEST_KEY, tl.int32), _key(top)
        while lowest < high:
            middle = _between(lowest, high, 2)
            enough = tl.sum((order >= middle).to(tl.int32), 0) >= wanted
            lowest = tl.where(enough, middle, lowest)
            high = tl.where(enough, high, middle - 1)
        low = lowest
        if cut:
            listed = CUT_ROW
            total = tl.sum((sums * tl.exp(most - top)).to(tl.float64), 0)
            tl.store(totals_out_ptr + row, total)
            low = _value(lowest).to(tl.int32, bitcast=True)
        else:
            above = order > low
            room = CANDIDATES - tl.sum(above.to(tl.int32), 0)
            level = (order == low) & (b < blocks)
            taken = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
            at = tl.cumsum(taken.to(tl.int32), 0) - 1
            tl.store(blocks_out_ptr + row * CANDIDATES + at, b, mask=taken)
            listed = tl.sum(taken.to(tl.int32), 0)
    rows_out = rows_out_ptr + row * 8
    tl.store(rows_out, listed)
    tl.store(rows_out + 1, low)
    tl.store(rows_out + 2, edited)
    tl.store(rows_out + 3, top.to(tl.int32, bitcast=True))
    tl.store(rows_out + 4, tl.cast(raw_total, tl.float32).to(tl.int32, bitcast=True))
