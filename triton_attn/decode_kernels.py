"""Decode and verify (1 to 16 query tokens a request) over paged K/V, split along the keys.

The query heads of one K/V head and up to TOKENS_HERE tokens of a request form the rows of one tile;
longer requests take several row blocks, which read the same keys at the same time. A request's keys
are cut into splits of a fixed length (a multiple of SPLIT that depends on its own length only), so
its result does not depend on its batch mates or on the grid. Partial results are merged in a fixed
order, by the program that finishes last or by a second launch (decode_merge.py).

The relative bias needs no buffer. All rows of token j share one position p_j, so

    bias[(j, head), n] = r[j, head, :] . Prev[n + (E - 1 - p_j), :]       Prev = P reversed, by key

is a product with R x keys of contiguous memory. For several tokens the features are laid out
block-diagonally, [rows, tokens * R]. Token j + 1 reads one row of Prev before token j, so with
later tokens first, the stacked operand [keys, tokens * R] is Prev itself read with a row stride of
R: rows overlap, nothing is copied.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernel_base.device import arrive
from triton_attn.decode_merge import fold, merge_here, store_partial, store_rows, units_of
from triton_attn.tiles import LOG2E, load_rows, softmax_step, visible_keys


@triton.jit
def _rows(
    rows, first, token0, q_len, kv_head, GROUP: tl.constexpr, TOKENS_HERE: tl.constexpr
):  # fmt: skip
    """Token within the request, head, token in the batch and validity of a row block's rows."""
    token, head = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    mask = (token < q_len) & (rows < TOKENS_HERE * GROUP)
    return token, head, token0 + tl.where(mask, token, 0), mask  # a mod may load through it


