"""Verification of drafts: which stay and the token after them. Specification:
inkling_rocm.engine.speculative.verification.

Row b of B has N drafts and N + 1 positions; row b (N + 1) + j of the sampling launches is its
position j, whose ordinary token they have drawn and whose kept tokens they have found: those whose
key is above a level, the first few (by id) of those at the level, and none below min-p's floor.

`_mass_kernel` reads target and draft logits of every position with a draft, TOKENS at a time, and
leaves what p(draft) and q(draft) need:

    p(v) = exp(x_v - top) / sum over kept        q(v) = exp(y_v - most) / sum over all

`_accept_kernel` walks the positions of a row up to the first rejection. `_residual_kernel` draws
there from max(p - q, 0), TOKENS at a time, by Gumbel-max, and `_settle_kernel` takes the best.
Without rejection sampling `_accept_kernel` alone compares drafts with ordinary tokens.

No number depends on other rows: sums run in a fixed order, the chunks are of fixed length.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_rocm.kernels.sampling_kernels import (
    _NO_ID,
    LOWEST,
    LOWEST_KEY,
    TOKEN_STREAM,
    _best,
    _fraction,
    _gumbel,
    _hash,
    _is_greedy,
    _key,
    _row_key,
    _scaled,
    _value,
    _values_at,
)

_ACCEPT_STREAM = tl.constexpr(0x1E535EEDE31428F0)  # the finaliser of 3
_PARTS = tl.constexpr(5)  # of a chunk: see _mass_kernel


@triton.jit
def _judged(draft, token, temperature_ptr, top_k_ptr, row):
    """Whether a draft is accepted by the ratio of its probabilities."""
    return (draft >= 0) & (token >= 0) & (_is_greedy(temperature_ptr, top_k_ptr, row) == 0)


@triton.jit
def _cut_at(facts_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, row):
    """(level, ties, floor, top, edited): what the sampling launches found out about a row."""
    facts = facts_ptr + row * 8
    edited = tl.load(facts + 2)
    top = tl.load(facts + 3).to(tl.float32, bitcast=True)
    cut = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0)
    level = tl.load(facts + 5, mask=cut, other=LOWEST_KEY)
    ties = tl.load(facts + 6, mask=cut, other=_NO_ID)
    return level, ties, top + tl.load(log_min_p_ptr + row), top, edited


@triton.jit
def _mass_kernel(
    parts_ptr, tokens_ptr, facts_ptr, edited_ptr, logits_ptr, drafts_ptr, draft_logits_ptr,
    limit_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, drafts, vocabulary, chunks,
    stride_logits, stride_draft_b, stride_draft_n,
    EDITS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Leaves per chunk: mass above the level, tokens at it, those of them up to the draft; maximum
    of the draft's logits and their sum of exponentials."""
    pair, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, j = pair // drafts, pair % drafts
    row = pair + b
    draft = tl.load(drafts_ptr + pair)
    token = tl.load(tokens_ptr + row)
    judged = _judged(draft, token, temperature_ptr, top_k_ptr, row)
    if (judged == 0) | (j >= tl.load(limit_ptr + b)):
        return
    level, _, floor, top, edited = _cut_at(
        facts_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, row
    )  # fmt: skip
    ids = chunk * TOKENS + tl.arange(0, TOKENS)
    real = ids < vocabulary
    x = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, ids, real,
                   vocabulary, stride_logits, EDITS)  # fmt: skip
    order = _key(x)
    inside = (x >= floor) & (x > float("-inf"))
    tied = inside & (order == level)
    y = tl.load(
        draft_logits_ptr + b * stride_draft_b + j * stride_draft_n + ids, mask=real,
        other=float("-inf"),
    )  # fmt: skip
    y = _scaled(y, temperature_ptr, top_k_ptr, row)
    y = tl.where(y != y, float("inf"), y)
    most = tl.max(y, 0)
    parts = parts_ptr + pair * _PARTS * chunks + chunk
    tl.store(parts, tl.sum(tl.where(inside & (order > level), tl.exp(x - top), 0.0), 0))
    tl.store(parts + chunks, tl.sum(tied.to(tl.float32), 0))
    tl.store(parts + 2 * chunks, tl.sum((tied & (ids <= draft)).to(tl.float32), 0))
    tl.store(parts + 3 * chunks, most)
    tl.store(parts + 4 * chunks, tl.sum(tl.exp(y - tl.maximum(most, LOWEST)), 0))


