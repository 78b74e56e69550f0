"""Verify for Hopper: split-KV over the warp groups of hopper.py, for more query rows than the 16 or
32 of an ordinary decode tile.

All query rows of a request and K/V head (its heads times its tokens, at most 128) are the rows of
two consumers, so K and V are read once. An item is a unit of SPLIT keys; its partial result goes to
the slots of decode_merge.py, whose second launch merges them. Units depend on a request's own
length only, so results do not depend on its batch mates.

The bias comes in strided rows as in prefill (profile.py), written by a small kernel of their own:
16 rows a request and head, row `token` with its columns at the alignment the tiles need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernel_base.device import let_next_start
from triton_attn.hopper import await_previous
from triton_attn.hopper_consumer import (
    CLEAR,
    DIAGONAL,
    LOG2E,
    pack,
    scores,
    skip,
    softmax,
    step,
    unpack,
)
from triton_attn.hopper_consumer import let_next_start as gluon_let_next_start
from triton_attn.profile import BUFFER_BYTES, BUFFER_PAD, pitch_of
from triton_attn.score_mod import PROFILE_PAD, RelativeBias

# Rows that a request and head have in the buffer: the most tokens of a verification.
SLOT_ROWS = 16


@triton.jit
def _verify_rows_kernel(
    rows_ptr, r_ptr, table_ptr, tau_ptr, cu_seqlens_q_ptr, kv_len_ptr, head0, factor,
    stride_r_t: tl.constexpr, stride_r_h: tl.constexpr, stride_table_r: tl.constexpr,
    EXTENT: tl.constexpr, FIRST_COLUMN: tl.constexpr, PITCH: tl.constexpr, PAD: tl.constexpr,
    D_REL: tl.constexpr, BLOCK_R: tl.constexpr, SLOT: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Strided rows of one request and head, BLOCK_C columns: factor * tau * r . P, reversed."""
    let_next_start(True)
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token0 = tl.load(cu_seqlens_q_ptr + request)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1) - token0
    q_start = tl.load(kv_len_ptr + request) - q_len
    token = tl.arange(0, SLOT)
    q_token = (token0 + token).to(tl.int64)
    live = token < q_len
    offs_r = tl.arange(0, BLOCK_R)
    r_ptrs = r_ptr + q_token[:, None] * stride_r_t + (head0 + head) * stride_r_h + offs_r[None, :]
    r = tl.load(r_ptrs, mask=live[:, None] & (offs_r < D_REL)[None, :], other=0.0)
    tau = tl.full([SLOT], 1.0, tl.float32)
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + q_token, mask=live, other=0.0)
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.load(table_ptr + FIRST_COLUMN + offs_r[:, None] * stride_table_r + c[None, :])
    rel = tl.dot(r, p, input_precision="ieee") * (tau * factor)[:, None]
    shift = (q_start - (EXTENT - 1)) & 15
    row = (head * tl.num_programs(2) + request).to(tl.int64) * SLOT + token
    ptrs = rows_ptr + PAD + row * PITCH + shift
    dtype = rows_ptr.dtype.element_ty
    mask = live[:, None] & (c < EXTENT)[None, :]
    tl.store(ptrs[:, None] + c[None, :], rel.to(dtype), mask=mask)
    if block == 0:
        # Zeros up to the borders of vectors of columns, since whole ones are read.
        x = tl.arange(0, 32)
        copy = (token + shift) & 15
        before = (x < 16)[None, :] & (x[None, :] < copy[:, None])
        after = (x >= 16)[None, :] & (x[None, :] < 32 + (-EXTENT) % 8 - copy[:, None])
        at = tl.where(before, x[None, :] - copy[:, None], EXTENT + x[None, :] - 16)
        tl.store(
            ptrs[:, None] + at, tl.zeros([SLOT, 32], dtype), mask=live[:, None] & (before | after)
        )


