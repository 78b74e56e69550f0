"""Prefill for Hopper: the key loop of prefill.py, warp-specialised in Gluon (after
FlashAttention-3, arXiv:2407.08608).

One producer warp group copies K and V tiles into a ring of shared-memory stages; two consumer warp
groups own 64 query
rows each. A consumer issues the next q.k product before it waits for the current p.v, so the
tensor cores work
during the softmax. Programs are persistent: the producer runs ahead into the next block.

Key order inside a tile is free, since a softmax does not care. Keys are stored so that the
accumulator columns
which one thread owns are 8 consecutive keys: then its part of a strided bias tile (profile.py) is
16-byte loads
straight into the accumulator's registers, without a pass through shared memory. Column c of a tile
holds the key
(c with its bit pairs 1-2 and 3-4 exchanged).
"""

# Gluon compiles no starred lists and no underscore for values of two types.
# ruff: noqa: RUF005, RUF059
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _await_previous():
    """Wait for the end and the stores of the launch before (see kernel_base.device)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _let_next_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _key_of_column(c):
    return (c & ~30) | ((c & 6) << 2) | ((c & 24) >> 2)


@gluon.jit
def _find_request(block, cu_seqlens_q_ptr, num_requests, BLOCK_M: gl.constexpr):
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_seqlens_q_ptr + middle) // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def _item(
    turn,
    cu_seqlens_q_ptr,
    q_start_ptr,
    kv_len_ptr,
    num_requests,
    first_block,
    blocks,
    heads,
    BLOCK_M: gl.constexpr,
):
    """Which block this program works on in round `turn`: long blocks first, dealt out in
    serpentine order."""
    programs = gl.num_programs(0)
    index = turn * programs + gl.program_id(0)
    if turn % 2 == 1:
        index = turn * programs + programs - 1 - gl.program_id(0)
    chunk_head = index % heads
    chunk_block = blocks - 1 - index // heads
    block = first_block + gl.maximum(chunk_block, 0)
    request = _find_request(block, cu_seqlens_q_ptr, num_requests, BLOCK_M)
    first_token = gl.load(cu_seqlens_q_ptr + request)
    q_len = gl.load(cu_seqlens_q_ptr + request + 1) - first_token
    m0 = (block - first_token // BLOCK_M - request) * BLOCK_M
    rows = gl.where(chunk_block >= 0, q_len - m0, 0)
    t0 = gl.load(q_start_ptr + request) + m0
    end_key = gl.minimum(gl.load(kv_len_ptr + request), t0 + BLOCK_M)
    return chunk_head, chunk_block, request, first_token + m0, rows, t0, end_key


@gluon.jit
def _produce(
    q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr, q_start_ptr,
    kv_len_ptr, num_requests, head0,
    first_block, blocks, heads, stride_q_t, stride_q_h, stride_k_p, stride_k_t, stride_k_g,
    stride_v_p, stride_v_t,
    stride_v_g, stride_page_b, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready,
    v_free,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    offs_n = _key_of_column(gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)))
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    count = 0
    items = 0
    for turn in range(gl.cdiv(heads * blocks, gl.num_programs(0))):
        chunk_head, chunk_block, request, token0, rows, t0, end_key = _item(
            turn,
            cu_seqlens_q_ptr,
            q_start_ptr,
            kv_len_ptr,
            num_requests,
            first_block,
            blocks,
            heads,
            BLOCK_M,
        )
        if rows > 0:
            q_buffer = items % 2
            mbarrier.wait(q_free.index(q_buffer), ((items // 2) & 1) ^ 1)
            q_row_ptr = q_ptr + token0.to(gl.int64) * stride_q_t + (head0 + chunk_head) * stride_q_h
            for half in gl.static_range(2):
                row = half * 64 + offs_m
                q_ptrs = q_row_ptr + (row * stride_q_t)[:, None] + offs_d[None, :]
                async_copy.async_copy_global_to_shared(
                    q_smem.index(q_buffer * 2 + half), q_ptrs, mask=(row < rows)[:, None]
                )
            async_copy.mbarrier_arrive(q_ready.index(q_buffer), increment_count=False)
            items += 1
            kv_head = (head0 + chunk_head) // GROUP
            page_row_ptr = (
                page_table_ptr
                + request.to(gl.int64) * stride_page_b
                - gl.load(first_page_ptr + request)
            )
            first_key = 0
            if WINDOW > 0:
                first_key = gl.maximum(t0 - WINDOW + 1, 0)
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
                    k_base = (
                        k_ptr
                        + page * stride_k_p
                        + (n0 % PAGE_SIZE) * stride_k_t
                        + kv_head * stride_k_g
                    )
                    v_base = (
                        v_ptr
                        + page * stride_v_p
                        + (n0 % PAGE_SIZE) * stride_v_t
                        + kv_head * stride_v_g
                    )
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
                async_copy.async_copy_global_to_shared(k_smem.index(stage), k_ptrs, mask=mask)
                async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                async_copy.async_copy_global_to_shared(v_smem.index(stage), v_ptrs, mask=mask)
                async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)
                count += 1


@gluon.jit
def _unpack_bias(pairs, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """[64, BLOCK_N / 2] words of two keys each -> fp32 [64, BLOCK_N] in the accumulator's columns;
    registers only."""
    pairs = gl.permute(gl.reshape(pairs, [64, BLOCK_N // 32, 4, 4]), (0, 1, 3, 2))
    pairs = gl.reshape(pairs, [64, BLOCK_N // 2])
    if gl.bfloat16 == DTYPE:
        even = (pairs << 16).to(gl.float32, bitcast=True)
        odd = (pairs & -65536).to(gl.float32, bitcast=True)
    else:
        even = (pairs & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        odd = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, BLOCK_N]), S_LAYOUT)


@gluon.jit
def _softmax(
    s, bias, m, l, tile, q_pos, keys, end_key, qk_scale,
    BIASED: gl.constexpr, MASKED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr,
    S_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Bias, mask and the online softmax of one tile: (p, m, l, factor for what was accumulated so
    far)."""
    n = tile * BLOCK_N + keys
    if BIASED:
        bias = _unpack_bias(bias, BLOCK_N, S_LAYOUT, DTYPE)
        if MASKED and (WINDOW == 0 or WINDOW > EXTENT):  # else the window hides what is not bias
            bias = gl.where(n[None, :] > (q_pos - EXTENT)[:, None], bias, 0.0)
        s = s * qk_scale + bias
    if MASKED:
        visible = (n[None, :] <= q_pos[:, None]) & (n < end_key)[None, :]
        if WINDOW > 0:
            visible = visible & (n[None, :] > (q_pos - WINDOW)[:, None])
        s = gl.where(visible, s, float("-inf"))
    if BIASED:
        m_new = gl.maximum(m, gl.max(s, 1))
        p = gl.exp2(s - m_new[:, None])
    else:  # the scale is positive, so it can wait and fold into one multiply-add
        m_new = gl.maximum(m, gl.max(s, 1) * qk_scale)
        p = gl.exp2(s * qk_scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    l = l * alpha + gl.sum(p, 1)
    return p.to(DTYPE), m_new, l, alpha


@gluon.jit
def _step(
    acc, p, m, l, bias, tile, count, q, k_smem, v_smem, k_ready, k_free, v_ready, v_free, q_pos,
    keys, end_key,
    bias_row_ptrs, qk_scale,
    BIASED: gl.constexpr, MASKED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of tile number `count`, while the p.v product of the tile before it runs. Loads the
    next tile's bias."""
    bias_next = bias
    if BIASED:
        bias_next = gl.load(bias_row_ptrs + (tile - 1) * (BLOCK_N // 2))
    stage = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    p_new, m, l, alpha = _softmax(
        s, bias, m, l, tile, q_pos, keys, end_key, qk_scale, BIASED, MASKED, EXTENT, WINDOW,
        BLOCK_N, S_LAYOUT, p.dtype,
    )  # fmt: skip
    # l depends on every exponential: they are all issued before the wait, under the p.v product.
    acc, l = warpgroup_mma_wait(0, deps=[acc, l])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, gl.convert_layout(p_new, P_LAYOUT), m, l, bias_next


@gluon.jit
def _skip(tiles, count, k_ready, k_free, v_ready, v_free, STAGES: gl.constexpr):
    """Tiles that only the other warp group needs."""
    for _ in range(tiles):
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_free.index(stage), count=1)
        count += 1
    return count


@gluon.jit
def _consume(
    warp_group: gl.constexpr, out_ptr, lse_ptr, q_ptr, rows_ptr, cu_seqlens_q_ptr, q_start_ptr,
    kv_len_ptr, num_requests,
    head0, first_block, blocks, heads, stride_out_t, stride_out_h, stride_q_t, stride_q_h,
    qk_scale, q_smem, k_smem, v_smem,
    q_ready, q_free, k_ready, k_free, v_ready, v_free,
    MOD: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PITCH: gl.constexpr, PAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    # A thread's share of a bias tile, in words of two keys: rows 0 and 8 of its quad, 4 words (8
    # keys) of every 16.
    wide: gl.constexpr = [[0, 16], [0, 32]] if BLOCK_N == 128 else [[0, 16]]
    bias_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]] + wide + [[8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, BLOCK_N // 2],
    )
    # Results leave in 16-byte stores: the columns of four threads change places.
    out_wide: gl.constexpr = [[0, 32], [0, 64]] if HEAD_DIM == 128 else [[0, 32]]
    out_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] + out_wide + [[8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, HEAD_DIM],
    )
    biased: gl.constexpr = MOD == 2
    keys = _key_of_column(gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout)))
    offs_s = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    words_ptr = rows_ptr.to(gl.pointer_type(gl.int32))
    bias_offs = gl.arange(0, 64, gl.SliceLayout(1, bias_layout))[:, None] * ((PITCH - 1) // 2)
    bias_offs = bias_offs + gl.arange(0, BLOCK_N // 2, gl.SliceLayout(0, bias_layout))[None, :]
    count = 0
    items = 0
    if biased:  # the rows come from the launch before; q, K and V do not, and are on their way
        _let_next_start()
        _await_previous()
    for turn in range(gl.cdiv(heads * blocks, gl.num_programs(0))):
        chunk_head, chunk_block, request, token0, rows, t_block, end_key = _item(
            turn,
            cu_seqlens_q_ptr,
            q_start_ptr,
            kv_len_ptr,
            num_requests,
            first_block,
            blocks,
            heads,
            BLOCK_M,
        )
        if rows > 0:
            m0: gl.constexpr = warp_group * 64
            head = head0 + chunk_head
            t0 = t_block + m0
            row_token = (token0 + m0).to(gl.int64)
            q_buffer = items % 2
            q_tile = q_smem.index(q_buffer * 2 + warp_group)
            q_pos = t0 + offs_s
            bias_row_ptrs = words_ptr + bias_offs
            if biased:
                row = (chunk_head * blocks + chunk_block).to(gl.int64) * BLOCK_M + m0
                # The block's shift; t0 and t_block differ by a multiple of 8.
                shift = (t0 - (EXTENT - 1)) & 15
                base = PAD + row * PITCH + (EXTENT - 1 - t0 + shift)  # a multiple of 8 elements
                bias_row_ptrs = words_ptr + gl.multiple_of(base // 2, 4) + bias_offs

            # Tile numbers, highest first: [diag, top] masked, [full, diag) clear, [plain, full)
            # masked, below: no bias.
            block_first = 0
            first_key = 0
            if WINDOW > 0:
                block_first = gl.maximum(t_block - WINDOW + 1, 0)
                first_key = gl.maximum(t0 - WINDOW + 1, 0)
            block_top = (end_key - 1) // BLOCK_N
            top = gl.minimum(block_top, (t0 + 63) // BLOCK_N)
            bottom = first_key // BLOCK_N
            diag = gl.minimum((t0 + 1) // BLOCK_N, top)
            full = bottom
            plain = bottom
            if WINDOW > 0:
                full = gl.minimum(gl.cdiv(gl.maximum(t0 + 64 - WINDOW, 0), BLOCK_N), diag)
            elif biased:
                plain = gl.minimum(gl.maximum(t0 - EXTENT + 1, 0) // BLOCK_N, diag)
                full = gl.minimum(gl.cdiv(gl.maximum(t0 + 64 - EXTENT, 0), BLOCK_N), diag)

            bias = gl.zeros([64, BLOCK_N // 2], gl.int32, bias_layout)
            bias_then = bias
            if biased:
                bias = gl.load(bias_row_ptrs + top * (BLOCK_N // 2))
                bias_then = gl.load(bias_row_ptrs + (top - 1) * (BLOCK_N // 2))
            count = _skip(block_top - top, count, k_ready, k_free, v_ready, v_free, STAGES)
            stage = count % STAGES
            mbarrier.wait(q_ready.index(q_buffer), (items // 2) & 1)
            mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
            zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
            s = warpgroup_mma(
                q_tile, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
            l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
            acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            p, m, l, alpha = _softmax(
                s, bias, m, l, top, q_pos, keys, end_key, qk_scale, biased, True, EXTENT, WINDOW,
                BLOCK_N, s_layout,
                q_ptr.dtype.element_ty,
            )  # fmt: skip
            p = gl.convert_layout(p, p_layout)
            bias = bias_then
            count += 1
            for back in range(top - diag):
                acc, p, m, l, bias = _step(
                    acc, p, m, l, bias, top - 1 - back, count, q_tile, k_smem, v_smem, k_ready,
                    k_free, v_ready, v_free, q_pos,
                    keys, end_key, bias_row_ptrs, qk_scale, biased, True, EXTENT, WINDOW, BLOCK_N,
                    STAGES, s_layout, o_layout,
                    p_layout,
                )  # fmt: skip
                count += 1
            for back in range(diag - full):
                acc, p, m, l, bias = _step(
                    acc, p, m, l, bias, diag - 1 - back, count, q_tile, k_smem, v_smem, k_ready,
                    k_free, v_ready, v_free, q_pos,
                    keys, end_key, bias_row_ptrs, qk_scale, biased, False, EXTENT, WINDOW,
                    BLOCK_N, STAGES, s_layout, o_layout,
                    p_layout,
                )  # fmt: skip
                count += 1
            if biased or WINDOW > 0:
                for back in range(full - plain):
                    acc, p, m, l, bias = _step(
                        acc, p, m, l, bias, full - 1 - back, count, q_tile, k_smem, v_smem,
                        k_ready, k_free, v_ready, v_free,
                        q_pos, keys, end_key, bias_row_ptrs, qk_scale, biased, True, EXTENT,
                        WINDOW, BLOCK_N, STAGES, s_layout,
                        o_layout, p_layout,
                    )  # fmt: skip
                    count += 1
            if biased and WINDOW == 0:
                for back in range(plain - bottom):
                    acc, p, m, l, bias = _step(
                        acc, p, m, l, bias, plain - 1 - back, count, q_tile, k_smem, v_smem,
                        k_ready, k_free, v_ready, v_free,
                        q_pos, keys, end_key, bias_row_ptrs, qk_scale, False, False, EXTENT,
                        WINDOW, BLOCK_N, STAGES, s_layout,
                        o_layout, p_layout,
                    )  # fmt: skip
                    count += 1
            mbarrier.arrive(q_free.index(q_buffer), count=1)
            items += 1
            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(before), count=1)
            count = _skip(
                bottom - block_first // BLOCK_N, count, k_ready, k_free, v_ready, v_free, STAGES
            )

            acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, o_layout))[:, None]
            result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), out_layout)
            offs_o = gl.arange(0, 64, gl.SliceLayout(1, out_layout))
            offs_c = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))
            out_ptrs = out_ptr + row_token * stride_out_t + head * stride_out_h
            out_ptrs = out_ptrs + (offs_o * stride_out_t)[:, None] + offs_c[None, :]
            gl.store(out_ptrs, result, mask=(m0 + offs_o < rows)[:, None])
            if lse_ptr is not None:
                lse = (m + gl.log2(l)) / LOG2E
                gl.store(lse_ptr + (row_token + offs_s) * H + head, lse, mask=m0 + offs_s < rows)


@gluon.jit(do_not_specialize=["num_requests", "head0", "first_block", "blocks", "heads"])
def _hopper_prefill_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
    q_start_ptr, kv_len_ptr,
    rows_ptr, num_requests, head0, first_block, blocks, heads, stride_out_t, stride_out_h,
    stride_q_t, stride_q_h,
    stride_k_p, stride_k_t, stride_k_g, stride_v_p, stride_v_t, stride_v_g, stride_page_b,
    softmax_scale,
    MOD: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, PITCH: gl.constexpr, PAD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    smem_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    q_smem = gl.allocate_shared_memory(
        dtype, [4, 64, HEAD_DIM], smem_layout
    )  # two blocks of two groups
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], smem_layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], smem_layout)
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
        # Every producer thread arrives once its own copies have landed; each consumer group
        # arrives once.
        mbarrier.init(k_ready.index(stage), count=128)
        mbarrier.init(v_ready.index(stage), count=128)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    qk_scale = softmax_scale * LOG2E
    gl.warp_specialize(
        [
            (_consume, (
                0, out_ptr, lse_ptr, q_ptr, rows_ptr, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr,
                num_requests, head0,
                first_block, blocks, heads, stride_out_t, stride_out_h, stride_q_t, stride_q_h,
                qk_scale, q_smem, k_smem,
                v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, MOD, EXTENT, WINDOW, H,
                HEAD_DIM, PITCH, PAD, BLOCK_M, BLOCK_N,
                STAGES,
            )),
            (_consume, (
                1, out_ptr, lse_ptr, q_ptr, rows_ptr, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr,
                num_requests, head0,
                first_block, blocks, heads, stride_out_t, stride_out_h, stride_q_t, stride_q_h,
                qk_scale, q_smem, k_smem,
                v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, MOD, EXTENT, WINDOW, H,
                HEAD_DIM, PITCH, PAD, BLOCK_M, BLOCK_N,
                STAGES,
            )),
            (_produce, (
                q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
                q_start_ptr, kv_len_ptr, num_requests,
                head0, first_block, blocks, heads, stride_q_t, stride_q_h, stride_k_p, stride_k_t,
                stride_k_g, stride_v_p,
                stride_v_t, stride_v_g, stride_page_b, q_smem, k_smem, v_smem, q_ready, q_free,
                k_ready, k_free, v_ready, v_free, WINDOW, GROUP, PAGE_SIZE, HEAD_DIM,
                BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 4],
        [216, 72],
    )  # fmt: skip


def launch_hopper(tensors, strides, constants, chunk, num_requests, softmax_scale, programs):
    """Start the kernel over one chunk of heads and blocks; arguments as `attention_prefill`
    prepared them."""
    _hopper_prefill_kernel[(min(programs, chunk.heads * chunk.blocks),)](
        *tensors, num_requests, chunk.head0, chunk.first_block, chunk.blocks, chunk.heads,
        *strides, softmax_scale,
        **constants,
    )  # fmt: skip
