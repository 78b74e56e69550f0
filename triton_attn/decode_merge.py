"""Split-KV of decode and verify: how keys are cut, where partial results lie, how they are merged.

A request's keys are cut into units of a fixed length. UNITS units are a group. Where there are few
programs each takes one unit; where there are enough it takes a group and folds its units in
registers. The merge folds units to groups with the same arithmetic in the same order, so a result
is the same bits either way.

Partial results of a request and K/V head (one pair) are fp32, in slots of `rows` rows:
acc [pairs, MAX_PARTS, rows, BLOCK_D] and (l, m) [pairs, MAX_PARTS, 2, rows].
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from triton_attn.tiles import LOG2E


@triton.jit
def units_of(
    kv_len, q_start, tiles, WINDOW: tl.constexpr, SPLIT: tl.constexpr, UNITS: tl.constexpr,
    MAX_PARTS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """First visible key, length of a unit, number of the first unit, their count, units a program
    takes. The length grows with the request's own length, so that the groups stay bounded;
    `tiles` = requests x K/V heads x row blocks decides what a program takes, never the result."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(q_start - WINDOW + 1, 0)
    most: tl.constexpr = SPLIT * UNITS * (MAX_PARTS - (1 if WINDOW > 0 else 0))
    unit = SPLIT * tl.maximum(tl.cdiv(kv_len - first_key, most), 1)
    first_unit = first_key // unit
    units = tl.maximum(tl.cdiv(kv_len, unit) - first_unit, 1)
    grouped = (units > MAX_PARTS) | (tiles * tl.cdiv(units, UNITS) >= MANY)
    return first_key, unit, first_unit, units, tl.where(grouped, UNITS, 1)


@triton.jit
def fold(acc, l, m, acc2, l2, m2):
    """Two partial results as one, [rows, D] and [rows]. Explicit multiply-adds: the compiler must
    not choose which product it rounds. Folding an empty one (0, 0, -1e30) changes no bit."""
    m_new = tl.maximum(m, m2)
    a, b = tl.exp2(m - m_new), tl.exp2(m2 - m_new)
    acc = tl.fma(acc2, tl.broadcast_to(b[:, None], acc2.shape), acc * a[:, None])
    return acc, tl.fma(l2, b, l * a), m_new