@triton.jit
def _count(counts_ptr, count_row_ptr, drafts_ptr, b, drafts, accepted, last, valid, stride_counts,
           POSITIONS: tl.constexpr):  # fmt: skip
    """Count the accepted drafts of a row and its last token, if valid. One warp: each lane has read
    its count before any is written."""
    slot = tl.load(count_row_ptr + b * (drafts + 1)).to(tl.int64)
    m = tl.arange(0, POSITIONS)
    token = tl.load(drafts_ptr + b * drafts + m, mask=m < accepted, other=-1)
    token = tl.where(m == accepted, last, token)
    equal = token[:, None] == token[None, :]
    times = tl.sum(equal.to(tl.int32), 1)
    earlier = tl.sum((equal & (m[None, :] < m[:, None])).to(tl.int32), 1)
    mine = valid & (slot >= 0) & (token >= 0) & (earlier == 0)
    at = counts_ptr + slot * stride_counts + token
    count = tl.load(at, mask=mine, other=0).to(tl.int32)
    room = (32767 - count) >> 1
    count += 2 * tl.minimum(times, room)
    tl.store(at, count.to(tl.int16), mask=mine)


@triton.jit
def _by_ratio(state_ptr, parts_ptr, facts_ptr, edited_ptr, logits_ptr, draft_row_ptr,
              temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr,
              row, pair, draft, vocabulary, chunks, stride_logits,
              EDITS: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Whether a draft stays by the ratio of its probabilities; leaves what its residual needs."""
    level, ties, floor, top, edited = _cut_at(
        facts_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, row
    )  # fmt: skip
    c = tl.arange(0, CHUNKS)
    parts = parts_ptr + pair * _PARTS * chunks + c
    here = c < chunks
    above = tl.sum(tl.load(parts, mask=here, other=0.0), 0)
    tied = tl.sum(tl.load(parts + chunks, mask=here, other=0.0), 0).to(tl.int32)
    rank = tl.sum(tl.load(parts + 2 * chunks, mask=here, other=0.0), 0).to(tl.int32)
    own = tl.load(parts + 3 * chunks, mask=here, other=float("-inf"))
    sums = tl.load(parts + 4 * chunks, mask=here, other=0.0)
    most = tl.max(own, 0)
    mass_q = tl.sum(sums * tl.exp(own - most), 0)
    each = tl.exp(_value(level) - top)
    mass_p = above + tl.minimum(ties, tied).to(tl.float32) * each
    x = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row,
                   draft, draft < vocabulary, vocabulary, stride_logits,
                   EDITS)  # fmt: skip
    y = tl.load(
        draft_row_ptr + draft,
        mask=draft < vocabulary, other=float("-inf"),
    )  # fmt: skip
    y = _scaled(y, temperature_ptr, top_k_ptr, row)
    order = _key(x)
    kept = (order > level) | ((order == level) & (rank <= ties))
    kept &= (x >= floor) & (x > float("-inf"))
    p = tl.where(kept, tl.exp(x - top) / mass_p, 0.0)
    q = tl.exp(y - most) / mass_q
    key = _row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    high, low = _hash(key, tl.full([], 0, tl.int32), _ACCEPT_STREAM)
    stays = _fraction(high, low) * q < p  # not if q is NaN
    tl.store(state_ptr + 1, mass_p.to(tl.int32, bitcast=True))
    tl.store(state_ptr + 2, most.to(tl.int32, bitcast=True))
    tl.store(state_ptr + 3, mass_q.to(tl.int32, bitcast=True))
    return stays


@triton.jit
def _accept_kernel(
    out_ptr, accepted_ptr, state_ptr, parts_ptr, tokens_ptr, facts_ptr, edited_ptr, logits_ptr,
    drafts_ptr, draft_logits_ptr, limit_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr,
    seed_ptr, position_ptr, counts_ptr, count_row_ptr, drafts, vocabulary, chunks, stride_logits,
    stride_draft_b, stride_draft_n, stride_counts,
    RATIO: tl.constexpr, EDITS: tl.constexpr, CHUNKS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Writes accepted drafts, the token after them unless it is to be drawn from a residual, and -1
    after it; and how to draw that token: whether, mass of p, maximum and mass of q."""
    b = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.load(limit_ptr + b), drafts)
    state = state_ptr + b * 4
    going, redraw = 1, 0
    j, last = tl.full([], 0, tl.int64), tl.full([], -1, tl.int64)
    while going != 0:
        row = b * (drafts + 1) + j
        last = tl.load(tokens_ptr + row)
        draft = tl.load(drafts_ptr + b * drafts + j, mask=j < limit, other=-1)
        stays = (draft >= 0) & (last == draft)
        if RATIO:  # noqa: SIM102 - a constant beside a tensor
            if _judged(draft, last, temperature_ptr, top_k_ptr, row):
                stays = _by_ratio(
                    state, parts_ptr, facts_ptr, edited_ptr, logits_ptr,
                    draft_logits_ptr + b * stride_draft_b + j * stride_draft_n, temperature_ptr,
                    top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr, row,
                    b * drafts + j, draft, vocabulary, chunks, stride_logits, EDITS, CHUNKS,
                )  # fmt: skip
                redraw = (stays == 0).to(tl.int32)
        if stays:
            tl.store(out_ptr + row, draft)
            j += 1
        else:
            going = 0
    tl.store(accepted_ptr + b, j)
    tl.store(state, redraw)
    m = tl.arange(0, POSITIONS)
    tl.store(
        out_ptr + b * (drafts + 1) + m, tl.where(m == j, last, -1), mask=(m >= j) & (m <= drafts)
    )
    if EDITS:
        _count(counts_ptr, count_row_ptr, drafts_ptr, b, drafts, j, last, redraw == 0,
               stride_counts, POSITIONS)  # fmt: skip


