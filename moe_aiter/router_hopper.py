"""The router product of many tokens for Hopper, warp-specialised in Gluon: partial sums as
gate.py's router leaves them.

Up to 256 routed experts are the columns of one tile, so every token row is read once; the shared
experts' few rows are a second, narrow product of the same activations. One producer warp group
fills a ring of shared-memory stages by bulk tensor copies (rows and columns past the end come as
zeros); two consumer warp groups own 64 tokens each.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_base.hopper_copy import bulk_load, rings
from kernel_base.tuning import TuningRow

BLOCK_M, BLOCK_X, BLOCK_S, BLOCK_K = 128, 256, 16, 64
# Bytes that the bulk copies of one stage bring.
STAGE_BYTES = gl.constexpr((BLOCK_M + BLOCK_X + BLOCK_S) * BLOCK_K * 2)


@gluon.jit
def _produce(
    x_desc, w_desc, s_desc, t0, h0, steps, num_experts, a_smem, b_smem, s_smem, ready, free,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, STAGE_BYTES)
        k = h0 + step * BLOCK_K
        bulk_load(x_desc, [t0, k], bar, a_smem.index(stage * 2))
        bulk_load(x_desc, [t0 + 64, k], bar, a_smem.index(stage * 2 + 1))
        bulk_load(w_desc, [0, k], bar, b_smem.index(stage))
        bulk_load(s_desc, [num_experts, k], bar, s_smem.index(stage))


@gluon.jit
def _consume(
    warp_group: gl.constexpr, partial_ptr, row0, t0, steps, tokens, num_experts, pitch, a_smem,
    b_smem, s_smem, ready, free,
    SHARED: gl.constexpr, BLOCK_X: gl.constexpr, BLOCK_S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_X, 16])
    few_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_S, 16])
    acc = gl.zeros([64, BLOCK_X], gl.float32, layout)
    few = gl.zeros([64, BLOCK_S], gl.float32, few_layout)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        a = a_smem.index(stage * 2 + warp_group)
        b = b_smem.index(stage).permute((1, 0))
        s = s_smem.index(stage).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
        few = warpgroup_mma(a, s, few, use_acc=step > 0, is_async=True)
        # The products of the step before are done: its stage can be filled again.
        acc, few = warpgroup_mma_wait(2, deps=[acc, few])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    acc, few = warpgroup_mma_wait(0, deps=[acc, few])
    m = warp_group * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = gl.arange(0, BLOCK_X, gl.SliceLayout(0, layout))
    ptrs = partial_ptr + (row0 + m).to(gl.int64)[:, None] * pitch + n[None, :]
    gl.store(ptrs, acc, mask=(t0 + m < tokens)[:, None] & (n < num_experts)[None, :])
    m = warp_group * 64 + gl.arange(0, 64, gl.SliceLayout(1, few_layout))
    n = gl.arange(0, BLOCK_S, gl.SliceLayout(0, few_layout))
    ptrs = partial_ptr + (row0 + m).to(gl.int64)[:, None] * pitch + (num_experts + n)[None, :]
    gl.store(ptrs, few, mask=(t0 + m < tokens)[:, None] & (n < SHARED)[None, :])


@gluon.jit(do_not_specialize=("tokens",))
def _router_hopper_kernel(
    partial_ptr, x_desc, w_desc, s_desc, tokens, num_experts, hidden, pitch,
    SHARED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_X: gl.constexpr, BLOCK_S: gl.constexpr,
    BLOCK_K: gl.constexpr, SLICE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = w_desc.block_type.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, BLOCK_K], layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_X, BLOCK_K], layout)
    s_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_S, BLOCK_K], layout)
    ready, free = rings(STAGES, (1, 2))
    t0 = gl.program_id(0) * BLOCK_M
    h0 = gl.program_id(1) * SLICE
    steps = gl.cdiv(gl.minimum(hidden - h0, SLICE), BLOCK_K)
    row0 = gl.program_id(1) * tokens + t0
    gl.warp_specialize(
        [
            (_consume, (
                0, partial_ptr, row0, t0, steps, tokens, num_experts, pitch, a_smem, b_smem, s_smem,
                ready, free, SHARED, BLOCK_X, BLOCK_S, STAGES,
            )),
            (_consume, (
                1, partial_ptr, row0, t0, steps, tokens, num_experts, pitch, a_smem, b_smem, s_smem,
                ready, free, SHARED, BLOCK_X, BLOCK_S, STAGES,
            )),
            (_produce, (
                x_desc, w_desc, s_desc, t0, h0, steps, num_experts, a_smem, b_smem, s_smem, ready,
                free, BLOCK_K, STAGES,
            )),
        ],
        [4, 4],
        [216, 56],
    )  # fmt: skip


def _descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], dtype)
    return TensorDescriptor.from_tensor(tensor, [rows, BLOCK_K], layout)


def launch_router(
    partial: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    num_experts: int,
    depth: int,
    row: TuningRow,
) -> None:
    """Partial logits of every slice.

    Args:
        partial: fp32 [slices, T, pitch], gets columns 0 .. X + S - 1. x: [T, H].
        weight: [X + S, H] contiguous. depth: of a slice, a multiple of BLOCK_K.
        row: constexpr STAGES.
    """
    slices, T, pitch = partial.shape
    _router_hopper_kernel[(triton.cdiv(T, BLOCK_M), slices)](
        partial, _descriptor(x, 64), _descriptor(weight, BLOCK_X), _descriptor(weight, BLOCK_S),
        T, num_experts, x.shape[1], pitch,
        SHARED=weight.shape[0] - num_experts, BLOCK_M=BLOCK_M, BLOCK_X=BLOCK_X, BLOCK_S=BLOCK_S,
        BLOCK_K=BLOCK_K, SLICE=depth, STAGES=row.constexprs["STAGES"], num_warps=4,
    )  # fmt: skip