@triton.jit
def _features(
    r_ptr, token0, first, row_token, row_head, mask_rows, stride_r_t, stride_r_h,
    D_REL: tl.constexpr, BLOCK_R: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """[rows, TOKENS * BLOCK_R]: r of the row's token in the columns of that token, 0 elsewhere.
    Columns of the token `first` + TOKENS - 1 come first."""
    cols = tl.arange(0, TOKENS * BLOCK_R)
    mine = (first + TOKENS - 1 - cols // BLOCK_R)[None, :] == row_token[:, None]
    row_ptrs = r_ptr + (token0 + row_token) * stride_r_t + row_head * stride_r_h
    return tl.load(
        row_ptrs[:, None] + (cols % BLOCK_R)[None, :],
        mask=mine & mask_rows[:, None] & (cols % BLOCK_R < D_REL)[None, :],
        other=0.0,
    )


@triton.jit
def _unpack(words, dtype: tl.constexpr, PACK: tl.constexpr):
    """[n, k] 64-bit words as [n, k * PACK] elements of `dtype`, in memory order."""
    if PACK == 2:
        x = tl.join(words.to(tl.int32), (words >> 32).to(tl.int32))
    else:
        even = tl.join(words.to(tl.int16), (words >> 32).to(tl.int16))
        odd = tl.join((words >> 16).to(tl.int16), (words >> 48).to(tl.int16))
        x = tl.join(even, odd)
    return tl.reshape(x.to(dtype, bitcast=True), [words.shape[0], words.shape[1] * PACK])


@triton.jit
def _profile_tile(
    by_key_ptr, n0, offs_n, q_start, EXTENT: tl.constexpr, PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """[keys, TOKENS * BLOCK_R]: the rows of the profile that the tile's tokens see at keys n0 ...

    PACK elements are read as one 64-bit word where the compiler would give each lane less (more
    lanes than vectors in the tile). 1: it decides.
    """
    # May be negative but for PAD, so it goes into the scalar pointer: buffer loads on AMD read 0
    # for a negative vector offset.
    first_row = n0 + (EXTENT - q_start - TOKENS + PAD)
    tile_ptr = by_key_ptr + first_row * BLOCK_R
    if PACK == 1:
        cols = tl.arange(0, TOKENS * BLOCK_R)
        p = tl.load(tile_ptr + offs_n[:, None] * BLOCK_R + cols[None, :])
    else:
        cols = tl.arange(0, TOKENS * BLOCK_R // PACK)
        word_ptr = tile_ptr.to(tl.pointer_type(tl.int64))
        words = tl.load(word_ptr + offs_n[:, None] * (BLOCK_R // PACK) + cols[None, :])
        p = _unpack(words, by_key_ptr.dtype.element_ty, PACK)
    return p


@triton.jit
def _tile(
    acc, l, m, q, features, tau, n0, q_pos, q_token, row_head, k_ptr, v_ptr, page_row_ptr,
    by_key_ptr, aux, offs_n, offs_d, first_key, end_key, q_start, stride_k_p, stride_k_t,
    stride_v_p, stride_v_t, softmax_scale,
    MOD: tl.constexpr, SCORE_MOD: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    EXTENT: tl.constexpr, PAD: tl.constexpr, BLOCK_R: tl.constexpr, TOKENS: tl.constexpr,
    PACK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One key tile folded into (acc, l, m)."""
    n0 = tl.multiple_of(n0, BLOCK_N)
    n = n0 + offs_n
    k = load_rows(
        k_ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t,
        MASKED, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MOD == 1:
        s *= softmax_scale
        s = SCORE_MOD(
            s, q_pos[:, None], n[None, :], q_token[:, None], row_head[:, None], aux
        )  # fmt: skip
        s *= LOG2E
    else:
        s = s * (softmax_scale * LOG2E)
    if MOD == 2:
        p = _profile_tile(by_key_ptr, n0, offs_n, q_start, EXTENT, PAD, BLOCK_R, TOKENS, PACK)
        s += tl.dot(features, tl.trans(p), input_precision="ieee") * tau[:, None]
    if MASKED:
        s = tl.where(visible_keys(q_pos, n, end_key, WINDOW), s, float("-inf"))
    v = load_rows(
        v_ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_v_p, stride_v_t,
        MASKED, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    return softmax_step(acc, l, m, s, v)


@triton.jit
def _decode_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
    kv_len_ptr, r_ptr, by_key_ptr, tau_ptr, aux, partial_ptr, partial_lm_ptr, ticket_ptr,
    stride_out_t: tl.constexpr, stride_out_h: tl.constexpr, stride_q_t: tl.constexpr,
    stride_q_h: tl.constexpr, stride_k_p: tl.constexpr, stride_k_t: tl.constexpr,
    stride_k_g: tl.constexpr, stride_v_p: tl.constexpr, stride_v_t: tl.constexpr,
    stride_v_g: tl.constexpr, stride_page_b, stride_r_t: tl.constexpr, stride_r_h: tl.constexpr,
    softmax_scale,
    MOD: tl.constexpr, SCORE_MOD: tl.constexpr, EXTENT: tl.constexpr, PAD: tl.constexpr,
    WINDOW: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, D_REL: tl.constexpr,
    BLOCK_R: tl.constexpr, TOKENS: tl.constexpr, PACK: tl.constexpr, TOKENS_HERE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MAX_PARTS: tl.constexpr, MANY: tl.constexpr, AMD: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr,
    MERGE_HERE: tl.constexpr, MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    if PDL:  # the merge may be launched while this kernel runs
        gdc_launch_dependents()
    program, row_block = tl.program_id(0) // ROW_BLOCKS, tl.program_id(0) % ROW_BLOCKS
    kv_head, request = tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_len_ptr + request)
    first_page = tl.load(first_page_ptr + request)
    if cu_seqlens_q_ptr is None:
        token0 = request.to(tl.int64)
        q_len = 1
    else:
        token0 = tl.load(cu_seqlens_q_ptr + request).to(tl.int64)
        q_len = (tl.load(cu_seqlens_q_ptr + request + 1) - token0).to(tl.int32)
    # Everything that does not need the length is loaded before the first branch on it.
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    block_rows = tl.arange(0, BLOCK_ROWS)
    first = row_block * TOKENS_HERE
    row_token, row_head, q_token, mask_rows = _rows(
        block_rows, first, token0, q_len, kv_head, GROUP, TOKENS_HERE
    )
    q_ptrs = (q_ptr + q_token * stride_q_t + row_head * stride_q_h)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_rows[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    tau = tl.full([BLOCK_ROWS], LOG2E, tl.float32)
    features = q
    if MOD == 2:
        if tau_ptr is not None:
            tau = tl.load(tau_ptr + q_token, mask=mask_rows, other=0.0) * LOG2E
        features = _features(
            r_ptr, token0, first, row_token, row_head, mask_rows, stride_r_t, stride_r_h,
            D_REL, BLOCK_R, TOKENS,
        )  # fmt: skip

    q_start = kv_len - q_len
    q_pos = q_start + row_token
    tiles = tl.num_programs(1) * tl.num_programs(2) * ROW_BLOCKS
    first_key, unit, first_unit, units, per = units_of(
        kv_len, q_start, tiles, WINDOW, SPLIT, UNITS, MAX_PARTS, MANY
    )
    parts = tl.cdiv(units, per)
    if (program >= parts) | (first >= q_len):
        return
    q_start += first  # of this row block from here on
    if WINDOW > 0:
        first_key = tl.maximum(q_start - WINDOW + 1, 0)
    page_row_ptr = page_table_ptr + request.to(tl.int64) * stride_page_b - first_page
    k_head_ptr = k_ptr + kv_head * stride_k_g
    v_head_ptr = v_ptr + kv_head * stride_v_g
    pair = request.to(tl.int64) * tl.num_programs(1) + kv_head
    programs = tl.minimum(tl.num_programs(0) // ROW_BLOCKS, parts)

    for turn in range(program, parts, programs):
        part = parts - 1 - turn  # the last part has a modification's extra work: it starts first
        nothing = tl.full([BLOCK_ROWS], -1e30, tl.float32)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        l, m = tl.zeros([BLOCK_ROWS], tl.float32), nothing
        total, total_l, total_m = acc, l, m
        begin = tl.maximum((first_unit + part * per) * unit, first_key // BLOCK_N * BLOCK_N)
        end = tl.minimum((first_unit + part * per + per) * unit, kv_len)
        # Tiles wholly visible to every row, and (with a modification) wholly beyond its extent.
        plain_end = (q_start + 1) // BLOCK_N * BLOCK_N
        if MOD != 0:
            plain_end = 0
            if EXTENT > 0:
                plain_end = tl.maximum(q_start - EXTENT + 1, 0) // BLOCK_N * BLOCK_N
        plain_end = tl.minimum(tl.maximum(plain_end, begin), tl.maximum(end, begin))
        if WINDOW == 0 or (MOD != 0 and EXTENT > 0 and EXTENT < WINDOW):
            for n0 in tl.range(begin, plain_end, BLOCK_N, num_stages=STAGES):
                acc, l, m = _tile(
                    acc, l, m, q, features, tau, n0, q_pos, q_token, row_head, k_head_ptr,
                    v_head_ptr, page_row_ptr, by_key_ptr, aux, offs_n, offs_d, first_key, end,
                    q_start, stride_k_p, stride_k_t, stride_v_p, stride_v_t, softmax_scale, 0,
                    SCORE_MOD, WINDOW > 0, WINDOW, EXTENT, PAD, BLOCK_R, TOKENS, PACK, PAGE_SIZE,
                    BLOCK_N, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
                if UNITS > 1 and (n0 + BLOCK_N) % unit == 0:
                    total, total_l, total_m = fold(total, total_l, total_m, acc, l, m)
                    acc, l, m = tl.zeros_like(acc), tl.zeros_like(l), nothing
        else:
            plain_end = begin
        for n0 in tl.range(plain_end, end, BLOCK_N, num_stages=STAGES):
            acc, l, m = _tile(
                acc, l, m, q, features, tau, n0, q_pos, q_token, row_head, k_head_ptr,
                v_head_ptr, page_row_ptr, by_key_ptr, aux, offs_n, offs_d, first_key, end, q_start,
                stride_k_p, stride_k_t, stride_v_p, stride_v_t, softmax_scale, MOD, SCORE_MOD,
                True, WINDOW, EXTENT, PAD, BLOCK_R, TOKENS, PACK, PAGE_SIZE, BLOCK_N, HEAD_DIM,
                BLOCK_D,
            )  # fmt: skip
            if UNITS > 1 and (n0 + BLOCK_N) % unit == 0:
                total, total_l, total_m = fold(total, total_l, total_m, acc, l, m)
                acc, l, m = tl.zeros_like(acc), tl.zeros_like(l), nothing
        if UNITS > 1:
            acc, l, m = fold(total, total_l, total_m, acc, l, m)
        if parts == 1:
            store_rows(
                out_ptr, lse_ptr, acc, l, m, q_token, row_head, mask_rows, offs_d, stride_out_t,
                stride_out_h, H, HEAD_DIM,
            )  # fmt: skip
        else:
            store_partial(
                partial_ptr, partial_lm_ptr, acc, l, m, pair * MAX_PARTS + part,
                first * GROUP + block_rows, mask_rows, offs_d, ROWS, BLOCK_D,
            )  # fmt: skip
    if parts == 1 or not MERGE_HERE:
        return

    # The last program of this request, K/V head and row block merges.
    ticket_ptr += pair * ROW_BLOCKS + row_block
    if arrive(ticket_ptr, block_rows, AMD) < programs - 1:
        return
    tl.debug_barrier()
    tl.store(ticket_ptr, 0)
    block_rows = tl.arange(0, MERGE_ROWS)  # without the rows that only pad the matrix tile
    _, row_head, q_token, mask_rows = _rows(
        block_rows, first, token0, q_len, kv_head, GROUP, TOKENS_HERE
    )
    acc, l, m = merge_here(
        partial_ptr, partial_lm_ptr, pair, parts, per, first * GROUP + block_rows,
        mask_rows, MERGE_ROWS, ROWS, BLOCK_D, MAX_PARTS, UNITS, MERGE,
    )  # fmt: skip
    store_rows(
        out_ptr, lse_ptr, acc, l, m, q_token, row_head, mask_rows, offs_d, stride_out_t,
        stride_out_h, H, HEAD_DIM,
    )  # fmt: skip