@triton.jit
def _residual_kernel(
    best_ptr, best_id_ptr, accepted_ptr, state_ptr, parts_ptr, facts_ptr, edited_ptr, logits_ptr,
    draft_logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seed_ptr, position_ptr,
    drafts, vocabulary, chunks, stride_logits, stride_draft_b, stride_draft_n,
    EDITS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Leaves the best perturbed logarithm of a chunk's residual and of its p, with their ids."""
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state = state_ptr + b * 4
    if tl.load(state) == 0:
        return
    mass_p = tl.load(state + 1).to(tl.float32, bitcast=True)
    most = tl.load(state + 2).to(tl.float32, bitcast=True)
    mass_q = tl.load(state + 3).to(tl.float32, bitcast=True)
    j = tl.load(accepted_ptr + b)
    row = b * (drafts + 1) + j
    level, ties, floor, top, edited = _cut_at(
        facts_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, row
    )  # fmt: skip
    c = tl.arange(0, CHUNKS)
    parts = parts_ptr + (b * drafts + j) * _PARTS * chunks + c
    before = tl.sum(tl.load(parts + chunks, mask=c < chunk, other=0.0), 0).to(tl.int32)
    ids = chunk * TOKENS + tl.arange(0, TOKENS)
    real = ids < vocabulary
    x = _values_at(logits_ptr, edited_ptr, edited, temperature_ptr, top_k_ptr, row, ids, real,
                   vocabulary, stride_logits, EDITS)  # fmt: skip
    order = _key(x)
    inside = (x >= floor) & (x > float("-inf"))
    tied = inside & (order == level)
    kept = inside & ((order > level) | (tied & (before + tl.cumsum(tied.to(tl.int32), 0) <= ties)))
    y = tl.load(
        draft_logits_ptr + b * stride_draft_b + j * stride_draft_n + ids, mask=real,
        other=float("-inf"),
    )  # fmt: skip
    y = _scaled(y, temperature_ptr, top_k_ptr, row)
    p = tl.where(kept, tl.exp(x - top) / mass_p, 0.0)
    q = tl.exp(y - most) / mass_q
    q = tl.where(q != q, 0.0, q)  # a draft model without finite logits
    key = _row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    noise = _gumbel(key, ids, TOKEN_STREAM)
    rest = p - q
    best, first = _best(tl.where(rest > 0, tl.log(rest) + noise, float("-inf")), ids)
    tl.store(best_ptr + b * 2 * chunks + chunk, best)
    tl.store(best_id_ptr + b * 2 * chunks + chunk, first)
    best, first = _best(tl.where(p > 0, tl.log(p) + noise, float("-inf")), ids)
    tl.store(best_ptr + (b * 2 + 1) * chunks + chunk, best)
    tl.store(best_id_ptr + (b * 2 + 1) * chunks + chunk, first)


@triton.jit
def _settle_kernel(
    out_ptr, best_ptr, best_id_ptr, accepted_ptr, state_ptr, drafts_ptr, counts_ptr, count_row_ptr,
    drafts, chunks, stride_counts,
    EDITS: tl.constexpr, CHUNKS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Writes the token drawn from a residual; from p where p and q are equal to rounding."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(state_ptr + b * 4) == 0:
        return
    c = tl.arange(0, CHUNKS)
    at = b * 2 * chunks + c
    best, token = _best(
        tl.load(best_ptr + at, mask=c < chunks, other=float("-inf")),
        tl.load(best_id_ptr + at, mask=c < chunks, other=_NO_ID),
    )
    if best == float("-inf"):
        at += chunks
        best, token = _best(
            tl.load(best_ptr + at, mask=c < chunks, other=float("-inf")),
            tl.load(best_id_ptr + at, mask=c < chunks, other=_NO_ID),
        )
    j = tl.load(accepted_ptr + b)
    tl.store(out_ptr + b * (drafts + 1) + j, token.to(tl.int64))
    if EDITS:
        _count(counts_ptr, count_row_ptr, drafts_ptr, b, drafts, j, token.to(tl.int64), True,
               stride_counts, POSITIONS)  # fmt: skip
