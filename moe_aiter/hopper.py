"""The two grouped products for Hopper, warp-specialised in Gluon: results as grouped.py's.

With thousands of tokens these products are bound by the traffic between L2 and the multiprocessors:
93 % of its peak with 128-row blocks (bench/results/moe_profile_h200_2026-11-30.jsonl). So a block
has 256 rows, which is all that most experts have: their weights cross once.

One producer warp group fills a ring of shared-memory stages: weights (and the inner activations) by
bulk tensor copies, the gathered token rows by asynchronous copies. Four consumer warp groups own 64
rows each; a group without rows does nothing, and its rows are not loaded. A tile is 64 gate columns
beside the 64 up columns that belong to them, or 128 columns of the down product. It leaves by bulk
tensor copies while the next one is computed: so the down product's rows stay in sorted order too,
every expert's at a multiple of 16, and grouped.py's sum finds a choice's row by its place.

A program walks the tiles of all row blocks, largest blocks first, from its own number in steps of
the number of programs. Where its next tile is it asks the lists a tile ahead.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from moe_aiter.routing import ROW_ALIGN, SortedChoices

# Triton renamed these after 3.6; the old names are still there, and raise.
_bulk_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
_bulk_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
_row_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)

BLOCK_M, BLOCK_N, BLOCK_K = 256, 128, 64
# Arguments whose value must not make another kernel: every new batch size would be compiled.
COUNTS = ("tokens", "choices", "blocks", "all_blocks", "stride_gamma")
# Bytes that the bulk copies of one stage bring: two half tiles of weights, and for the down product
# 64-row tiles.
WEIGHT_BYTES = gl.constexpr(BLOCK_N * BLOCK_K * 2)
HALF_BYTES = gl.constexpr(32 * BLOCK_K * 2)


@gluon.jit
def _first(blocks_n):
    """(row block, column tile) of this program's first tile, and the distance to its next."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return program // blocks_n, program % blocks_n, programs // blocks_n, programs % blocks_n


@gluon.jit
def _next(block, block_n, far_block, far_n, blocks_n):
    """(row block, column tile) of this program's next tile."""
    block_n += far_n
    block += far_block + (block_n >= blocks_n).to(gl.int32)
    return block, gl.where(block_n >= blocks_n, block_n - blocks_n, block_n)


@gluon.jit
def _entry(block, order, blocks):
    """(first row, end of the expert's rows) as listed for a row block: loads alone, so that a round
    can ask for the next one's without waiting."""
    _, block_begin_ptr, block_end_ptr = order
    at = gl.maximum(gl.minimum(block, blocks - 1), 0)
    return gl.load(block_begin_ptr + at), gl.load(block_end_ptr + at)


@gluon.jit
def _shared_rows(tokens):
    """Rows from one shared expert's first to the next one's."""
    return gl.cdiv(tokens, ROW_ALIGN) * ROW_ALIGN


