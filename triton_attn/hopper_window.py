"""Verify of window layers for Hopper: the query rows of a request and K/V head (heads times tokens,
at most 64) are one tile; a key tile's sums are folded into those of its share.

Even tiles, counted from the last key, are one share and odd ones the other; the result is the fold
of both. In large batches a program takes a window, its two consumers a share each. In small ones
every share, or in still smaller ones every key tile, has a program and a second launch folds. Sums
and folds are the same arithmetic in the same order, so a result has the same bits either way. The
producer and the scores are those of hopper_operands.py.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernel_base.hopper_copy import rings
from kernel_base.tuning import TuningRow
from triton_attn.decode_merge import _window_merge_kernel
from triton_attn.hopper_consumer import DIAGONAL, LOG2E, let_next_start, softmax
from triton_attn.hopper_operands import (
    bias_arguments,
    feature_tiles,
    feature_tokens,
    item,
    produce,
    start_scores,
    tiles,
)
from triton_attn.score_mod import RelativeBias


@gluon.jit
def _tile_sums(
    q, f, f_more, factor, tile, count, q_pos, keys, qk_scale, k_smem, v_smem, p_smem, p_more,
    k_ready, k_free, v_ready, v_free, p_ready, p_free,
    BIASED: gl.constexpr, WINDOW: gl.constexpr, MORE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr, S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(acc, l, m) of one key tile alone, which is the producer's tile number `count`."""
    s, b = start_scores(
        q, f, f_more, k_smem, p_smem, p_more, k_ready, p_ready, count, count, MORE, BIASED,
        BLOCK_N, STAGES, P_STAGES, S_LAYOUT,
    )  # fmt: skip
    if BIASED:
        s, b = warpgroup_mma_wait(0, deps=[s, b])
        mbarrier.arrive(p_free.index(count % P_STAGES), count=1)
        s = s + b * factor[:, None]
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(count % STAGES), count=1)
    n = tile * BLOCK_N + keys
    s = gl.where(n[None, :] > (q_pos - WINDOW)[:, None], s, float("-inf"))
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    p, m, l, _alpha = softmax(s, m, l, tile, q_pos, keys, qk_scale, DIAGONAL, 0, BLOCK_N)
    p = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, O_LAYOUT, 2))
    mbarrier.wait(v_ready.index(count % STAGES), (count // STAGES) & 1)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
    acc = warpgroup_mma(p, v_smem.index(count % STAGES), acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free.index(count % STAGES), count=1)
    return acc, l, m


@gluon.jit
def _fold(acc, l, m, acc2, l2, m2, O_LAYOUT: gl.constexpr):
    """decode_merge.fold on warp groups."""
    m_new = gl.maximum(m, m2)
    a = gl.exp2(m - m_new)
    b = gl.exp2(m2 - m_new)
    a_o = gl.convert_layout(a, gl.SliceLayout(1, O_LAYOUT))[:, None]
    b_o = gl.convert_layout(b, gl.SliceLayout(1, O_LAYOUT))[:, None]
    acc, a_o = gl.broadcast(acc, a_o)
    acc2, b_o = gl.broadcast(acc2, b_o)
    return gl.fma(acc2, b_o, acc * a_o), gl.fma(l2, b, l * a), m_new


@gluon.jit
def _consume(
    share: gl.constexpr, out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr,
    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, stride_out_t: gl.constexpr,
    stride_out_h: gl.constexpr, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem, v_smem, p_smem,
    p_more, acc_smem, l_smem, m_smem, q_ready, k_ready, k_free, v_ready, v_free, p_ready, p_free,
    handed,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr, SPLIT: gl.constexpr,
    MAX_PARTS: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Tiles share, share + 2, ... of the window, last one first; with SHARES the program's share,
    with SPLIT its one tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    row_s = gl.arange(0, 64, rows_s)
    row_o = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    alone: gl.constexpr = SHARES or SPLIT > 0
    if alone:
        let_next_start()
    request, kv_head, part, token0, q_len, q_start, begin, end = item(
        0, cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, WINDOW, SPLIT, MAX_PARTS
    )
    if q_len > 0:
        bottom, _low, top = tiles(q_start, begin, end, BIASED, EXTENT, WINDOW, BLOCK_N)
        token = row_s // GROUP
        q_pos = q_start + token
        factor = gl.full([64], 1.0, gl.float32, rows_s) * tau_scale
        if BIASED and tau_ptr is not None:
            tau = gl.load(tau_ptr + token0 + token, mask=token < q_len, other=0.0)
            factor = factor * tau
        q = q_smem.index(0)
        f = f_smem.index(0)
        f2 = f_more.index(0)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        l = gl.zeros([64], gl.float32, rows_s)
        m = gl.full([64], -1e30, gl.float32, rows_s)
        mbarrier.wait(q_ready.index(0), 0)
        first = top - share
        if SHARES:
            first = top - part
        for turn in range((first - bottom + 2) // 2):
            count = turn if alone else 2 * turn + share
            acc_t, l_t, m_t = _tile_sums(
                q, f, f2, factor, first - 2 * turn, count, q_pos, keys, qk_scale, k_smem, v_smem,
                p_smem, p_more, k_ready, k_free, v_ready, v_free, p_ready, p_free, BIASED, WINDOW,
                MORE, HEAD_DIM, BLOCK_N, STAGES, P_STAGES, s_layout, o_layout, dtype,
            )  # fmt: skip
            acc, l, m = _fold(acc, l, m, acc_t, l_t, m_t, o_layout)
        if alone:
            slot = (request * kv_heads + kv_head).to(gl.int64) * MAX_PARTS + part
            ptrs = partial_ptr + slot * (ROWS * HEAD_DIM)
            ptrs = ptrs + (row_o * HEAD_DIM)[:, None] + offs_d[None, :]
            gl.store(ptrs, acc, mask=(row_o < q_len * GROUP)[:, None])
            lm_ptrs = partial_lm_ptr + slot * (2 * ROWS) + row_s
            gl.store(lm_ptrs, l, mask=row_s < q_len * GROUP)
            gl.store(lm_ptrs + ROWS, m, mask=row_s < q_len * GROUP)
        elif share == 1:
            acc_smem.store(acc)
            l_smem.store(l)
            m_smem.store(m)
            mbarrier.arrive(handed.index(0), count=1)
        else:
            mbarrier.wait(handed.index(0), 0)
            acc_t = acc_smem.load(o_layout)
            l_t = l_smem.load(rows_s)
            m_t = m_smem.load(rows_s)
            acc, l, m = _fold(acc, l, m, acc_t, l_t, m_t, o_layout)
            # A row without a visible key (padding) is 0, never NaN.
            sums = gl.convert_layout(gl.where(l > 0, l, 1.0), gl.SliceLayout(1, o_layout))
            acc = acc / sums[:, None]
            row0 = token0.to(gl.int64)
            out_ptrs = out_ptr + row0 * stride_out_t + kv_head * GROUP * stride_out_h
            out_offs = (row_o // GROUP) * stride_out_t + (row_o % GROUP) * stride_out_h
            gl.store(
                out_ptrs + out_offs[:, None] + offs_d[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=(row_o < q_len * GROUP)[:, None],
            )
            if lse_ptr is not None:
                lse = gl.where(l > 0, m + gl.log2(l), float("-inf")) / LOG2E
                lse_ptrs = lse_ptr + (row0 + token) * H + kv_head * GROUP + row_s % GROUP
                gl.store(lse_ptrs, lse, mask=row_s < q_len * GROUP)


@gluon.jit(do_not_specialize=["pairs", "most_tiles", "kv_heads"])
def _hopper_window_kernel(
    out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, tau_ptr,
    page_table_ptr, first_page_ptr, cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads,
    stride_out_t: gl.constexpr, stride_out_h: gl.constexpr, stride_q_t: gl.constexpr,
    stride_q_h: gl.constexpr, stride_k_p: gl.constexpr, stride_k_t: gl.constexpr,
    stride_k_g: gl.constexpr, stride_v_p: gl.constexpr, stride_v_t: gl.constexpr,
    stride_v_g: gl.constexpr, stride_page_b, stride_r_t: gl.constexpr, stride_r_h: gl.constexpr,
    softmax_scale,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, PAD: gl.constexpr, WINDOW: gl.constexpr,
    H: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    MORE: gl.constexpr, BLOCK_R: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr, SPLIT: gl.constexpr,
    MAX_PARTS: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [1, 64, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    f_smem, p_smem = feature_tiles(q_smem, P_STAGES, BIASED, TOKENS, BLOCK_R, BLOCK_N)
    f_more, p_more = feature_tiles(q_smem, P_STAGES, BIASED, MORE, BLOCK_R, BLOCK_N)
    acc_smem = q_smem
    l_smem = q_smem
    m_smem = q_smem
    alone: gl.constexpr = SHARES or SPLIT > 0
    step: gl.constexpr = 2 if SHARES else 1
    if not alone:
        acc_smem = gl.allocate_shared_memory(gl.float32, [64, HEAD_DIM], sums_layout)
        l_smem = gl.allocate_shared_memory(gl.float32, [64], vector_layout)
        m_smem = gl.allocate_shared_memory(gl.float32, [64], vector_layout)
    # Every producer thread arrives once its own copies have landed, a tile's consumer once.
    q_ready, q_free, handed = rings(1, (128, 1, 1))
    k_ready, v_ready, k_free, v_free = rings(STAGES, (128, 128, 1, 1))
    p_ready, p_free = rings(P_STAGES, (128, 1))
    qk_scale = softmax_scale * LOG2E
    tau_scale = 1.0 / softmax_scale
    if alone:
        gl.warp_specialize(
            [
                (_consume, (
                    0, out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, stride_out_t,
                    stride_out_h, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem, v_smem,
                    p_smem, p_more, acc_smem, l_smem, m_smem, q_ready, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, handed, BIASED, EXTENT, WINDOW, H, GROUP, ROWS, MORE,
                    HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, SHARES,
                )),
                (produce, (
                    q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, page_table_ptr, first_page_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, stride_q_t,
                    stride_q_h, stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t,
                    stride_v_g, stride_page_b, stride_r_t, stride_r_h, q_smem, f_smem, f_more,
                    k_smem, v_smem, p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, PAD, WINDOW, GROUP, 1, TOKENS, MORE,
                    BLOCK_R, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, step,
                )),
            ],
            [4],
            [96],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, stride_out_t,
                    stride_out_h, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem, v_smem,
                    p_smem, p_more, acc_smem, l_smem, m_smem, q_ready, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, handed, BIASED, EXTENT, WINDOW, H, GROUP, ROWS, MORE,
                    HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, SHARES,
                )),
                (_consume, (
                    1, out_ptr, lse_ptr, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, stride_out_t,
                    stride_out_h, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem, v_smem,
                    p_smem, p_more, acc_smem, l_smem, m_smem, q_ready, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, handed, BIASED, EXTENT, WINDOW, H, GROUP, ROWS, MORE,
                    HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, SHARES,
                )),
                (produce, (
                    q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, page_table_ptr, first_page_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_tiles, kv_heads, stride_q_t,
                    stride_q_h, stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t,
                    stride_v_g, stride_page_b, stride_r_t, stride_r_h, q_smem, f_smem, f_more,
                    k_smem, v_smem, p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, PAD, WINDOW, GROUP, 1, TOKENS, MORE,
                    BLOCK_R, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, step,
                )),
            ],
            [4, 4],
            [208, 88],  # registers of the second consumer and the producer; the first has the rest
        )  # fmt: skip


def launch_hopper_window(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    first_page: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_len: torch.Tensor,
    bias: RelativeBias | None,
    partial: torch.Tensor,
    partial_lm: torch.Tensor,
    *,
    max_q_len: int,
    window: int,
    max_parts: int,
    softmax_scale: float,
    programs: int,
    row: TuningRow,
) -> None:
    """Write the results of all requests; arguments as `attention_verify` prepared them.

    Args:
        max_q_len: bound on the tokens of a request; heads of a K/V head times it are at most 64.
        max_parts: slots of a request and K/V head, at least the key tiles of a window.
        programs: up to so many, every key tile has its own, or every share.
        row: names BLOCK_N, STAGES, P_STAGES.
    """
    B, g, D = kv_len.shape[0], k_pages.shape[2], q.shape[2]
    group, rows, block_n = q.shape[1] // g, q.shape[1] // g * max_q_len, row.constexprs["BLOCK_N"]
    pointers, strides, constants = bias_arguments(bias)
    tokens, more = feature_tokens(group, max_q_len, constants["BLOCK_R"])
    most_tiles = triton.cdiv(window + max_q_len - 2, block_n) + 1
    apart = B * g * most_tiles <= programs
    shares = not apart and B * g * 2 <= programs
    parts = most_tiles if apart else 2 if shares else 1
    _hopper_window_kernel[(B * g * parts,)](
        out, lse, partial, partial_lm, q, k_pages, v_pages, *pointers, page_table, first_page,
        cu_seqlens_q, kv_len, B * g, parts, g, out.stride(0), out.stride(1),
        q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        v_pages.stride(0), v_pages.stride(1), v_pages.stride(2), page_table.stride(0),
        *strides, softmax_scale,
        WINDOW=window,
        H=q.shape[1],
        GROUP=group,
        ROWS=rows,
        TOKENS=tokens,
        MORE=more,
        PAGE_SIZE=k_pages.shape[1],
        HEAD_DIM=D,
        BLOCK_N=block_n,
        STAGES=1 if apart else row.constexprs["STAGES"],
        P_STAGES=1 if apart else row.constexprs["P_STAGES"],
        SPLIT=block_n if apart else 0,
        MAX_PARTS=max_parts,
        SHARES=shares,
        **constants,
        **row.launch_options(),
    )  # fmt: skip
    if parts > 1:
        _window_merge_kernel[(rows, g, B)](
            out, lse, partial, partial_lm, cu_seqlens_q, kv_len, out.stride(0), out.stride(1),
            WINDOW=window,
            H=q.shape[1],
            GROUP=group,
            ROWS=rows,
            HEAD_DIM=D,
            BLOCK_N=block_n,
            MOST=parts,
            MAX_PARTS=max_parts,
            SHARES=shares,
            num_warps=1,
            launch_pdl=True,
        )  # fmt: skip
