"""What the warp groups of hopper.py do: one loads, four multiply."""

from __future__ import annotations

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

from kernel_base.hopper_copy import bulk_load, bulk_store, row_load
from moe_aiter.hopper_tiles import (
    count_parts,
    count_shared_rows,
    find_tile,
    find_walk,
    find_x_rows,
    read_entry,
    read_listed,
    tokens_of,
)
from moe_aiter.routing import ROW_ALIGN

BLOCK_M, BLOCK_N, BLOCK_K = 256, 128, 64
# Bytes that the bulk copies of one stage bring: two half tiles of weights, and for the down product
# 32-row tiles.
WEIGHT_BYTES = gl.constexpr(BLOCK_N * BLOCK_K * 2)
HALF_BYTES = gl.constexpr(32 * BLOCK_K * 2)


@gluon.jit
def produce(
    a, half_desc, weights_desc, shared_desc, choice_ptr, order, counts, depth, rows_each, columns,
    stride_x, a_smem, b_smem, ready, free,
    UP: gl.constexpr, TOP_K: gl.constexpr, FOLD: gl.constexpr, MIX: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tokens, choices, blocks, all_blocks, shared_experts = counts
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4 if UP else 1, 1], [1, 0])
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    offs_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    half: gl.constexpr = BLOCK_N // 2
    width_n: gl.constexpr = half if UP else BLOCK_N
    blocks_n = gl.cdiv(columns, width_n)
    count = 0
    tile, distance, rounds = find_walk(all_blocks * blocks_n, MIX)
    following = read_entry(tile // blocks_n, order, blocks)
    for _ in range(rounds):
        block = tile // blocks_n
        block_n = tile % blocks_n
        expert, shared, row0, rows = find_tile(
            block, following, tokens, choices, blocks, FOLD, BLOCK_M
        )
        tile += distance
        following = read_entry(tile // blocks_n, order, blocks)
        groups = gl.cdiv(rows, 64)
        halves = gl.cdiv(rows, 32)  # of groups: what is loaded of the inner activations
        whole = halves // 2
        first = expert * rows_each + block_n * width_n
        second = first + (columns if UP else half)
        at0 = offs_m
        at1 = offs_m
        at2 = offs_m
        at3 = offs_m
        if UP:
            at0 = find_x_rows(
                choice_ptr, row0, rows, shared, offs_m, tokens, choices, stride_x,
                TOP_K, FOLD,
            )  # fmt: skip
            at1 = find_x_rows(
                choice_ptr, row0, rows, shared, offs_m + 64, tokens, choices, stride_x,
                TOP_K, FOLD,
            )  # fmt: skip
            at2 = find_x_rows(
                choice_ptr, row0, rows, shared, offs_m + 128, tokens, choices, stride_x,
                TOP_K, FOLD,
            )  # fmt: skip
            at3 = find_x_rows(
                choice_ptr, row0, rows, shared, offs_m + 192, tokens, choices, stride_x,
                TOP_K, FOLD,
            )  # fmt: skip
        for part in range(count_parts(shared, shared_experts, UP, FOLD)):
            weight0 = part * rows_each
            part0 = row0 + part * count_shared_rows(tokens)
            for k in range(0, depth, BLOCK_K):
                stage = count % STAGES
                mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
                bar = ready.index(stage)
                if UP:
                    mbarrier.expect(bar, WEIGHT_BYTES)
                else:  # the bytes are a constant of each call: the one that fits, by branches
                    for fewer in gl.static_range(8):
                        if halves == fewer + 1:
                            mbarrier.expect(bar, WEIGHT_BYTES + (fewer + 1) * HALF_BYTES)
                upper = b_smem.index(stage).slice(0, half)
                lower = b_smem.index(stage).slice(half, half)
                if FOLD:
                    if shared >= 0:
                        bulk_load(shared_desc, [first + weight0, k], bar, upper)
                        bulk_load(shared_desc, [second + weight0, k], bar, lower)
                    else:
                        bulk_load(weights_desc, [first, k], bar, upper)
                        bulk_load(weights_desc, [second, k], bar, lower)
                else:
                    bulk_load(weights_desc, [first, k], bar, upper)
                    bulk_load(weights_desc, [second, k], bar, lower)
                for group in gl.static_range(4):
                    to = a_smem.index(stage * 4 + group)
                    if UP:
                        at = (
                            at0 if group == 0 else at1 if group == 1 else at2 if group == 2 else at3
                        )
                        if groups > group:  # rows past the end: zeros, not loads
                            inside = offs_m < rows - 64 * group
                            ptrs = a + k + at[:, None] + offs_k[None, :]
                            row_load(to, ptrs, mask=inside[:, None])
                    else:
                        bulk_load(a, [part0 + group * 64, k], bar, to, pred=whole > group)
                if not UP:
                    last = a_smem.index(stage * 4 + gl.minimum(whole, 3)).slice(0, 32)
                    bulk_load(half_desc, [part0 + whole * 64, k], bar, last, pred=halves % 2 == 1)
                if UP:
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                count += 1


@gluon.jit
def split_halves(acc):
    """A tile's left and right columns: of a gate/up tile, gate and up."""
    rows: gl.constexpr = acc.shape[0]
    half: gl.constexpr = acc.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(acc, [rows, 2, half]), (0, 2, 1)))


