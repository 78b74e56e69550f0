"""Verify of window layers for Hopper: one program a request and K/V head, nothing to merge.

The query rows (heads times tokens, at most 64) are the rows of both consumers, which take alternate
key tiles of the window; the second hands its sums to the first through shared memory. The producer
and the scores are those of hopper_verify.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernel_base.tuning import TuningRow
from triton_attn.hopper_consumer import DIAGONAL, LOG2E, pack, softmax, unpack
from triton_attn.hopper_verify import (
    feature_tiles,
    feature_tokens,
    in_window,
    item,
    produce,
    start_scores,
    step,
    tiles,
)
from triton_attn.score_mod import PROFILE_PAD, RelativeBias


@gluon.jit
def _consume(
    share: gl.constexpr, out_ptr, lse_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr, pairs,
    kv_heads, stride_out_t: gl.constexpr, stride_out_h: gl.constexpr, qk_scale, tau_scale, q_smem,
    f_smem, f_more, k_smem, v_smem, p_smem, p_more, acc_smem, l_smem, m_smem, q_ready, k_ready,
    k_free, v_ready, v_free, p_ready, p_free, handed,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, MORE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, Q_REGS: gl.constexpr,
):  # fmt: skip
    """Tiles share, share + 2, ... of the window, highest first."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    rows_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    row_s = gl.arange(0, 64, rows_s)
    row_o = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    _request, kv_head, _part, token0, q_len, q_start, begin, end = item(
        0, cu_seqlens_q_ptr, kv_len_ptr, pairs, 1, kv_heads, WINDOW, 1, 1
    )
    if q_len > 0:
        bottom, _low, top = tiles(q_start, begin, end, BIASED, EXTENT, WINDOW, BLOCK_N)
        token = row_s // GROUP
        q_pos = q_start + token
        factor = gl.full([64], 1.0, gl.float32, rows_s) * tau_scale
        if BIASED and tau_ptr is not None:
            tau = gl.load(tau_ptr + token0 + token, mask=token < q_len, other=0.0)
            factor = factor * tau
        mbarrier.wait(q_ready.index(0), 0)
        q = q_smem.index(0)
        if Q_REGS:
            q = q_smem.index(0).load(q_layout)
        f = f_smem.index(0)
        f2 = f_more.index(0)
        s, b = start_scores(
            q, f, f2, k_smem, p_smem, p_more, k_ready, p_ready, share, share, 0, 1, MORE, BIASED,
            BLOCK_N, STAGES, 2, s_layout,
        )  # fmt: skip
        if BIASED:
            s, b = warpgroup_mma_wait(0, deps=[s, b])
            mbarrier.arrive(p_free.index(share), count=1)
            s = s + b * factor[:, None]
        else:
            s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_free.index(share), count=1)
        m = gl.full([64], -1e30, gl.float32, rows_s)
        l = gl.zeros([64], gl.float32, rows_s)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
        s = in_window(s, top - share, q_pos, keys, WINDOW, BLOCK_N)
        p, m, l, _alpha = softmax(s, m, l, top - share, q_pos, keys, qk_scale, DIAGONAL, 0, BLOCK_N)
        p = pack(p, BLOCK_N, dtype)
        rounds = (top - bottom + 1) // 2
        for turn in range(1, rounds):
            count = 2 * turn + share
            acc, p, m, l = step(
                acc, p, m, l, top - count, count, count, q, f, f2, factor, k_smem, v_smem, p_smem,
                p_more, k_ready, k_free, v_ready, v_free, p_ready, p_free, q_pos, keys, qk_scale, 0,
                1, MORE, BIASED, DIAGONAL, WINDOW, 2, BLOCK_N, STAGES, 2, s_layout, o_layout,
                p_layout, dtype,
            )  # fmt: skip
        p = unpack(p, BLOCK_N, p_layout, dtype)
        last = 2 * (rounds - 1) + share
        mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(last % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if share == 1:
            acc_smem.store(acc)
            l_smem.store(l)
            m_smem.store(m)
            mbarrier.arrive(handed.index(0), count=1)
        else:
            mbarrier.wait(handed.index(0), 0)
            m_other = m_smem.load(rows_s)
            l_other = l_smem.load(rows_s)
            acc_other = acc_smem.load(o_layout)
            m_new = gl.maximum(m, m_other)
            mine = gl.exp2(m - m_new)
            other = gl.exp2(m_other - m_new)
            l = l * mine + l_other * other
            mine_o = gl.convert_layout(mine, gl.SliceLayout(1, o_layout))
            other_o = gl.convert_layout(other, gl.SliceLayout(1, o_layout))
            acc = acc * mine_o[:, None] + acc_other * other_o[:, None]
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
                lse = gl.where(l > 0, m_new + gl.log2(l), float("-inf")) / LOG2E
                lse_ptrs = lse_ptr + (row0 + token) * H + kv_head * GROUP + row_s % GROUP
                gl.store(lse_ptrs, lse, mask=row_s < q_len * GROUP)


@gluon.jit(do_not_specialize=["pairs", "kv_heads"])
def _hopper_window_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, tau_ptr, page_table_ptr,
    first_page_ptr, cu_seqlens_q_ptr, kv_len_ptr, pairs, kv_heads, stride_out_t: gl.constexpr,
    stride_out_h: gl.constexpr, stride_q_t: gl.constexpr, stride_q_h: gl.constexpr,
    stride_k_p: gl.constexpr, stride_k_t: gl.constexpr, stride_k_g: gl.constexpr,
    stride_v_p: gl.constexpr, stride_v_t: gl.constexpr, stride_v_g: gl.constexpr, stride_page_b,
    stride_r_t: gl.constexpr, stride_r_h: gl.constexpr, softmax_scale, BIASED: gl.constexpr,
    EXTENT: gl.constexpr, PAD: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr, MORE: gl.constexpr, BLOCK_R: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_REGS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = gl.allocate_shared_memory(dtype, [1, 64, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    f_smem, p_smem = feature_tiles(q_smem, 1, 2, BIASED, TOKENS, BLOCK_R, BLOCK_N)
    f_more, p_more = feature_tiles(q_smem, 1, 2, BIASED, MORE, BLOCK_R, BLOCK_N)
    acc_smem = gl.allocate_shared_memory(gl.float32, [64, HEAD_DIM], sums_layout)
    l_smem = gl.allocate_shared_memory(gl.float32, [64], vector_layout)
    m_smem = gl.allocate_shared_memory(gl.float32, [64], vector_layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    # Every producer thread arrives once its own copies have landed, a consumer group once.
    mbarrier.init(q_ready.index(0), count=128)
    mbarrier.init(q_free.index(0), count=1)
    mbarrier.init(handed.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=128)
        mbarrier.init(v_ready.index(stage), count=128)
        mbarrier.init(k_free.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=1)
    for stage in gl.static_range(2):
        mbarrier.init(p_ready.index(stage), count=128)
        mbarrier.init(p_free.index(stage), count=1)
    qk_scale = softmax_scale * LOG2E
    tau_scale = 1.0 / softmax_scale
    gl.warp_specialize(
        [
            (_consume, (
                0, out_ptr, lse_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr, pairs, kv_heads,
                stride_out_t, stride_out_h, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem,
                v_smem, p_smem, p_more, acc_smem, l_smem, m_smem, q_ready, k_ready, k_free, v_ready,
                v_free, p_ready, p_free, handed, BIASED, EXTENT, WINDOW, H, GROUP, MORE, HEAD_DIM,
                BLOCK_N, STAGES, Q_REGS,
            )),
            (_consume, (
                1, out_ptr, lse_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr, pairs, kv_heads,
                stride_out_t, stride_out_h, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem,
                v_smem, p_smem, p_more, acc_smem, l_smem, m_smem, q_ready, k_ready, k_free, v_ready,
                v_free, p_ready, p_free, handed, BIASED, EXTENT, WINDOW, H, GROUP, MORE, HEAD_DIM,
                BLOCK_N, STAGES, Q_REGS,
            )),
            (produce, (
                q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, page_table_ptr, first_page_ptr,
                cu_seqlens_q_ptr, kv_len_ptr, pairs, 1, kv_heads, stride_q_t, stride_q_h,
                stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t, stride_v_g,
                stride_page_b, stride_r_t, stride_r_h, q_smem, f_smem, f_more, k_smem, v_smem,
                p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_ready, p_free,
                BIASED, EXTENT, PAD, WINDOW, GROUP, 1, TOKENS, MORE, BLOCK_R, PAGE_SIZE, HEAD_DIM,
                BLOCK_N, STAGES, 2, 1, 1,
            )),
        ],
        [4, 4],
        [208, 88],  # registers of the second consumer and the producer; the first gets the rest
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
    *,
    max_q_len: int,
    window: int,
    softmax_scale: float,
    row: TuningRow,
) -> None:
    """Write the results of all requests; arguments as `attention_verify` prepared them, heads of a
    K/V head times `max_q_len` at most 64."""
    B, g, D = kv_len.shape[0], k_pages.shape[2], q.shape[2]
    group = q.shape[1] // g
    block_r = bias.profile.by_key.shape[1] if bias else 16
    tokens, more = feature_tokens(group, max_q_len, block_r)
    _hopper_window_kernel[(B * g,)](
        out, lse, q, k_pages, v_pages, bias.r if bias else None,
        bias.profile.by_key if bias else None, bias.tau if bias else None, page_table, first_page,
        cu_seqlens_q, kv_len, B * g, g, out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), v_pages.stride(0),
        v_pages.stride(1), v_pages.stride(2), page_table.stride(0), bias.r.stride(0) if bias else 0,
        bias.r.stride(1) if bias else 0, softmax_scale,
        BIASED=bias is not None,
        EXTENT=bias.extent if bias else 1,
        PAD=PROFILE_PAD,
        WINDOW=window,
        H=q.shape[1],
        GROUP=group,
        TOKENS=tokens,
        MORE=more,
        BLOCK_R=block_r,
        PAGE_SIZE=k_pages.shape[1],
        HEAD_DIM=D,
        BLOCK_N=row.constexprs["BLOCK_N"],
        STAGES=row.constexprs["STAGES"],
        Q_REGS=row.constexprs.get("Q_REGS", True),
        **row.options,
    )  # fmt: skip
