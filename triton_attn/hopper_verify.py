"""Verify for Hopper: split-KV over the warp groups of hopper.py, for global layers whose query rows
do not fit the 16 or 32 of an ordinary decode tile.

All query rows of a request and K/V head (its heads times its tokens, at most 128) are the rows of
one or two consumers, so K and V are read once. An item is a unit of SPLIT keys; its partial result
goes to the slots of decode_merge.py, whose second launch merges them. Units depend on a request's
own length only, so results do not depend on its batch mates.

Tiles beyond the extent of every row have no product of the bias. Programs are persistent.
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
from triton_attn.hopper_consumer import (
    CLEAR,
    DIAGONAL,
    LOG2E,
    let_next_start,
    pack,
    softmax,
    unpack,
)
from triton_attn.hopper_operands import (
    HALF_ROWS,
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
def _step(
    acc, words, m, l, tile, count, biased, q, f, f_more, factor, k_smem, v_smem, p_smem, p_more,
    k_ready, k_free, v_ready, v_free, p_ready, p_free, q_pos, keys, qk_scale,
    MORE: gl.constexpr, BIASED: gl.constexpr,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, P_STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Scores of tile number `count`, while the p.v product of the tile before it runs."""
    # Before the products start: nothing else may write their operands' registers then.
    p = unpack(words, BLOCK_N, P_LAYOUT, DTYPE)
    before = (count - 1) % STAGES
    s, b = start_scores(
        q, f, f_more, k_smem, p_smem, p_more, k_ready, p_ready, count, biased, MORE,
        BIASED, BLOCK_N, STAGES, P_STAGES, S_LAYOUT,
    )  # fmt: skip
    mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    if BIASED:
        s, b = warpgroup_mma_wait(1, deps=[s, b])
        mbarrier.arrive(p_free.index(biased % P_STAGES), count=1)
        s = s + b * factor[:, None]
    else:
        s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(count % STAGES), count=1)
    p_new, m, l, alpha = softmax(s, m, l, tile, q_pos, keys, qk_scale, MASKED, 0, BLOCK_N)
    # l depends on every exponential: they are all issued before the wait, under the p.v product.
    acc, l, p_new = warpgroup_mma_wait(0, deps=[acc, l, p_new])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, pack(p_new, BLOCK_N, DTYPE), m, l