@gluon.jit
def _tile(
    block, entry, tokens, choices, blocks, all_blocks, FOLD: gl.constexpr, BLOCK_M: gl.constexpr
):
    """(shared expert or -1, first row, rows) of a row block; 0 rows = nothing to do. The blocks of
    shared experts come behind the listed ones, as in grouped.py."""
    row0, end = entry
    shared = -1
    if FOLD:
        per_shared = gl.cdiv(tokens, BLOCK_M)
        behind = gl.maximum(block - blocks, 0)
        is_shared = block >= blocks
        shared = gl.where(is_shared, behind // per_shared, -1)
        first_row = choices + shared * _shared_rows(tokens)
        row0 = gl.where(is_shared, first_row + behind % per_shared * BLOCK_M, row0)
        end = gl.where(is_shared, first_row + tokens, end)
    rows = gl.maximum(gl.minimum(end - row0, BLOCK_M), 0)
    return shared, row0, gl.where(block < all_blocks, rows, 0)


@gluon.jit
def _listed(choice_ptr, row0, rows, offs_m, choices):
    """Rows row0 + offs_m and what the sort lists there; rows past the end repeat a valid one."""
    row = row0 + gl.minimum(offs_m, rows - 1)
    return row, gl.load(choice_ptr + gl.minimum(row, choices - 1))


@gluon.jit
def _tokens(listed, row, shared, tokens, choices, TOP_K: gl.constexpr, FOLD: gl.constexpr):
    """Token and weight column of listed rows."""
    token = listed // TOP_K
    column = listed % TOP_K
    if FOLD:
        behind = row - choices - shared * _shared_rows(tokens)
        token = gl.where(shared >= 0, behind, token)
        column = gl.where(shared >= 0, TOP_K + shared, column)
    return token, column


@gluon.jit
def _x_rows(
    choice_ptr, row0, rows, shared, offs_m, tokens, choices, stride_x,
    TOP_K: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """Offsets of the tokens' rows of x: 32 bits, the launcher takes no x of 2^31 elements."""
    row, listed = _listed(choice_ptr, row0, rows, offs_m, choices)
    token, _ = _tokens(listed, row, shared, tokens, choices, TOP_K, FOLD)
    return token * stride_x


@gluon.jit
def _produce(
    a, half_desc, weights_desc, shared_desc, choice_ptr, order, counts, depth, rows_each, columns,
    stride_x, a_smem, b_smem, ready, free,
    UP: gl.constexpr, TOP_K: gl.constexpr, FOLD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tokens, choices, blocks, all_blocks = counts
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    offs_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    half: gl.constexpr = BLOCK_N // 2
    width_n: gl.constexpr = half if UP else BLOCK_N
    blocks_n = gl.cdiv(columns, width_n)
    count = 0
    next_block, next_n, far_block, far_n = _first(blocks_n)
    following = _entry(next_block, order, blocks)
    for _ in range(gl.cdiv(all_blocks * blocks_n, gl.num_programs(0))):
        block, block_n = next_block, next_n
        shared, row0, rows = _tile(
            block, following, tokens, choices, blocks, all_blocks, FOLD, BLOCK_M
        )
        next_block, next_n = _next(block, block_n, far_block, far_n, blocks_n)
        following = _entry(next_block, order, blocks)
        if rows > 0:
            groups = gl.cdiv(rows, 64)
            halves = gl.cdiv(rows, 32)  # of groups: what is loaded of the inner activations
            whole = halves // 2
            expert = shared
            if shared < 0:
                expert = gl.load(order[0] + block)
            first = expert * rows_each + block_n * width_n
            second = first + (columns if UP else half)
            at0 = offs_m
            at1 = offs_m
            at2 = offs_m
            at3 = offs_m
            if UP:
                at0 = _x_rows(
                    choice_ptr, row0, rows, shared, offs_m, tokens, choices, stride_x,
                    TOP_K, FOLD,
                )  # fmt: skip
                at1 = _x_rows(
                    choice_ptr, row0, rows, shared, offs_m + 64, tokens, choices, stride_x,
                    TOP_K, FOLD,
                )  # fmt: skip
                at2 = _x_rows(
                    choice_ptr, row0, rows, shared, offs_m + 128, tokens, choices, stride_x,
                    TOP_K, FOLD,
                )  # fmt: skip
                at3 = _x_rows(
                    choice_ptr, row0, rows, shared, offs_m + 192, tokens, choices, stride_x,
                    TOP_K, FOLD,
                )  # fmt: skip
            for k in range(0, depth, BLOCK_K):
                stage = count % STAGES
                mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                if UP:
                    mbarrier.expect(bar, WEIGHT_BYTES)
                else:
                    for fewer in gl.static_range(8):
                        mbarrier.expect(
                            bar, WEIGHT_BYTES + (fewer + 1) * HALF_BYTES, pred=halves == fewer + 1
                        )
                upper = b_smem.index(stage).slice(0, half)
                lower = b_smem.index(stage).slice(half, half)
                if FOLD:
                    if shared >= 0:
                        _bulk_load(shared_desc, [first, k], bar, upper)
                        _bulk_load(shared_desc, [second, k], bar, lower)
                    else:
                        _bulk_load(weights_desc, [first, k], bar, upper)
                        _bulk_load(weights_desc, [second, k], bar, lower)
                else:
                    _bulk_load(weights_desc, [first, k], bar, upper)
                    _bulk_load(weights_desc, [second, k], bar, lower)
                for group in gl.static_range(4):
                    to = a_smem.index(stage * 4 + group)
                    if UP:
                        at = (
                            at0 if group == 0 else at1 if group == 1 else at2 if group == 2 else at3
                        )
                        if groups > group:  # rows past the end: zeros, not loads
                            inside = offs_m < rows - 64 * group
                            ptrs = a + k + at[:, None] + offs_k[None, :]
                            _row_load(to, ptrs, mask=inside[:, None])
                    else:
                        _bulk_load(a, [row0 + group * 64, k], bar, to, pred=whole > group)
                if not UP:
                    last = a_smem.index(stage * 4 + gl.minimum(whole, 3)).slice(0, 32)
                    _bulk_load(half_desc, [row0 + whole * 64, k], bar, last, pred=halves % 2 == 1)
                if UP:
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                count += 1


@gluon.jit
def _halves(acc):
    """A tile's left and right columns: of a gate/up tile, gate and up."""
    rows: gl.constexpr = acc.shape[0]
    half: gl.constexpr = acc.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(acc, [rows, 2, half]), (0, 2, 1)))


@gluon.jit
def _step(
    acc, count, step, warp_group: gl.constexpr, a_smem, b_smem, ready, free, STAGES: gl.constexpr
):
    """Start the products of one stage and give back the stage of the step before."""
    stage = count % STAGES
    mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
    a = a_smem.index(stage * 4 + warp_group)
    b = b_smem.index(stage).permute((1, 0))
    acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
    # The products of the step before are done: its stage can be filled again.
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
    return acc


@gluon.jit
def _consume(
    warp_group: gl.constexpr, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth,
    columns, stride_gamma, out_smem, a_smem, b_smem, ready, free,
    UP: gl.constexpr, TOP_K: gl.constexpr, FOLD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tokens, choices, blocks, all_blocks = counts
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    width_n: gl.constexpr = BLOCK_N // 2 if UP else BLOCK_N
    dtype: gl.constexpr = a_smem.dtype
    first: gl.constexpr = warp_group * 64
    if UP:
        gate, _up = _halves(gl.zeros([64, BLOCK_N], gl.float32, acc_layout))
        inner_layout: gl.constexpr = gate.type.layout
        listed_m = first + gl.arange(0, 64, gl.SliceLayout(1, inner_layout))
    blocks_n = gl.cdiv(columns, width_n)
    steps = depth // BLOCK_K
    count = 0
    next_block, next_n, far_block, far_n = _first(blocks_n)
    following = _entry(next_block, order, blocks)
    for _ in range(gl.cdiv(all_blocks * blocks_n, gl.num_programs(0))):
        block, block_n = next_block, next_n
        shared, row0, rows = _tile(
            block, following, tokens, choices, blocks, all_blocks, FOLD, BLOCK_M
        )
        next_block, next_n = _next(block, block_n, far_block, far_n, blocks_n)
        following = _entry(next_block, order, blocks)
        if rows > first:
            acc = gl.zeros([64, BLOCK_N], gl.float32, acc_layout)
            # What the end of a tile needs is asked for long before.
            if UP:
                row, listed = _listed(choice_ptr, row0, rows, listed_m, choices)
            for step in range(steps // 2):
                acc = _step(acc, count, step, warp_group, a_smem, b_smem, ready, free, STAGES)
                count += 1
            if UP:
                token, column = _tokens(listed, row, shared, tokens, choices, TOP_K, FOLD)
                gamma = gl.load(gamma_ptr + token * stride_gamma + column)
            for step in range(steps // 2, steps):
                acc = _step(acc, count, step, warp_group, a_smem, b_smem, ready, free, STAGES)
                count += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
            left, right = _halves(acc)
            tma.store_wait(0)  # the tile before has left shared memory
            if UP:
                inner = left / (1.0 + gl.exp(-left)) * right * gamma[:, None]
                out_smem.index(warp_group).store(inner.to(dtype))
            else:
                out_smem.index(2 * warp_group).store(left.to(dtype))
                out_smem.index(2 * warp_group + 1).store(right.to(dtype))
            fence_async_shared()
            for half in gl.static_range(1 if UP else 2):
                tile = out_smem.index(warp_group * (1 if UP else 2) + half)
                n = block_n * width_n + half * 64
                if rows - first > 64 - ROW_ALIGN:
                    _bulk_store(out_desc, [row0 + first, n], tile)
                else:
                    for m in gl.static_range(0, 64 - ROW_ALIGN, ROW_ALIGN):
                        if rows - first > m:
                            _bulk_store(few_desc, [row0 + first + m, n], tile.slice(m, ROW_ALIGN))
        elif rows > 0:  # only other groups have rows
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(free.index(stage), count=1)
                count += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=COUNTS)
def _hopper_grouped_kernel(
    out_desc, few_desc, a, half_desc, weights_desc, shared_desc, gamma_ptr, choice_ptr,
    block_expert_ptr, block_begin_ptr, block_end_ptr, block_count_ptr,
    tokens, choices, blocks, all_blocks, depth, rows_each, columns, stride_x, stride_gamma,
    UP: gl.constexpr, TOP_K: gl.constexpr, FOLD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = weights_desc.block_type.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_smem = gl.allocate_shared_memory(dtype, [4 * STAGES, 64, BLOCK_K], layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], layout)
    out_smem = gl.allocate_shared_memory(dtype, [4 if UP else 8, 64, 64], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # One arrival for the bulk copies, and one of every producer thread for its own copies.
        mbarrier.init(ready.index(stage), count=129 if UP else 1)
        mbarrier.init(free.index(stage), count=4)
    used = gl.load(block_count_ptr)  # no rounds for empty slots
    all_blocks += used - blocks
    blocks = used
    order = (block_expert_ptr, block_begin_ptr, block_end_ptr)
    counts = (tokens, choices, blocks, all_blocks)
    gl.warp_specialize(
        [
            (_consume, (
                0, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_consume, (
                1, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_consume, (
                2, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_consume, (
                3, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_produce, (
                a, half_desc, weights_desc, shared_desc, choice_ptr, order, counts, depth,
                rows_each, columns, stride_x, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
        ],
        [4, 4, 4, 4],
        [104, 104, 104, 72],
    )  # fmt: skip


def _descriptor(tensor: torch.Tensor, rows: int = 64) -> TensorDescriptor:
    """Bulk copies of [rows, BLOCK_K] tiles of a tensor seen as a matrix of its last axis."""
    flat = tensor.view(-1, tensor.shape[-1])
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], dtype)
    return TensorDescriptor.from_tensor(flat, [rows, BLOCK_K], layout)


def launch_product(
    out: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    gamma: torch.Tensor | None,
    order: SortedChoices,
    *,
    tokens: int,
    top_k: int,
    shared_experts: int,
    arch: Arch,
    row: TuningRow,
) -> None:
    """One of the two grouped products.

    Args:
        out: act [rows, I] (gate/up, with gamma) or partial [rows, H] (down): the rows of
            order.choice, then those of each shared expert, at multiples of ROW_ALIGN.
        rows: x [T, H], or act. weights: [X, 2I, H] or [X, H, I]; shared: likewise, or None.
        gamma: fp32 [T, K + S] for the gate/up product, else None.
        order: by size.
        row: constexpr STAGES.
    """
    up = gamma is not None
    columns, depth = out.shape[1], rows.shape[1]
    blocks = order.block_expert.numel()
    all_blocks = blocks + shared_experts * triton.cdiv(tokens, BLOCK_M)
    tiles = all_blocks * triton.cdiv(columns, BLOCK_N // 2 if up else BLOCK_N)
    _hopper_grouped_kernel[(min(arch.compute_units, tiles),)](
        _descriptor(out),
        _descriptor(out, ROW_ALIGN.value),
        rows if up else _descriptor(rows),
        None if up else _descriptor(rows, 32),
        _descriptor(weights),
        _descriptor(shared) if shared_experts and shared is not None else None,
        gamma, order.choice, order.block_expert, order.block_begin, order.block_end,
        order.block_count, tokens, order.choice.numel(), blocks, all_blocks, depth,
        weights.shape[1], columns, rows.stride(0), gamma.stride(0) if gamma is not None else 0,
        UP=up, TOP_K=top_k, FOLD=shared_experts > 0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=row.constexprs["STAGES"],
        num_warps=4,
    )  # fmt: skip
