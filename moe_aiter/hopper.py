"""The two grouped products for Hopper, warp-specialised in Gluon: results as grouped.py's.

With thousands of tokens these products are bound by the traffic between L2 and the multiprocessors:
93 % of its peak with 128-row blocks (bench/results/moe_profile_h200_2026-11-30.jsonl). So a block
has 256 rows, which is all that most experts have: their weights cross once.

A producer fills a ring of shared-memory stages: weights (and the inner activations) by bulk tensor
copies, the gathered token rows by asynchronous copies. It is four warps for the gathered rows, and
one where all copies are bulk ones: each is a barrier of the producer's warps. Four consumer warp
groups own 64 rows each; a group without rows does nothing, and its rows are not loaded. A tile is
64 gate columns beside the 64 up columns that belong to them, or 128 columns of the down product. It
leaves by bulk tensor copies while the next one is computed: so the down product's rows stay in
sorted order too, every expert's at a multiple of 16, and grouped.py's sum finds a choice's row by
its place.

A program walks the tiles of all row blocks, largest blocks first, from its own number in steps of
the number of programs (or, half of the programs, back). Where its next tile is it asks the lists a
tile ahead.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_base.arch import Arch
from kernel_base.hopper_copy import rings
from kernel_base.tuning import TuningRow
from moe_aiter.hopper_roles import BLOCK_K, BLOCK_M, BLOCK_N, consume, produce
from moe_aiter.routing import ROW_ALIGN, SortedChoices

# Arguments whose value must not make another kernel: every new batch size would be compiled.
COUNTS = ("tokens", "choices", "blocks", "all_blocks", "shared_experts", "stride_gamma")


@gluon.jit(do_not_specialize=COUNTS)
def _hopper_grouped_kernel(
    out_desc, few_desc, a, half_desc, weights_desc, shared_desc, gamma_ptr, choice_ptr,
    block_expert_ptr, block_begin_ptr, block_end_ptr, block_count_ptr,
    tokens, choices, blocks, all_blocks, shared_experts, depth, rows_each, columns, stride_x,
    stride_gamma,
    UP: gl.constexpr, TOP_K: gl.constexpr, FOLD: gl.constexpr, MIX: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = weights_desc.block_type.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_smem = gl.allocate_shared_memory(dtype, [4 * STAGES, 64, BLOCK_K], layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], layout)
    out_smem = gl.allocate_shared_memory(dtype, [4, 64, 64], layout)
    # One arrival for the bulk copies, and one of every producer thread for its own copies.
    ready, free = rings(STAGES, (129 if UP else 1, 4))
    used = gl.load(block_count_ptr)  # no rounds for empty slots
    all_blocks += used - blocks
    blocks = used
    order = (block_expert_ptr, block_begin_ptr, block_end_ptr)
    counts = (tokens, choices, blocks, all_blocks, shared_experts)
    gl.warp_specialize(
        [
            (consume, (
                0, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, MIX, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (consume, (
                1, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, MIX, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (consume, (
                2, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, MIX, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (consume, (
                3, out_desc, few_desc, gamma_ptr, choice_ptr, order, counts, depth, columns,
                stride_gamma, out_smem, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, MIX, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (produce, (
                a, half_desc, weights_desc, shared_desc, choice_ptr, order, counts, depth,
                rows_each, columns, stride_x, a_smem, b_smem, ready, free,
                UP, TOP_K, FOLD, MIX, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
        ],
        [4, 4, 4, 4 if UP else 1],
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
        out: act [rows, I] (gate/up, with gamma): the rows of order.choice, then those of each
            shared expert, at multiples of ROW_ALIGN; or partial [rows, H] (down), where the shared
            experts' rows are one, their sum.
        rows: x [T, H], or act. weights: [X, 2I, H] or [X, H, I]; shared: likewise, or None.
        gamma: fp32 [T, K + S] for the gate/up product, else None.
        order: by size.
        row: constexprs STAGES and MIX (half of the programs walk back).
    """
    up = gamma is not None
    columns, depth = out.shape[1], rows.shape[1]
    blocks = order.block_expert.numel()
    kinds = shared_experts if up else min(shared_experts, 1)
    all_blocks = blocks + kinds * triton.cdiv(tokens, BLOCK_M)
    tiles = all_blocks * triton.cdiv(columns, BLOCK_N // 2 if up else BLOCK_N)
    _hopper_grouped_kernel[(min(arch.compute_units, tiles),)](
        _descriptor(out),
        _descriptor(out, ROW_ALIGN.value),
        rows if up else _descriptor(rows),
        None if up else _descriptor(rows, 32),
        _descriptor(weights),
        _descriptor(shared) if shared_experts and shared is not None else None,
        gamma, order.choice, order.block_expert, order.block_begin, order.block_end,
        order.block_count, tokens, order.choice.numel(), blocks, all_blocks, shared_experts, depth,
        weights.shape[1], columns, rows.stride(0), gamma.stride(0) if gamma is not None else 0,
        UP=up, TOP_K=top_k, FOLD=shared_experts > 0, MIX=row.constexprs["MIX"],
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=row.constexprs["STAGES"],
        num_warps=4,
    )  # fmt: skip