@gluon.jit
def _consume(
    warp_group: gl.constexpr, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr,
    kv_len_ptr, pairs, most_parts, kv_heads, qk_scale, tau_scale, q_smem, f_smem, f_more, k_smem,
    v_smem, p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_ready, p_free,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr,
    MORE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, P_STAGES: gl.constexpr, SPLIT: gl.constexpr, MAX_PARTS: gl.constexpr,
):  # fmt: skip
    """Rows warp_group * 64 ... of every item of this program. A group without rows computes all the
    same: its products end with the other's."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    m0: gl.constexpr = warp_group * 64
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    row_s = m0 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    row_o = m0 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    f = f_smem.index(0)
    f2 = f_more.index(0)
    count = 0
    biased = 0
    done = 0
    let_next_start()
    for turn in range(gl.cdiv(pairs * most_parts, gl.num_programs(0))):
        request, kv_head, part, token0, q_len, q_start, begin, end = item(
            turn, cu_seqlens_q_ptr, kv_len_ptr, pairs, most_parts, kv_heads, 0, SPLIT, MAX_PARTS
        )
        if q_len > 0:
            bottom, low, top = tiles(q_start, begin, end, BIASED, EXTENT, 0, BLOCK_N)
            token = row_s // GROUP
            q_pos = q_start + token
            factor = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, s_layout)) * tau_scale
            if BIASED and tau_ptr is not None:
                tau = gl.load(tau_ptr + token0 + token, mask=token < q_len, other=0.0)
                factor = factor * tau
            mbarrier.wait(q_ready.index(0), done & 1)
            # From registers: shared memory could not feed the tensor cores with both operands.
            q = q_smem.index(warp_group).load(q_layout)
            s, b = start_scores(
                q, f, f2, k_smem, p_smem, p_more, k_ready, p_ready, count, biased, MORE,
                BIASED, BLOCK_N, STAGES, P_STAGES, s_layout,
            )  # fmt: skip
            if BIASED:
                s, b = warpgroup_mma_wait(0, deps=[s, b])
                mbarrier.arrive(p_free.index(biased % P_STAGES), count=1)
                s = s + b * factor[:, None]
            else:
                s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(count % STAGES), count=1)
            m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
            l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
            acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            p, m, l, _alpha = softmax(s, m, l, top, q_pos, keys, qk_scale, DIAGONAL, 0, BLOCK_N)
            p = pack(p, BLOCK_N, dtype)
            count += 1
            biased += 1
            for back in range(top - low):
                acc, p, m, l = _step(
                    acc, p, m, l, top - 1 - back, count, biased, q, f, f2, factor, k_smem, v_smem,
                    p_smem, p_more, k_ready, k_free, v_ready, v_free, p_ready, p_free, q_pos, keys,
                    qk_scale, MORE, BIASED, DIAGONAL, BLOCK_N, STAGES,
                    P_STAGES, s_layout, o_layout, p_layout, dtype,
                )  # fmt: skip
                count += 1
                biased += 1
            # Queries are in registers and features used up: the next item's may come.
            mbarrier.arrive(q_free.index(0), count=1)
            done += 1
            for back in range(low - bottom):
                acc, p, m, l = _step(
                    acc, p, m, l, low - 1 - back, count, biased, q, f, f2, factor, k_smem, v_smem,
                    p_smem, p_more, k_ready, k_free, v_ready, v_free, p_ready, p_free, q_pos, keys,
                    qk_scale, MORE, False, CLEAR, BLOCK_N, STAGES,
                    P_STAGES, s_layout, o_layout, p_layout, dtype,
                )  # fmt: skip
                count += 1
            p = unpack(p, BLOCK_N, p_layout, dtype)
            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(before), count=1)
            slot = (request * kv_heads + kv_head).to(gl.int64) * MAX_PARTS + part
            ptrs = partial_ptr + slot * (ROWS * HEAD_DIM)
            ptrs = ptrs + (row_o * HEAD_DIM)[:, None] + offs_d[None, :]
            gl.store(ptrs, acc, mask=(row_o < q_len * GROUP)[:, None])
            lm_ptrs = partial_lm_ptr + slot * (2 * ROWS) + row_s
            gl.store(lm_ptrs, l, mask=row_s < q_len * GROUP)
            gl.store(lm_ptrs + ROWS, m, mask=row_s < q_len * GROUP)


@gluon.jit(do_not_specialize=["pairs", "most_parts", "kv_heads"])
def _hopper_verify_kernel(
    partial_ptr, partial_lm_ptr, q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, tau_ptr, page_table_ptr,
    first_page_ptr, cu_seqlens_q_ptr, kv_len_ptr, pairs, most_parts, kv_heads,
    stride_q_t: gl.constexpr, stride_q_h: gl.constexpr, stride_k_p: gl.constexpr,
    stride_k_t: gl.constexpr, stride_k_g: gl.constexpr, stride_v_p: gl.constexpr,
    stride_v_t: gl.constexpr, stride_v_g: gl.constexpr, stride_page_b, stride_r_t: gl.constexpr,
    stride_r_h: gl.constexpr, softmax_scale, BIASED: gl.constexpr, EXTENT: gl.constexpr,
    PAD: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    TOKENS: gl.constexpr, MORE: gl.constexpr, BLOCK_R: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, P_STAGES: gl.constexpr,
    SPLIT: gl.constexpr, MAX_PARTS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [HALVES, 64, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    f_smem, p_smem = feature_tiles(q_smem, P_STAGES, BIASED, TOKENS, BLOCK_R, BLOCK_N)
    f_more, p_more = feature_tiles(q_smem, P_STAGES, BIASED, MORE, BLOCK_R, BLOCK_N)
    # Every producer thread arrives once its own copies have landed, each consumer group once.
    q_ready, q_free = rings(1, (128, HALVES))
    k_ready, v_ready, k_free, v_free = rings(STAGES, (128, 128, HALVES, HALVES))
    p_ready, p_free = rings(P_STAGES, (128, HALVES))
    qk_scale = softmax_scale * LOG2E
    tau_scale = 1.0 / softmax_scale
    if HALVES == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    0, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr,
                    pairs, most_parts, kv_heads, qk_scale, tau_scale, q_smem, f_smem, f_more,
                    k_smem, v_smem, p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, GROUP, ROWS, MORE, HEAD_DIM,
                    BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS,
                )),
                (produce, (
                    q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, page_table_ptr, first_page_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_parts, kv_heads, stride_q_t,
                    stride_q_h, stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t,
                    stride_v_g, stride_page_b, stride_r_t, stride_r_h, q_smem, f_smem, f_more,
                    k_smem, v_smem, p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, PAD, 0, GROUP, HALVES, TOKENS, MORE,
                    BLOCK_R, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, 1,
                )),
            ],
            [4],
            [96],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    0, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr,
                    pairs, most_parts, kv_heads, qk_scale, tau_scale, q_smem, f_smem, f_smem,
                    k_smem, v_smem, p_smem, p_smem, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, GROUP, ROWS, 0, HEAD_DIM, BLOCK_N,
                    STAGES, P_STAGES, SPLIT, MAX_PARTS,
                )),
                (_consume, (
                    1, partial_ptr, partial_lm_ptr, q_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr,
                    pairs, most_parts, kv_heads, qk_scale, tau_scale, q_smem, f_more, f_more,
                    k_smem, v_smem, p_more, p_more, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, GROUP, ROWS, 0, HEAD_DIM, BLOCK_N,
                    STAGES, P_STAGES, SPLIT, MAX_PARTS,
                )),
                (produce, (
                    q_ptr, k_ptr, v_ptr, r_ptr, by_key_ptr, page_table_ptr, first_page_ptr,
                    cu_seqlens_q_ptr, kv_len_ptr, pairs, most_parts, kv_heads, stride_q_t,
                    stride_q_h, stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t,
                    stride_v_g, stride_page_b, stride_r_t, stride_r_h, q_smem, f_smem, f_more,
                    k_smem, v_smem, p_smem, p_more, q_ready, q_free, k_ready, k_free, v_ready,
                    v_free, p_ready, p_free, BIASED, EXTENT, PAD, 0, GROUP, HALVES, TOKENS, MORE,
                    BLOCK_R, PAGE_SIZE, HEAD_DIM, BLOCK_N, STAGES, P_STAGES, SPLIT, MAX_PARTS, 1,
                )),
            ],
            [4, 4],
            [208, 88],  # registers of the second consumer and the producer; the first gets the rest
        )  # fmt: skip


def launch_hopper_verify(
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
    most_parts: int,
    max_parts: int,
    softmax_scale: float,
    programs: int,
    row: TuningRow,
) -> None:
    """Fill the slots of all requests; arguments as `attention_verify` prepared them.

    Args:
        max_q_len: bound on the tokens of a request; heads of a K/V head times it are at most 128
            rows.
        most_parts: bound on the units of a request.
        programs: of the persistent grid.
        row: names SPLIT, BLOCK_N, STAGES, P_STAGES.
    """
    B, g, D = kv_len.shape[0], k_pages.shape[2], q.shape[2]
    group = q.shape[1] // g
    halves = triton.cdiv(group * max_q_len, HALF_ROWS)
    pointers, strides, constants = bias_arguments(bias)
    tokens, more = feature_tokens(group, max_q_len, constants["BLOCK_R"])
    names = ("SPLIT", "BLOCK_N", "STAGES", "P_STAGES")
    _hopper_verify_kernel[(min(programs, B * g * most_parts),)](
        partial, partial_lm, q, k_pages, v_pages, *pointers, page_table, first_page,
        cu_seqlens_q, kv_len, B * g, most_parts, g, q.stride(0), q.stride(1), k_pages.stride(0),
        k_pages.stride(1), k_pages.stride(2), v_pages.stride(0), v_pages.stride(1),
        v_pages.stride(2), page_table.stride(0), *strides, softmax_scale,
        GROUP=group,
        ROWS=group * max_q_len,
        HALVES=halves,
        TOKENS=tokens,
        MORE=more,
        PAGE_SIZE=k_pages.shape[1],
        HEAD_DIM=D,
        MAX_PARTS=max_parts,
        **constants,
        **{name: row.constexprs[name] for name in names},
        **row.launch_options(),
    )  # fmt: skip
