"""Decode and verify (1 to 16 query tokens a request) over paged K/V, split along the keys.

The query heads of one K/V head and the request's tokens form the rows of one tile. A request's
keys are cut into splits
of a fixed length (a multiple of SPLIT that depends on its own length only), so its result does not
depend on its
batch mates or on the grid; the program that finishes a request last merges the partial results,
always in
the same order.

The relative bias needs no buffer. All rows of token j share one position p_j, so

    bias[(j, head), n] = r[j, head, :] . Prev[:, n + (E - 1 - p_j)]       Prev = P reversed

is a product with a contiguous slice of Prev. Slices start at a multiple of 8 in one of the eight
shifted copies of the
table. For several tokens the features are laid out block-diagonally, [rows, tokens * R], against
the stacked slices
[tokens * R, keys]: one matrix product again, four tokens at a time.
"""

import triton
import triton.language as tl

from triton_attn.tiles import LOG2E, drain_stores, load_rows, softmax_step, visible_keys


@triton.jit
def _splits_of(
    kv_len, q_start, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """First visible key, length of a split, number of the first split, count. The length grows
    with the request's own
    length, so that the count stays bounded."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(q_start - WINDOW + 1, 0)
    split = SPLIT * tl.maximum(tl.cdiv(kv_len - first_key, SPLIT * (MAX_SPLITS - 1)), 1)
    first_split = first_key // split
    return first_key, split, first_split, tl.maximum(tl.cdiv(kv_len, split) - first_split, 1)


@triton.jit
def _features(
    r_ptr, token0, row_token, row_head, mask_rows, chunk, stride_r_t, stride_r_h,
    D_REL: tl.constexpr, BLOCK_R: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """[rows, TOKENS * BLOCK_R]: r of the row's token in the columns of that token, 0 elsewhere;
    TOKENS from `chunk`."""
    cols = tl.arange(0, TOKENS * BLOCK_R)
    mine = (cols // BLOCK_R + chunk)[None, :] == row_token[:, None]
    ptrs = (
        r_ptr
        + (token0 + row_token)[:, None] * stride_r_t
        + row_head[:, None] * stride_r_h
        + (cols % BLOCK_R)[None, :]
    )
    return tl.load(
        ptrs, mask=mine & mask_rows[:, None] & (cols % BLOCK_R < D_REL)[None, :], other=0.0
    )


@triton.jit
def _slices(
    table_ptr, n0, offs_n, q_start, q_len, chunk, stride_table_s, stride_table_r,
    EXTENT: tl.constexpr, PAD: tl.constexpr, BLOCK_R: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """[TOKENS * BLOCK_R, keys]: the slice of the reversed profile that each token of the chunk
    sees at this key tile."""
    rows = tl.arange(0, TOKENS * BLOCK_R)
    token = rows // BLOCK_R + chunk
    # Column of key n for a token: n + (EXTENT - 1 - q_start - token), plus the copy's shift. The
    # part that may be
    # negative goes into the scalar pointer: buffer loads on AMD read 0 for a negative vector
    # offset. Both parts are
    # written as multiples of 8, so that eight neighbours are one load.
    base = EXTENT - 1 - q_start
    shift = (token - base) & 7
    ahead = ((base & 7) - token + shift + 16) >> 3  # >= 0: token < 16
    start = shift * stride_table_s + (rows % BLOCK_R) * stride_table_r + ahead * 8
    tile_ptr = table_ptr + ((n0 >> 3) * 8 + (base >> 3) * 8 + (PAD - 16))
    return tl.load(
        tile_ptr + start[:, None] + offs_n[None, :], mask=(token < q_len)[:, None], other=0.0
    )


@triton.jit
def _tile(
    acc, l, m, q, features0, features1, features2, features3, tau, n0, q_pos, q_token, row_head,
    k_ptr, v_ptr, page_row_ptr, table_ptr, aux,
    offs_n, offs_d, first_key, end_key, q_start, q_len, stride_k_p, stride_k_t, stride_v_p,
    stride_v_t, stride_table_s,
    stride_table_r, softmax_scale,
    MOD: tl.constexpr, SCORE_MOD: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    EXTENT: tl.constexpr,
    PAD: tl.constexpr, BLOCK_R: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0 = tl.multiple_of(n0, BLOCK_N)
    n = n0 + offs_n
    k = load_rows(
        k_ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t,
        MASKED, PAGE_SIZE, BLOCK_N,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MOD == 1:
        s = (
            SCORE_MOD(
                s * softmax_scale,
                q_pos[:, None],
                n[None, :],
                q_token[:, None],
                row_head[:, None],
                aux,
            )
            * LOG2E
        )
    else:
        s = s * (softmax_scale * LOG2E)
    if MOD == 2:
        p = _slices(
            table_ptr,
            n0,
            offs_n,
            q_start,
            q_len,
            0,
            stride_table_s,
            stride_table_r,
            EXTENT,
            PAD,
            BLOCK_R,
            TOKENS,
        )
        bias = tl.dot(features0, p, input_precision="ieee")
        if CHUNKS > 1:
            p = _slices(
                table_ptr,
                n0,
                offs_n,
                q_start,
                q_len,
                TOKENS,
                stride_table_s,
                stride_table_r,
                EXTENT,
                PAD,
                BLOCK_R,
                TOKENS,
            )
            bias = tl.dot(features1, p, bias, input_precision="ieee")
        if CHUNKS > 2:
            p = _slices(
                table_ptr,
                n0,
                offs_n,
                q_start,
                q_len,
                2 * TOKENS,
                stride_table_s,
                stride_table_r,
                EXTENT,
                PAD,
                BLOCK_R,
                TOKENS,
            )
            bias = tl.dot(features2, p, bias, input_precision="ieee")
        if CHUNKS > 3:
            p = _slices(
                table_ptr,
                n0,
                offs_n,
                q_start,
                q_len,
                3 * TOKENS,
                stride_table_s,
                stride_table_r,
                EXTENT,
                PAD,
                BLOCK_R,
                TOKENS,
            )
            bias = tl.dot(features3, p, bias, input_precision="ieee")
        s += bias * tau[:, None]
    if MASKED:
        s = tl.where(visible_keys(q_pos, n, end_key, WINDOW), s, float("-inf"))
    v = load_rows(
        v_ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_v_p, stride_v_t,
        MASKED, PAGE_SIZE, BLOCK_N,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    return softmax_step(acc, l, m, s, v)


@triton.jit
def _store_rows(
    out_ptr, lse_ptr, acc, l, m, q_token, row_head, mask_rows, offs_d, stride_out_t, stride_out_h,
    H: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # A row without a single visible key (padding, or a masking mod) is 0, never NaN.
    acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    ptrs = (
        out_ptr
        + q_token[:, None] * stride_out_t
        + row_head[:, None] * stride_out_h
        + offs_d[None, :]
    )
    tl.store(
        ptrs,
        acc.to(out_ptr.dtype.element_ty),
        mask=mask_rows[:, None] & (offs_d < HEAD_DIM)[None, :],
    )
    if lse_ptr is not None:
        lse = tl.where(l > 0, m + tl.log2(l), float("-inf")) / LOG2E
        tl.store(lse_ptr + q_token * H + row_head, lse, mask=mask_rows)


@triton.jit
def _merge(
    out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, pair, splits, token0, q_len, kv_head, out_rows,
    stride_out_t, stride_out_h,
    H: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr, MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Combine a request's partial results for rows `out_rows` of one K/V head, split after
    split."""
    row_token, row_head = out_rows // GROUP, kv_head * GROUP + out_rows % GROUP
    mask_rows = row_token < q_len
    base = pair * MAX_SPLITS * BLOCK_ROWS
    offs_d = tl.arange(0, BLOCK_D)
    offs_rd = out_rows[:, None] * BLOCK_D + offs_d[None, :]
    l = tl.zeros([MERGE_ROWS], tl.float32)
    m = tl.full([MERGE_ROWS], -1e30, tl.float32)
    acc = tl.zeros([MERGE_ROWS, BLOCK_D], tl.float32)
    for s0 in range(0, splits, MERGE):
        for j in tl.static_range(
            MERGE
        ):  # unrolled: the loads of MERGE splits are in flight together
            at = base + (s0 + j) * BLOCK_ROWS
            mask_j = mask_rows & (s0 + j < splits)
            lm_ptrs = partial_lm_ptr + at * 2 + out_rows
            l_j = tl.load(lm_ptrs, mask=mask_j, other=0.0, cache_modifier=".cg")
            m_j = tl.load(lm_ptrs + BLOCK_ROWS, mask=mask_j, other=-1e30, cache_modifier=".cg")
            part = tl.load(
                partial_ptr + at * BLOCK_D + offs_rd,
                mask=mask_j[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            m_new = tl.maximum(m, m_j)
            old, new = tl.exp2(m - m_new), tl.exp2(m_j - m_new)
            acc = acc * old[:, None] + part * new[:, None]
            l = l * old + l_j * new
            m = m_new
    _store_rows(
        out_ptr,
        lse_ptr,
        acc,
        l,
        m,
        token0 + row_token,
        row_head,
        mask_rows,
        offs_d,
        stride_out_t,
        stride_out_h,
        H,
        HEAD_DIM,
    )


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, cu_seqlens_q_ptr, kv_len_ptr,
    stride_out_t: tl.constexpr, stride_out_h: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr, MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    """The merge as a launch of its own, for verify: many rows would keep the last program busy for
    too long."""
    kv_head, request = tl.program_id(1), tl.program_id(2)
    token0 = tl.load(cu_seqlens_q_ptr + request)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1) - token0
    kv_len = tl.load(kv_len_ptr + request)
    _, _, _, splits = _splits_of(kv_len, kv_len - q_len, WINDOW, SPLIT, MAX_SPLITS)
    first_row = tl.program_id(0) * MERGE_ROWS
    if (splits == 1) | (first_row >= q_len * GROUP):
        return
    pair = request.to(tl.int64) * tl.num_programs(1) + kv_head
    _merge(
        out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, pair, splits, token0.to(tl.int64), q_len,
        kv_head,
        first_row + tl.arange(0, MERGE_ROWS), stride_out_t, stride_out_h, H, GROUP, BLOCK_ROWS,
        HEAD_DIM, BLOCK_D,
        MAX_SPLITS, MERGE, MERGE_ROWS,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
    kv_len_ptr, r_ptr, table_ptr,
    tau_ptr, aux, partial_ptr, partial_lm_ptr, ticket_ptr, stride_out_t: tl.constexpr,
    stride_out_h: tl.constexpr, stride_q_t: tl.constexpr, stride_q_h: tl.constexpr,
    stride_k_p: tl.constexpr, stride_k_t: tl.constexpr, stride_k_g: tl.constexpr,
    stride_v_p: tl.constexpr, stride_v_t: tl.constexpr, stride_v_g: tl.constexpr, stride_page_b,
    stride_r_t: tl.constexpr, stride_r_h: tl.constexpr,
    stride_table_s: tl.constexpr, stride_table_r: tl.constexpr, softmax_scale,
    MOD: tl.constexpr, SCORE_MOD: tl.constexpr, EXTENT: tl.constexpr, PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, D_REL: tl.constexpr, BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr, MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_HERE: tl.constexpr, AMD: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
    rows = tl.arange(0, BLOCK_ROWS)
    row_token, row_head = rows // GROUP, kv_head * GROUP + rows % GROUP
    mask_rows = row_token < q_len
    q_token = token0 + tl.where(mask_rows, row_token, 0)  # a mod may load through it
    q_ptrs = (
        q_ptr + q_token[:, None] * stride_q_t + row_head[:, None] * stride_q_h + offs_d[None, :]
    )
    q = tl.load(q_ptrs, mask=mask_rows[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    tau = tl.full([BLOCK_ROWS], LOG2E, tl.float32)
    f0 = q
    f1 = q
    f2 = q
    f3 = q
    if MOD == 2:
        if tau_ptr is not None:
            tau = tl.load(tau_ptr + q_token, mask=mask_rows, other=0.0) * LOG2E
        f0 = _features(
            r_ptr,
            token0,
            row_token,
            row_head,
            mask_rows,
            0,
            stride_r_t,
            stride_r_h,
            D_REL,
            BLOCK_R,
            TOKENS,
        )
        if CHUNKS > 1:
            f1 = _features(
                r_ptr,
                token0,
                row_token,
                row_head,
                mask_rows,
                TOKENS,
                stride_r_t,
                stride_r_h,
                D_REL,
                BLOCK_R,
                TOKENS,
            )
        if CHUNKS > 2:
            f2 = _features(
                r_ptr,
                token0,
                row_token,
                row_head,
                mask_rows,
                2 * TOKENS,
                stride_r_t,
                stride_r_h,
                D_REL,
                BLOCK_R,
                TOKENS,
            )
        if CHUNKS > 3:
            f3 = _features(
                r_ptr,
                token0,
                row_token,
                row_head,
                mask_rows,
                3 * TOKENS,
                stride_r_t,
                stride_r_h,
                D_REL,
                BLOCK_R,
                TOKENS,
            )

    q_start = kv_len - q_len
    q_pos = q_start + row_token
    first_key, split, first_split, splits = _splits_of(kv_len, q_start, WINDOW, SPLIT, MAX_SPLITS)
    if (program >= splits) | (q_len <= 0):
        return
    page_row_ptr = page_table_ptr + request.to(tl.int64) * stride_page_b - first_page
    k_head_ptr = k_ptr + kv_head * stride_k_g
    v_head_ptr = v_ptr + kv_head * stride_v_g
    pair = request.to(tl.int64) * tl.num_programs(1) + kv_head
    programs = tl.minimum(tl.num_programs(0), splits)

    for index in range(program, splits, programs):
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        l = tl.zeros([BLOCK_ROWS], tl.float32)
        m = tl.full([BLOCK_ROWS], -1e30, tl.float32)
        begin = tl.maximum((first_split + index) * split, first_key // BLOCK_N * BLOCK_N)
        end = tl.minimum((first_split + index + 1) * split, kv_len)
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
                    acc, l, m, q, f0, f1, f2, f3, tau, n0, q_pos, q_token, row_head, k_head_ptr,
                    v_head_ptr, page_row_ptr, table_ptr, aux,
                    offs_n, offs_d, first_key, end, q_start, q_len, stride_k_p, stride_k_t,
                    stride_v_p, stride_v_t,
                    stride_table_s, stride_table_r, softmax_scale, 0, SCORE_MOD, WINDOW > 0,
                    WINDOW, EXTENT, PAD, BLOCK_R, TOKENS, CHUNKS,
                    PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
        else:
            plain_end = begin
        for n0 in tl.range(plain_end, end, BLOCK_N, num_stages=STAGES):
            acc, l, m = _tile(
                acc, l, m, q, f0, f1, f2, f3, tau, n0, q_pos, q_token, row_head, k_head_ptr,
                v_head_ptr, page_row_ptr, table_ptr, aux, offs_n,
                offs_d, first_key, end, q_start, q_len, stride_k_p, stride_k_t, stride_v_p,
                stride_v_t, stride_table_s,
                stride_table_r, softmax_scale, MOD, SCORE_MOD, True, WINDOW, EXTENT, PAD, BLOCK_R,
                TOKENS, CHUNKS, PAGE_SIZE, BLOCK_N,
                HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        if splits == 1:
            _store_rows(
                out_ptr,
                lse_ptr,
                acc,
                l,
                m,
                q_token,
                row_head,
                mask_rows,
                offs_d,
                stride_out_t,
                stride_out_h,
                H,
                HEAD_DIM,
            )
        else:
            slot = (pair * MAX_SPLITS + index) * BLOCK_ROWS
            tl.store(
                partial_ptr + slot * BLOCK_D + rows[:, None] * BLOCK_D + offs_d[None, :],
                acc,
                mask=mask_rows[:, None],
            )
            tl.store(partial_lm_ptr + slot * 2 + rows, l, mask=mask_rows)
            tl.store(partial_lm_ptr + slot * 2 + BLOCK_ROWS + rows, m, mask=mask_rows)
    if splits == 1 or not MERGE_HERE:
        return

    # The last program of this request and K/V head merges. Every wave's stores must be out before
    # the ticket is drawn.
    drain_stores(rows, AMD)
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr + pair, 1, sem="acq_rel", scope="gpu")
    if ticket < programs - 1:
        return
    tl.debug_barrier()
    tl.store(ticket_ptr + pair, 0)
    _merge(
        out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, pair, splits, token0, q_len, kv_head,
        tl.arange(0, MERGE_ROWS),
        stride_out_t, stride_out_h, H, GROUP, BLOCK_ROWS, HEAD_DIM, BLOCK_D, MAX_SPLITS, MERGE,
        MERGE_ROWS,
    )  # fmt: skip
