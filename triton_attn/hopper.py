"""Prefill for Hopper: the key loop of prefill.py, warp-specialised in Gluon (after
FlashAttention-3, arXiv:2407.08608).

One producer warp group copies K, V and bias tiles into a ring of shared-memory stages; two consumer
warp groups (hopper_consumer.py) own 64 query rows each. A consumer issues the next q.k product
before it waits for the current p.v, so the tensor cores work during the softmax. Programs are
persistent: the producer runs ahead into the next block.

A bias tile is an ordinary strided tile (profile.py), in units of q.k. The producer copies the
8-key vectors of which a row has a key within its extent, and zeros instead of all others: what the
rows do not hold must be finite, since a product with the identity adds it up.
"""

# Compile-time and run-time conditions do not mix.
# ruff: noqa: SIM102
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from kernel_base.hopper_copy import rings, row_load
from triton_attn.hopper_consumer import LOG2E, consume
from triton_attn.hopper_schedule import item


@gluon.jit
def await_previous():
    """Wait for the end and the stores of the launch before (see kernel_base.device)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _copy_bias(
    rows_ptr, b_smem, stage, row, t0, rows, n0, offs_m, offs_n,
    EXTENT: gl.constexpr, PITCH: gl.constexpr, PAD: gl.constexpr,
):  # fmt: skip
    """The bias of one key tile for both consumers; `row`: number of the block's row 0 in the
    buffer, a multiple of 16 like the distance of the halves."""
    first = (n0 + offs_n) // 8 * 8
    for half in gl.static_range(2):
        i = half * 64 + offs_m
        pos = t0 + i
        shift = (t0 - (EXTENT - 1)) & 15
        start = (row + half * 64).to(gl.int64) * PITCH + (PAD + EXTENT - 1 - t0 - half * 64 + shift)
        start = (start >> 4) * 16  # it is a multiple of 16; now the compiler knows
        ptrs = (rows_ptr + start + n0) + offs_m[:, None] * (PITCH - 1) + offs_n[None, :]
        near = first[None, :] + 7 > (pos - EXTENT)[:, None]
        near = near & (first[None, :] <= pos[:, None]) & (i < rows)[:, None]
        row_load(b_smem.index(stage * 2 + half), ptrs, mask=near)


@gluon.jit
def _produce(
    q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr, q_start_ptr,
    kv_len_ptr, rows_ptr, num_requests, head0, first_block, blocks, heads,
    stride_q_t: gl.constexpr, stride_q_h: gl.constexpr, stride_k_p: gl.constexpr,
    stride_k_t: gl.constexpr, stride_k_g: gl.constexpr, stride_v_p: gl.constexpr,
    stride_v_t: gl.constexpr, stride_v_g: gl.constexpr, stride_page_b, q_smem, k_smem, v_smem,
    b_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, PITCH: gl.constexpr, PAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
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
    items = 0
    next_head, next_block, next_request, next_token0, next_rows, next_t, next_end = item(
        0, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests, first_block, blocks, heads,
        BLOCK_M,
    )  # fmt: skip
    for turn in range(gl.cdiv(heads * blocks, gl.num_programs(0))):
        chunk_head, chunk_block, request, token0, rows, t0, end_key = (
            next_head, next_block, next_request, next_token0, next_rows, next_t, next_end
        )  # fmt: skip
        next_head, next_block, next_request, next_token0, next_rows, next_t, next_end = item(
            turn + 1, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests, first_block,
            blocks, heads, BLOCK_M,
        )  # fmt: skip
        if rows > 0:
            q_buffer = items % 2
            mbarrier.wait(q_free.index(q_buffer), ((items // 2) & 1) ^ 1)
            q_row_ptr = q_ptr + token0.to(gl.int64) * stride_q_t + (head0 + chunk_head) * stride_q_h
            for half in gl.static_range(2):
                row = half * 64 + offs_m
                q_ptrs = q_row_ptr + (row * stride_q_t)[:, None] + offs_d[None, :]
                row_load(q_smem.index(q_buffer * 2 + half), q_ptrs, mask=(row < rows)[:, None])
            async_copy.mbarrier_arrive(q_ready.index(q_buffer), increment_count=False)
            items += 1
            kv_head = (head0 + chunk_head) // GROUP
            page_row_ptr = (
                page_table_ptr
                + request.to(gl.int64) * stride_page_b
                - gl.load(first_page_ptr + request)
            )
            first_key = 0
            plain = 0  # tiles below it lie beyond the extent of every row
            if WINDOW > 0:
                first_key = gl.maximum(t0 - WINDOW + 1, 0)
            elif BIASED:
                plain = gl.maximum(t0 - EXTENT + 1, 0) // BLOCK_N
            bottom = first_key // BLOCK_N
            top = (end_key - 1) // BLOCK_N
            for back in range(top - bottom + 1):
                n0 = (top - back) * BLOCK_N
                n = n0 + offs_n
                mask = ((n >= first_key) & (n < end_key))[:, None]
                stage = count % STAGES
                phase = (count // STAGES) & 1
                if PAGE_SIZE % BLOCK_N == 0:
                    page = gl.load(page_row_ptr + n0 // PAGE_SIZE).to(gl.int64)
                    in_page = n0 % PAGE_SIZE
                    k_base = k_ptr + page * stride_k_p + in_page * stride_k_t + kv_head * stride_k_g
                    v_base = v_ptr + page * stride_v_p + in_page * stride_v_t + kv_head * stride_v_g
                    k_ptrs = k_base + (offs_n * stride_k_t)[:, None] + offs_d[None, :]
                    v_ptrs = v_base + (offs_n * stride_v_t)[:, None] + offs_d[None, :]
                else:
                    page = gl.load(
                        page_row_ptr + n // PAGE_SIZE,
                        mask=(n >= first_key) & (n < end_key),
                        other=0,
                    ).to(gl.int64)
                    k_row = page * stride_k_p + (n % PAGE_SIZE) * stride_k_t + kv_head * stride_k_g
                    v_row = page * stride_v_p + (n % PAGE_SIZE) * stride_v_t + kv_head * stride_v_g
                    k_ptrs = k_ptr + k_row[:, None] + offs_d[None, :]
                    v_ptrs = v_ptr + v_row[:, None] + offs_d[None, :]
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                row_load(k_smem.index(stage), k_ptrs, mask=mask)
                if BIASED:
                    if top - back >= plain:
                        if count == 0:  # the rows come from the launch before; q, K and V do not
                            await_previous()
                        row0 = (chunk_head * blocks + chunk_block).to(gl.int64) * BLOCK_M
                        _copy_bias(
                            rows_ptr, b_smem, stage, row0, t0, rows, n0, bias_m, bias_n, EXTENT,
                            PITCH, PAD,
                        )  # fmt: skip
                async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                row_load(v_smem.index(stage), v_ptrs, mask=mask)
                async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
                count += 1


@gluon.jit(do_not_specialize=["num_requests", "head0", "first_block", "blocks", "heads"])
def _hopper_prefill_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
    q_start_ptr, kv_len_ptr, rows_ptr, num_requests, head0, first_block, blocks, heads,
    stride_out_t: gl.constexpr, stride_out_h: gl.constexpr, stride_q_t: gl.constexpr,
    stride_q_h: gl.constexpr, stride_k_p: gl.constexpr, stride_k_t: gl.constexpr,
    stride_k_g: gl.constexpr, stride_v_p: gl.constexpr, stride_v_t: gl.constexpr,
    stride_v_g: gl.constexpr, stride_page_b, softmax_scale,
    MOD: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, PITCH: gl.constexpr,
    PAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    biased: gl.constexpr = MOD == 2
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Two blocks of two consumers, so that the next block's q is there in time.
    q_smem = gl.allocate_shared_memory(dtype, [4, 64, HEAD_DIM], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    b_smem = k_smem
    if biased:
        b_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, BLOCK_N], layout)
    # Every producer thread arrives once its own copies have landed; each consumer group arrives
    # once.
    turns, q_ready, q_free = rings(2, (1, 128, 2))
    k_ready, v_ready, k_free, v_free = rings(STAGES, (128, 128, 2, 2))
    qk_scale = softmax_scale * LOG2E
    gl.warp_specialize(
        [
            (consume, (
                0, out_ptr, lse_ptr, q_ptr, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests,
                head0, first_block, blocks, heads, stride_out_t, stride_out_h, qk_scale, q_smem,
                k_smem, v_smem, b_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns,
                biased, EXTENT, WINDOW, H, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES,
            )),
            (consume, (
                1, out_ptr, lse_ptr, q_ptr, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests,
                head0, first_block, blocks, heads, stride_out_t, stride_out_h, qk_scale, q_smem,
                k_smem, v_smem, b_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns,
                biased, EXTENT, WINDOW, H, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_produce, (
                q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
                q_start_ptr, kv_len_ptr, rows_ptr, num_requests, head0, first_block, blocks,
                heads, stride_q_t, stride_q_h, stride_k_p, stride_k_t, stride_k_g, stride_v_p,
                stride_v_t, stride_v_g, stride_page_b, q_smem, k_smem, v_smem, b_smem, q_ready,
                q_free, k_ready, k_free, v_ready, v_free, biased, EXTENT, WINDOW, GROUP,
                PAGE_SIZE, HEAD_DIM, PITCH, PAD, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 4],
        [208, 88],  # registers of the second consumer and the producer; the first gets the rest
    )  # fmt: skip


def launch_hopper(tensors, strides, constants, chunk, num_requests, softmax_scale, programs):
    """Start the kernel over one chunk of heads and blocks; arguments as `attention_prefill`
    prepared them."""
    _hopper_prefill_kernel[(min(programs, chunk.heads * chunk.blocks),)](
        *tensors, num_requests, chunk.head0, chunk.first_block, chunk.blocks, chunk.heads,
        *strides, softmax_scale,
        **constants,
    )  # fmt: skip