@triton.jit
def store_rows(
    out_ptr, lse_ptr, acc, l, m, q_token, row_head, mask_rows, offs_d, stride_out_t, stride_out_h,
    H: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Normalise and store rows of the result, and their LSE (natural log) if it is wanted."""
    # A row without a single visible key (padding, or a masking mod) is 0, never NaN.
    acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    row_ptrs = out_ptr + q_token * stride_out_t + row_head * stride_out_h
    tl.store(
        row_ptrs[:, None] + offs_d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=mask_rows[:, None] & (offs_d < HEAD_DIM)[None, :],
    )
    if lse_ptr is not None:
        lse = tl.where(l > 0, m + tl.log2(l), float("-inf")) / LOG2E
        tl.store(lse_ptr + q_token * H + row_head, lse, mask=mask_rows)


@triton.jit
def store_partial(
    partial_ptr, partial_lm_ptr, acc, l, m, slot, rows, mask_rows, offs_d,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows `rows` of the partial result in slot `slot`."""
    first_row = slot * ROWS
    ptrs = partial_ptr + first_row * BLOCK_D + rows[:, None] * BLOCK_D + offs_d[None, :]
    tl.store(ptrs, acc, mask=mask_rows[:, None])
    tl.store(partial_lm_ptr + first_row * 2 + rows, l, mask=mask_rows)
    tl.store(partial_lm_ptr + first_row * 2 + ROWS + rows, m, mask=mask_rows)


@triton.jit
def _load_partial(partial_ptr, partial_lm_ptr, at, rows, mask, ROWS: tl.constexpr, offs_d):
    """(acc, l, m) of rows `rows` in the slot whose first row is `at` (scalars or tensors); empty
    where masked. Past the L1 cache, which other processors do not write to."""
    first_row = at + rows
    lm_ptrs = partial_lm_ptr + at * 2 + rows
    l = tl.load(lm_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    m = tl.load(lm_ptrs + ROWS, mask=mask, other=-1e30, cache_modifier=".cg")
    ptrs = partial_ptr + first_row[:, None] * offs_d.shape[0] + offs_d[None, :]
    return tl.load(ptrs, mask=mask[:, None], other=0.0, cache_modifier=".cg"), l, m


@triton.jit
def merge_here(
    partial_ptr, partial_lm_ptr, pair, parts, per, rows, mask_rows,
    BLOCK_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, MAX_PARTS: tl.constexpr,
    UNITS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """(acc, l, m) of rows `rows` [BLOCK_ROWS] over all parts of a pair, group after group; the
    loads of MERGE groups fly together."""
    stride = UNITS // per  # slots of a group
    offs_d = tl.arange(0, BLOCK_D)
    l = tl.zeros([BLOCK_ROWS], tl.float32)
    m = tl.full([BLOCK_ROWS], -1e30, tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for part0 in range(0, parts, MERGE * stride):
        for j in tl.static_range(MERGE):
            l_g = tl.zeros([BLOCK_ROWS], tl.float32)
            m_g = tl.full([BLOCK_ROWS], -1e30, tl.float32)
            acc_g = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            for u in tl.static_range(UNITS):
                part = part0 + j * stride + u
                acc_u, l_u, m_u = _load_partial(
                    partial_ptr, partial_lm_ptr, (pair * MAX_PARTS + part) * ROWS, rows,
                    mask_rows & (part < parts) & (u < stride), ROWS, offs_d,
                )  # fmt: skip
                acc_g, l_g, m_g = fold(acc_g, l_g, m_g, acc_u, l_u, m_u)
            acc, l, m = fold(acc, l, m, acc_g, l_g, m_g)
    return acc, l, m


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, cu_seqlens_q_ptr, kv_len_ptr,
    stride_out_t: tl.constexpr, stride_out_h: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, UNITS: tl.constexpr, MANY: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MAX_PARTS: tl.constexpr, MERGE: tl.constexpr,
    PDL: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The merge as a launch of its own: one program per row, MERGE groups at a time. SINGLE: a
    request of one part has its result in a slot, too."""
    row, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token0 = request
    q_len = 1
    if cu_seqlens_q_ptr is not None:
        token0 = tl.load(cu_seqlens_q_ptr + request)
        q_len = tl.load(cu_seqlens_q_ptr + request + 1) - token0
    kv_len = tl.load(kv_len_ptr + request)
    tiles = tl.num_programs(1) * tl.num_programs(2) * ROW_BLOCKS
    _, _, _, units, per = units_of(
        kv_len, kv_len - q_len, tiles, WINDOW, SPLIT, UNITS, MAX_PARTS, MANY
    )
    parts = tl.cdiv(units, per)
    if PDL:
        # Lengths were there before the split kernel started; its partial results were not.
        gdc_wait()
    if ((parts == 1) & (not SINGLE)) | (row >= q_len * GROUP):
        return
    pair = request.to(tl.int64) * tl.num_programs(1) + kv_head
    stride = UNITS // per  # slots of a group
    offs_d = tl.arange(0, BLOCK_D)
    rows = tl.full([MERGE], 0, tl.int32) + row
    l = 0.0
    m = -1e30
    acc = tl.zeros([BLOCK_D], tl.float32)
    for part0 in range(0, parts, MERGE * stride):
        l_g = tl.zeros([MERGE], tl.float32)
        m_g = tl.full([MERGE], -1e30, tl.float32)
        acc_g = tl.zeros([MERGE, BLOCK_D], tl.float32)
        part = part0 + tl.arange(0, MERGE) * stride
        acc_u, l_u, m_u = _load_partial(
            partial_ptr, partial_lm_ptr, (pair * MAX_PARTS + part) * ROWS, rows, part < parts,
            ROWS, offs_d,
        )  # fmt: skip
        acc_g, l_g, m_g = fold(acc_g, l_g, m_g, acc_u, l_u, m_u)
        if stride > 1:  # the rest of the units; folding none is the same bits
            for u in tl.static_range(1, UNITS):
                acc_u, l_u, m_u = _load_partial(
                    partial_ptr, partial_lm_ptr, (pair * MAX_PARTS + part + u) * ROWS, rows,
                    part + u < parts, ROWS, offs_d,
                )  # fmt: skip
                acc_g, l_g, m_g = fold(acc_g, l_g, m_g, acc_u, l_u, m_u)
        m_new = tl.maximum(m, tl.max(m_g, 0))
        old, new = tl.exp2(m - m_new), tl.exp2(m_g - m_new)
        acc = acc * old + tl.sum(acc_g * new[:, None], 0)
        l = l * old + tl.sum(l_g * new, 0)
        m = m_new
    token, head = token0.to(tl.int64) + row // GROUP, kv_head * GROUP + row % GROUP
    acc = acc / tl.where(l > 0, l, 1.0)
    ptrs = out_ptr + token * stride_out_t + head * stride_out_h + offs_d
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
    if lse_ptr is not None:
        lse = tl.where(l > 0, m + tl.log2(l), float("-inf")) / LOG2E
        tl.store(lse_ptr + token * H + head, lse)


@triton.jit
def _window_merge_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, cu_seqlens_q_ptr, kv_len_ptr,
    stride_out_t: tl.constexpr, stride_out_h: tl.constexpr,
    WINDOW: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr, MAX_PARTS: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """One row: even tiles, odd tiles, both; with SHARES the first two are there."""
    row, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token0 = tl.load(cu_seqlens_q_ptr + request)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1) - token0
    kv_len = tl.load(kv_len_ptr + request)
    first_key = tl.maximum(kv_len - q_len - WINDOW + 1, 0)
    parts = tl.maximum(kv_len - 1, 0) // BLOCK_N - first_key // BLOCK_N + 1
    if SHARES:
        parts = 2
    gdc_wait()
    if row >= q_len * GROUP:
        return
    offs_d = tl.arange(0, HEAD_DIM)
    rows = tl.full([1], 0, tl.int32) + row
    slot = (request.to(tl.int64) * tl.num_programs(1) + kv_head) * MAX_PARTS
    acc_even, acc_odd = tl.zeros([1, HEAD_DIM], tl.float32), tl.zeros([1, HEAD_DIM], tl.float32)
    l_even, l_odd = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    m_even, m_odd = tl.full([1], -1e30, tl.float32), tl.full([1], -1e30, tl.float32)
    for part in tl.static_range(MOST):
        here = part < parts
        at = (slot + part) * ROWS
        lm_ptrs = partial_lm_ptr + 2 * at + rows
        l = tl.load(lm_ptrs, mask=here, other=0.0, cache_modifier=".cg")
        m = tl.load(lm_ptrs + ROWS, mask=here, other=-1e30, cache_modifier=".cg")
        ptrs = partial_ptr + (at + rows)[:, None] * HEAD_DIM + offs_d[None, :]
        acc = tl.load(ptrs, mask=here, other=0.0, cache_modifier=".cg")
        if part % 2 == 0:
            acc_even, l_even, m_even = fold(acc_even, l_even, m_even, acc, l, m)
        else:
            acc_odd, l_odd, m_odd = fold(acc_odd, l_odd, m_odd, acc, l, m)
    acc, l, m = fold(acc_even, l_even, m_even, acc_odd, l_odd, m_odd)
    token, head = token0.to(tl.int64) + rows // GROUP, kv_head * GROUP + rows % GROUP
    store_rows(
        out_ptr, lse_ptr, acc, l, m, token, head, rows >= 0, offs_d, stride_out_t, stride_out_h,
        H, HEAD_DIM,
    )  # fmt: skip