@gluon.jit
def _unit(
    turn, cu_seqlens_q_ptr, kv_len_ptr, items, most_parts, kv_heads, SPLIT: gl.constexpr,
    MAX_PARTS: gl.constexpr,
):  # fmt: skip
    """Item of round `turn`: request, K/V head, part, first token, q_len (0: none), q_start, first
    key, end of the keys. The last unit of a request comes first: it has the bias."""
    index = turn * gl.num_programs(0) + gl.program_id(0)
    here = index < items
    index = gl.minimum(index, items - 1)
    pair = index // most_parts
    request = pair // kv_heads
    token0 = gl.load(cu_seqlens_q_ptr + request)
    q_len = gl.load(cu_seqlens_q_ptr + request + 1) - token0
    kv_len = gl.load(kv_len_ptr + request)
    unit = SPLIT * gl.maximum(gl.cdiv(kv_len, SPLIT * MAX_PARTS), 1)
    part = gl.cdiv(kv_len, unit) - 1 - index % most_parts
    end = gl.minimum((part + 1) * unit, kv_len)
    rows = gl.where(here & (part >= 0), q_len, 0)
    return (
        request, pair % kv_heads, part, token0, rows, kv_len - q_len, part * unit, end,
    )  # fmt: skip


@gluon.jit
def _produce(
    q_ptr, k_ptr, v_ptr, rows_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr, kv_len_ptr,
    items, most_parts, kv_heads, kv_head0, requests, stride_q_t: gl.constexpr,
    stride_q_h: gl.constexpr, stride_k_p: gl.constexpr, stride_k_t: gl.constexpr,
    stride_k_g: gl.constexpr, stride_v_p: gl.constexpr, stride_v_t: gl.constexpr,
    stride_v_g: gl.constexpr, stride_page_b, q_smem, k_smem, v_smem, b_smem, q_ready, q_free,
    k_ready, k_free, v_ready, v_free,
    EXTENT: gl.constexpr, GROUP: gl.constexpr, HALVES: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, PITCH: gl.constexpr, PAD: gl.constexpr, SLOT: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, MAX_PARTS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    bias_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0]
    )
    bias_m = gl.arange(0, 64, gl.SliceLayout(1, bias_layout))
    bias_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, bias_layout))
    count = 0
    done = 0
    waited = 0
    n_request, n_head, _slot, n_token0, n_len, n_start, n_begin, n_end = _unit(
        0, cu_seqlens_q_ptr, kv_len_ptr, items, most_parts, kv_heads, SPLIT, MAX_PARTS
    )
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        request, head, token0, q_len, q_start, begin, end = (
            n_request, n_head, n_token0, n_len, n_start, n_begin, n_end
        )  # fmt: skip
        # The next item's lengths are on their way while this one is worked on.
        n_request, n_head, _slot, n_token0, n_len, n_start, n_begin, n_end = _unit(
            turn + 1, cu_seqlens_q_ptr, kv_len_ptr, items, most_parts, kv_heads, SPLIT, MAX_PARTS
        )
        if q_len > 0:
            kv_head = kv_head0 + head
            buffer = done % 2
            mbarrier.wait(q_free.index(buffer), ((done // 2) & 1) ^ 1)
            q_row_ptr = q_ptr + token0.to(gl.int64) * stride_q_t + kv_head * GROUP * stride_q_h
            for half in gl.static_range(HALVES):
                i = half * 64 + offs_m
                q_offs = (i // GROUP) * stride_q_t + (i % GROUP) * stride_q_h
                q_ptrs = q_row_ptr + q_offs[:, None] + offs_d[None, :]
                async_copy.async_copy_global_to_shared(
                    q_smem.index(buffer * 2 + half), q_ptrs, mask=(i < q_len * GROUP)[:, None]
                )
            async_copy.mbarrier_arrive(q_ready.index(buffer), increment_count=False)
            done += 1
            page_row_ptr = (
                page_table_ptr
                + request.to(gl.int64) * stride_page_b
                - gl.load(first_page_ptr + request)
            )
            bottom = begin // BLOCK_N
            top = (end - 1) // BLOCK_N
            plain = gl.maximum(q_start - EXTENT + 1, 0) // BLOCK_N
            shift = (q_start - (EXTENT - 1)) & 15
            row0 = ((head * GROUP).to(gl.int64) * requests + request) * SLOT
            start = row0 * PITCH + (PAD + EXTENT - 1 - q_start + shift)
            start = (start >> 4) * 16  # it is a multiple of 16; now the compiler knows
            for back in range(top - bottom + 1):
                n0 = (top - back) * BLOCK_N
                n = n0 + offs_n
                mask = (n < end)[:, None]
                stage = count % STAGES
                phase = (count // STAGES) & 1
                page = gl.load(page_row_ptr + n0 // PAGE_SIZE).to(gl.int64)
                in_page = n0 % PAGE_SIZE
                k_base = k_ptr + page * stride_k_p + in_page * stride_k_t + kv_head * stride_k_g
                v_base = v_ptr + page * stride_v_p + in_page * stride_v_t + kv_head * stride_v_g
                k_ptrs = k_base + (offs_n * stride_k_t)[:, None] + offs_d[None, :]
                v_ptrs = v_base + (offs_n * stride_v_t)[:, None] + offs_d[None, :]
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                async_copy.async_copy_global_to_shared(k_smem.index(stage), k_ptrs, mask=mask)
                # The consumers take the first tile of an item with bias, wherever it lies.
                if (top - back >= plain) | (back == 0):
                    if waited == 0:  # the rows come from the launch before
                        await_previous()
                    waited = 1
                    first = (n0 + bias_n) // 8 * 8
                    for half in gl.static_range(HALVES):
                        b_i = half * 64 + bias_m
                        b_token = b_i // GROUP
                        offs = b_token * (PITCH - 1) + (b_i % GROUP) * (requests * SLOT * PITCH)
                        b_ptrs = (rows_ptr + start + n0) + offs[:, None] + bias_n[None, :]
                        pos = q_start + b_token
                        near = first[None, :] + 7 > (pos - EXTENT)[:, None]
                        near = near & (first[None, :] <= pos[:, None])
                        near = near & (b_i < q_len * GROUP)[:, None]
                        async_copy.async_copy_global_to_shared(
                            b_smem.index(stage * 2 + half), b_ptrs, mask=near
                        )
                async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                async_copy.async_copy_global_to_shared(v_smem.index(stage), v_ptrs, mask=mask)
                async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
                count += 1


@gluon.jit
def _consume(
    warp_group: gl.constexpr, partial_ptr, partial_lm_ptr, q_ptr, cu_seqlens_q_ptr, kv_len_ptr,
    items, most_parts, kv_heads, all_kv_heads, kv_head0, qk_scale, q_smem, k_smem, v_smem, b_smem,
    q_ready, q_free, k_ready, k_free, v_ready, v_free,
    EXTENT: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, MAX_PARTS: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    eye_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    m0: gl.constexpr = warp_group * 64
    eye_row = gl.arange(0, 64, gl.SliceLayout(1, eye_layout))[:, None]
    eye = (eye_row == gl.arange(0, 64, gl.SliceLayout(0, eye_layout))[None, :]).to(dtype)
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    offs_s = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    offs_o = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    offs_c = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    count = 0
    done = 0
    gluon_let_next_start()
    n_request, n_head, n_part, _token0, n_len, n_start, n_begin, n_end = _unit(
        0, cu_seqlens_q_ptr, kv_len_ptr, items, most_parts, kv_heads, SPLIT, MAX_PARTS
    )
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        request, head, part, q_len, q_start, begin, end = (
            n_request, n_head, n_part, n_len, n_start, n_begin, n_end
        )  # fmt: skip
        n_request, n_head, n_part, _token0, n_len, n_start, n_begin, n_end = _unit(
            turn + 1, cu_seqlens_q_ptr, kv_len_ptr, items, most_parts, kv_heads, SPLIT, MAX_PARTS
        )
        if q_len > 0:
            bottom = begin // BLOCK_N
            top = (end - 1) // BLOCK_N
            buffer = done % 2
            mbarrier.wait(q_ready.index(buffer), (done // 2) & 1)
            if m0 < q_len * GROUP:
                q = q_smem.index(buffer * 2 + warp_group)
                q_pos = q_start + (m0 + offs_s) // GROUP
                # [diag, top] diagonal, [plain, diag) with bias, [bottom, plain) without.
                diag = gl.maximum(gl.minimum((q_start + 1) // BLOCK_N, top), bottom)
                plain = gl.maximum(q_start - EXTENT + 1, 0) // BLOCK_N
                plain = gl.maximum(gl.minimum(plain, diag), bottom)
                stage = count % STAGES
                mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
                bias = b_smem.index(stage * 2 + warp_group)
                s = scores(q, k_smem.index(stage), eye, bias, True, BLOCK_N, s_layout)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_free.index(stage), count=1)
                m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
                l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
                acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
                p, m, l, _alpha = softmax(s, m, l, top, q_pos, keys, qk_scale, DIAGONAL, 0, BLOCK_N)
                p = pack(p, BLOCK_N, dtype)
                count += 1
                for back in range(top - diag):
                    acc, p, m, l = step(
                        acc, p, m, l, top - 1 - back, count, q, eye, k_smem, v_smem, b_smem,
                        k_ready, k_free, v_ready, v_free, q_pos, keys, qk_scale, warp_group, True,
                        DIAGONAL, 0, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                    )  # fmt: skip
                    count += 1
                for back in range(diag - plain):
                    acc, p, m, l = step(
                        acc, p, m, l, diag - 1 - back, count, q, eye, k_smem, v_smem, b_smem,
                        k_ready, k_free, v_ready, v_free, q_pos, keys, qk_scale, warp_group, True,
                        CLEAR, 0, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                    )  # fmt: skip
                    count += 1
                for back in range(plain - bottom):
                    acc, p, m, l = step(
                        acc, p, m, l, plain - 1 - back, count, q, eye, k_smem, v_smem, b_smem,
                        k_ready, k_free, v_ready, v_free, q_pos, keys, qk_scale, warp_group, False,
                        CLEAR, 0, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                    )  # fmt: skip
                    count += 1
                mbarrier.arrive(q_free.index(buffer), count=1)
                p = unpack(p, BLOCK_N, p_layout, dtype)
                before = (count - 1) % STAGES
                mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
                acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_free.index(before), count=1)
                # Slots count all K/V heads of a request.
                first_row = (request * all_kv_heads + kv_head0 + head).to(gl.int64) * MAX_PARTS
                first_row = (first_row + part) * ROWS
                ptrs = partial_ptr + (first_row + m0) * HEAD_DIM
                ptrs = ptrs + (offs_o * HEAD_DIM)[:, None] + offs_c[None, :]
                gl.store(ptrs, acc, mask=(m0 + offs_o < q_len * GROUP)[:, None])
                lm_ptrs = partial_lm_ptr + first_row * 2 + m0 + offs_s
                gl.store(lm_ptrs, l, mask=m0 + offs_s < q_len * GROUP)
                gl.store(lm_ptrs + ROWS, m, mask=m0 + offs_s < q_len * GROUP)
            else:
                mbarrier.arrive(q_free.index(buffer), count=1)
                count = skip(top - bottom + 1, count, k_ready, k_free, v_ready, v_free, STAGES)
            done += 1


@gluon.jit(
    do_not_specialize=["items", "most_parts", "kv_heads", "all_kv_heads", "kv_head0", "requests"]
)
def _hopper_verify_kernel(
    partial_ptr, partial_lm_ptr, q_ptr, k_ptr, v_ptr, rows_ptr, page_table_ptr, first_page_ptr,
    cu_seqlens_q_ptr, kv_len_ptr, items, most_parts, kv_heads, all_kv_heads, kv_head0, requests,
    stride_q_t: gl.constexpr, stride_q_h: gl.constexpr, stride_k_p: gl.constexpr,
    stride_k_t: gl.constexpr, stride_k_g: gl.constexpr, stride_v_p: gl.constexpr,
    stride_v_t: gl.constexpr, stride_v_g: gl.constexpr, stride_page_b, softmax_scale,
    EXTENT: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, HALVES: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, PITCH: gl.constexpr, PAD: gl.constexpr,
    SLOT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    MAX_PARTS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [4, 64, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    b_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, BLOCK_N], layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_ready.index(buffer), count=128)
        mbarrier.init(q_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=128)
        mbarrier.init(v_ready.index(stage), count=128)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    qk_scale = softmax_scale * LOG2E
    gl.warp_specialize(
        [
            (_consume, (
                0, partial_ptr, partial_lm_ptr, q_ptr, cu_seqlens_q_ptr, kv_len_ptr, items,
                most_parts, kv_heads, all_kv_heads, kv_head0, qk_scale, q_smem, k_smem, v_smem,
                b_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, EXTENT, GROUP, ROWS,
                HEAD_DIM, BLOCK_N, STAGES, SPLIT, MAX_PARTS,
            )),
            (_consume, (
                1, partial_ptr, partial_lm_ptr, q_ptr, cu_seqlens_q_ptr, kv_len_ptr, items,
                most_parts, kv_heads, all_kv_heads, kv_head0, qk_scale, q_smem, k_smem, v_smem,
                b_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, EXTENT, GROUP, ROWS,
                HEAD_DIM, BLOCK_N, STAGES, SPLIT, MAX_PARTS,
            )),
            (_produce, (
                q_ptr, k_ptr, v_ptr, rows_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
                kv_len_ptr, items, most_parts, kv_heads, kv_head0, requests, stride_q_t,
                stride_q_h, stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t,
                stride_v_g, stride_page_b, q_smem, k_smem, v_smem, b_smem, q_ready, q_free,
                k_ready, k_free, v_ready, v_free, EXTENT, GROUP, HALVES, PAGE_SIZE, HEAD_DIM,
                PITCH, PAD, SLOT, BLOCK_N, STAGES, SPLIT, MAX_PARTS,
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
    bias: RelativeBias,
    partial: torch.Tensor,
    partial_lm: torch.Tensor,
    *,
    rows: int,
    most_parts: int,
    max_parts: int,
    softmax_scale: float,
    programs: int,
    constants: dict,
) -> None:
    """Fill the slots of all requests; arguments as `attention_verify` prepared them.

    The bias rows of as many K/V heads as fit profile.BUFFER_BYTES (at least one) exist at a time.

    Args:
        rows: query rows of a slot, heads of a K/V head times the most tokens.
        most_parts: bound on the units of a request.
        programs: of the persistent grid.
        constants: SPLIT, BLOCK_N and STAGES of the tuning row.
    """
    B, g, D = kv_len.shape[0], k_pages.shape[2], q.shape[2]
    group, extent = q.shape[1] // g, bias.extent
    pitch, table = pitch_of(extent), bias.profile.table
    head_rows = group * B * SLOT_ROWS
    fit = max(1, (BUFFER_BYTES // q.element_size() - 2 * BUFFER_PAD) // (head_rows * pitch))
    step = min(g, fit)
    buffer = torch.empty(step * head_rows * pitch + 2 * BUFFER_PAD, dtype=q.dtype, device=q.device)
    for kv_head0 in range(0, g, step):
        kv_heads = min(step, g - kv_head0)
        _verify_rows_kernel[(triton.cdiv(extent, 128), kv_heads * group, B)](
            buffer, bias.r, table, bias.tau, cu_seqlens_q, kv_len, kv_head0 * group,
            1 / softmax_scale, bias.r.stride(0), bias.r.stride(1), table.stride(1),
            EXTENT=extent,
            FIRST_COLUMN=PROFILE_PAD,
            PITCH=pitch,
            PAD=BUFFER_PAD,
            D_REL=bias.r.shape[2],
            BLOCK_R=table.shape[1],
            SLOT=SLOT_ROWS,
            BLOCK_C=128,
            num_warps=4,
        )  # fmt: skip
        items = B * kv_heads * most_parts
        _hopper_verify_kernel[(min(programs, items),)](
            partial, partial_lm, q, k_pages, v_pages, buffer, page_table, first_page, cu_seqlens_q,
            kv_len, items, most_parts, kv_heads, g, kv_head0, B, q.stride(0), q.stride(1),
            k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), v_pages.stride(0),
            v_pages.stride(1), v_pages.stride(2), page_table.stride(0), softmax_scale,
            EXTENT=extent,
            GROUP=group,
            ROWS=rows,
            HALVES=1 if rows <= 64 else 2,
            PAGE_SIZE=k_pages.shape[1],
            HEAD_DIM=D,
            PITCH=pitch,
            PAD=BUFFER_PAD,
            SLOT=SLOT_ROWS,
            MAX_PARTS=max_parts,
            num_warps=4,
            launch_pdl=True,
            **constants,
        )  # fmt: skip