@gluon.jit
def start_step(
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
def consume(
    warp_group: gl.constexpr, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth,
    columns, stride_gamma, out_smem, a_smem, b_smem, ready, free,
    UP: gl.constexpr, TOP_K: gl.constexpr, FOLD: gl.constexpr, MIX: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tokens, choices, blocks, all_blocks, shared_experts = counts
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    width_n: gl.constexpr = BLOCK_N // 2 if UP else BLOCK_N
    dtype: gl.constexpr = a_smem.dtype
    first: gl.constexpr = warp_group * 64
    if UP:
        gate, _up = split_halves(gl.zeros([64, BLOCK_N], gl.float32, acc_layout))
        inner_layout: gl.constexpr = gate.type.layout
        listed_m = first + gl.arange(0, 64, gl.SliceLayout(1, inner_layout))
    blocks_n = gl.cdiv(columns, width_n)
    count = 0
    tile, distance, rounds = find_walk(all_blocks * blocks_n, MIX)
    following = read_entry(tile // blocks_n, order, blocks)
    for _ in range(rounds):
        block = tile // blocks_n
        block_n = tile % blocks_n
        _expert, shared, row0, rows = find_tile(
            block, following, tokens, choices, blocks, FOLD, BLOCK_M
        )
        tile += distance
        following = read_entry(tile // blocks_n, order, blocks)
        steps = depth // BLOCK_K * count_parts(shared, shared_experts, UP, FOLD)
        if rows > first:
            acc = gl.zeros([64, BLOCK_N], gl.float32, acc_layout)
            # What the end of a tile needs is asked for long before.
            if UP:
                row, listed = read_listed(choice_ptr, row0, rows, listed_m, choices)
            for step in range(steps // 2):
                acc = start_step(acc, count, step, warp_group, a_smem, b_smem, ready, free, STAGES)
                count += 1
            if UP:
                token, column = tokens_of(listed, row, shared, tokens, choices, TOP_K, FOLD)
                gamma = gl.load(gamma_ptr + token * stride_gamma + column)
            for step in range(steps // 2, steps):
                acc = start_step(acc, count, step, warp_group, a_smem, b_smem, ready, free, STAGES)
                count += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
            left, right = split_halves(acc)
            tma.store_wait(0)  # the tile before has left shared memory
            if UP:
                left = left / (1.0 + gl.exp(-left)) * right * gamma[:, None]
            staged = out_smem.index(warp_group)
            staged.store(left.to(dtype))
            fence_async_shared()
            for half in gl.static_range(1 if UP else 2):
                if half == 1:  # a fourth stage of loads is worth more than a second tile here
                    tma.store_wait(0)
                    staged.store(right.to(dtype))
                    fence_async_shared()
                n = block_n * width_n + half * 64
                if rows - first > 64 - ROW_ALIGN:
                    bulk_store(out_desc, [row0 + first, n], staged)
                else:
                    for m in gl.static_range(0, 64 - ROW_ALIGN, ROW_ALIGN):
                        if rows - first > m:
                            bulk_store(few_desc, [row0 + first + m, n], staged.slice(m, ROW_ALIGN))
        else:  # only other groups have rows
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(free.index(stage), count=1)
                count += 1
    tma.store_wait(0)
