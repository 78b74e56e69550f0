"""A consumer warp group of the Hopper prefill (hopper.py): 64 query rows against the key tiles that
the producer copies.

The bias of a tile enters by the tensor core: the identity times the tile, accumulated on q.k. That
is exact (one product a sum is not zero) and costs no register and no instruction of the softmax.

Probabilities are carried from one tile to the next as words of two: as 16-bit values they would
take a register each. They are packed only after the product before has ended, since ptxas
serialises matrix products whose operands are written while another one runs.
"""

# Gluon compiles no starred lists.
# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from triton_attn.hopper_schedule import item

LOG2E = gl.constexpr(1.4426950408889634)

# What a tile's scores need: nothing; keys after the row hidden; keys before its window hidden.
CLEAR, DIAGONAL, EDGE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def let_next_start():
    """Allow the next launch to start (see kernel_base.device)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pack(p, BLOCK_N: gl.constexpr, DTYPE: gl.constexpr):
    """fp32 [64, BLOCK_N] -> int32 [64, BLOCK_N / 2]: two rounded neighbours a word."""
    even, odd = gl.split(gl.reshape(p, [64, BLOCK_N // 2, 2]))
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [odd, even], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [odd, even], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(words, BLOCK_N: gl.constexpr, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """The inverse of `pack`, as the left operand of a product; registers only."""
    even = (words & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [64, BLOCK_N]), P_LAYOUT)


@gluon.jit
def scores(
    q, k, eye, bias, BIASED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr
):  # fmt: skip
    """Start q.k + bias of one tile."""
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if BIASED:
        s = warpgroup_mma(eye, bias, s, is_async=True)
    return s


@gluon.jit
def softmax(
    s, m, l, tile, q_pos, keys, qk_scale,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Mask and online softmax of one tile: (p, m, l, factor for what was accumulated so far)."""
    n = tile * BLOCK_N + keys
    if MASKED == DIAGONAL:  # keys past the end are after every row
        s = gl.where(n[None, :] <= q_pos[:, None], s, float("-inf"))
    if WINDOW > 0 and (MASKED == EDGE or (MASKED == DIAGONAL and WINDOW < 64 + BLOCK_N)):
        s = gl.where(n[None, :] > (q_pos - WINDOW)[:, None], s, float("-inf"))
    # The scale is positive, so it can wait and fold into one multiply-add.
    m_new = gl.maximum(m, gl.max(s, 1) * qk_scale)
    p = gl.exp2(s * qk_scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def step(
    acc, words, m, l, tile, count, q, eye, k_smem, v_smem, b_smem, k_ready, k_free, v_ready,
    v_free, turns, q_pos, keys, qk_scale,
    WARP_GROUP: gl.constexpr, BIASED: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Scores of tile number `count`, while the p.v product of the tile before it runs. The groups
    start their products in turns: one's softmax is beside the other's products."""
    # Before the products start: nothing else may write their operands' registers then.
    p = unpack(words, BLOCK_N, P_LAYOUT, DTYPE)
    stage = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
    bias = b_smem.index(stage * 2 + WARP_GROUP if BIASED else 0)
    mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
    mbarrier.wait(turns.index(WARP_GROUP), (count & 1) ^ (1 - WARP_GROUP))
    s = scores(q, k_smem.index(stage), eye, bias, BIASED, BLOCK_N, S_LAYOUT)
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WARP_GROUP), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_free.index(stage), count=1)
    p_new, m, l, alpha = softmax(s, m, l, tile, q_pos, keys, qk_scale, MASKED, WINDOW, BLOCK_N)
    # l depends on every exponential: they are all issued before the wait, under the p.v product.
    acc, l, p_new = warpgroup_mma_wait(0, deps=[acc, l, p_new])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return acc, pack(p_new, BLOCK_N, DTYPE), m, l


@gluon.jit
def skip(
    tiles, count, k_ready, k_free, v_ready, v_free, turns,
    WARP_GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles that only the other warp group needs."""
    for _ in range(tiles):
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(turns.index(WARP_GROUP), (count & 1) ^ (1 - WARP_GROUP))
        mbarrier.arrive(turns.index(1 - WARP_GROUP), count=1)
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.arrive(k_free.index(stage), count=1)
        mbarrier.wait(v_ready.index(stage), phase)
        mbarrier.arrive(v_free.index(stage), count=1)
        count += 1
    return count


@gluon.jit
def consume(
    warp_group: gl.constexpr, out_ptr, lse_ptr, q_ptr, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr,
    num_requests, head0, first_block, blocks, heads, stride_out_t: gl.constexpr,
    stride_out_h: gl.constexpr, qk_scale, q_smem, k_smem, v_smem, b_smem, q_ready, q_free, k_ready,
    k_free, v_ready, v_free, turns,
    BIASED: gl.constexpr, EXTENT: gl.constexpr, WINDOW: gl.constexpr, H: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rows warp_group * 64 ... of every block of this program."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    eye_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    # Results leave in 16-byte stores: the columns of four threads change places.
    wide: gl.constexpr = [[0, 32], [0, 64]] if HEAD_DIM == 128 else [[0, 32]]
    out_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] + wide + [[8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, HEAD_DIM],
    )
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    m0: gl.constexpr = warp_group * 64
    eye_row = gl.arange(0, 64, gl.SliceLayout(1, eye_layout))[:, None]
    eye = (eye_row == gl.arange(0, 64, gl.SliceLayout(0, eye_layout))[None, :]).to(dtype)
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    offs_s = gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    count = 0
    items = 0
    if BIASED:
        let_next_start()
    next_head, _block, _request, next_token0, next_rows, next_t, next_end = item(
        0, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests, first_block, blocks, heads,
        BLOCK_M,
    )  # fmt: skip
    for turn in range(gl.cdiv(heads * blocks, gl.num_programs(0))):
        head, token0, rows, t_block, end_key = (
            head0 + next_head, next_token0, next_rows, next_t, next_end
        )  # fmt: skip
        # The next block's lengths are on their way while this one is worked on.
        next_head, _block, _request, next_token0, next_rows, next_t, next_end = item(
            turn + 1, cu_seqlens_q_ptr, q_start_ptr, kv_len_ptr, num_requests, first_block,
            blocks, heads, BLOCK_M,
        )  # fmt: skip
        if rows > 0:
            t0 = t_block + m0
            row_token = (token0 + m0).to(gl.int64)
            q_buffer = items % 2
            q_pos = t0 + offs_s

            # Tile numbers, highest first: [diag, top] diagonal, [full, diag) clear, below: the edge
            # of the window, or [plain, full) with bias and [bottom, plain) without.
            block_first = 0
            first_key = 0
            if WINDOW > 0:
                block_first = gl.maximum(t_block - WINDOW + 1, 0)
                first_key = gl.maximum(t0 - WINDOW + 1, 0)
            block_top = (end_key - 1) // BLOCK_N
            top = gl.minimum(block_top, (t0 + 63) // BLOCK_N)
            bottom = first_key // BLOCK_N
            if WINDOW > 0 and WINDOW <= 64:  # a group without rows may lie past every copied tile
                bottom = gl.minimum(bottom, top)
            diag = gl.minimum((t0 + 1) // BLOCK_N, top)
            full = bottom
            if WINDOW > 0:
                full = gl.minimum(gl.cdiv(gl.maximum(t0 + 64 - WINDOW, 0), BLOCK_N), diag)
            elif BIASED:  # beyond the extent the producer copied zeros: no mask there
                full = gl.minimum(gl.maximum(t0 - EXTENT + 1, 0) // BLOCK_N, diag)

            count = skip(
                block_top - top, count, k_ready, k_free, v_ready, v_free, turns, warp_group, STAGES
            )
            stage = count % STAGES
            mbarrier.wait(q_ready.index(q_buffer), (items // 2) & 1)
            # From registers: shared memory could hardly feed the tensor cores both operands.
            q = q_smem.index(q_buffer * 2 + warp_group).load(q_layout)
            mbarrier.arrive(q_free.index(q_buffer), count=1)
            items += 1
            mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
            bias = b_smem.index(stage * 2 + warp_group if BIASED else 0)
            mbarrier.wait(turns.index(warp_group), (count & 1) ^ (1 - warp_group))
            s = scores(q, k_smem.index(stage), eye, bias, BIASED, BLOCK_N, s_layout)
            mbarrier.arrive(turns.index(1 - warp_group), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
            l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
            acc = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            p, m, l, _alpha = softmax(
                s, m, l, top, q_pos, keys, qk_scale, DIAGONAL, WINDOW, BLOCK_N
            )
            p = pack(p, BLOCK_N, dtype)
            count += 1
            for back in range(top - diag):
                acc, p, m, l = step(
                    acc, p, m, l, top - 1 - back, count, q, eye, k_smem, v_smem, b_smem, k_ready,
                    k_free, v_ready, v_free, turns, q_pos, keys, qk_scale, warp_group, BIASED,
                    DIAGONAL, WINDOW, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                )  # fmt: skip
                count += 1
            for back in range(diag - full):
                acc, p, m, l = step(
                    acc, p, m, l, diag - 1 - back, count, q, eye, k_smem, v_smem, b_smem, k_ready,
                    k_free, v_ready, v_free, turns, q_pos, keys, qk_scale, warp_group, BIASED,
                    CLEAR, WINDOW, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                )  # fmt: skip
                count += 1
            if WINDOW > 0:
                for back in range(full - bottom):
                    acc, p, m, l = step(
                        acc, p, m, l, full - 1 - back, count, q, eye, k_smem, v_smem, b_smem,
                        k_ready, k_free, v_ready, v_free, turns, q_pos, keys, qk_scale, warp_group,
                        BIASED, EDGE, WINDOW, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                    )  # fmt: skip
                    count += 1
            elif BIASED:
                for back in range(full - bottom):
                    acc, p, m, l = step(
                        acc, p, m, l, full - 1 - back, count, q, eye, k_smem, v_smem, b_smem,
                        k_ready, k_free, v_ready, v_free, turns, q_pos, keys, qk_scale, warp_group,
                        False, CLEAR, WINDOW, BLOCK_N, STAGES, s_layout, o_layout, p_layout, dtype,
                    )  # fmt: skip
                    count += 1
            p = unpack(p, BLOCK_N, p_layout, dtype)
            before = (count - 1) % STAGES
            mbarrier.wait(v_ready.index(before), ((count - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(before), count=1)
            count = skip(
                bottom - block_first // BLOCK_N,
                count,
                k_ready,
                k_free,
                v_ready,
                v_free,
                turns,
                warp_group,
                STAGES,
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
