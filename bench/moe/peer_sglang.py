"""SGLang 0.5.23's Inkling expert kernels as a peer (importable as `sglang.kernels...`; not part of
this repository): sort, gather, grouped product, SwiGLU, grouped product, weighted sum. Routed
experts only.

Its weights interleave gate and up rows; a test of the runner's gate compares both on the same
weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_aiter.problems import Problem


def interleave(w13: torch.Tensor) -> torch.Tensor:
    """[X, 2I, H], gate rows then up rows -> g0, u0, g1, u1, ..."""
    X, rows, H = w13.shape
    return w13.view(X, 2, rows // 2, H).transpose(1, 2).reshape(X, rows, H)


def experts(w13_interleaved: torch.Tensor, w2: torch.Tensor) -> Callable[[Problem], torch.Tensor]:
    """A function of (x, ids, gamma) that runs the peer's chain as its model does."""
    from sglang.kernels.ops.moe import inkling_moe as peer

    num_experts = w2.shape[0]

    def run(problem: Problem) -> torch.Tensor:
        flat, K = problem.ids.flatten(), problem.ids.shape[1]
        n = flat.numel()
        if n <= peer.FUSED_PREPROCESS_WIN_TOKENS:
            src2dst, *meta, _ = peer.fused_moe_preprocess(flat, num_experts)
            block_m = peer.SMALL_M_BLOCK_SIZE_M
        else:
            ordered, order = flat.sort(stable=True)
            src2dst = peer.get_src2dst(order)
            block_m = peer.select_grouped_gemm_block_m(n)
            meta = peer.compute_grouped_gemm_metadata(ordered, num_experts, block_size_m=block_m)
        rows = peer.pre_reorder(problem.x, src2dst, K)
        gate_up = peer.grouped_gemm_triton(
            rows, w13_interleaved, num_experts, *meta, block_size_m=block_m
        )
        inner = peer.silu_and_mul(gate_up)
        down = peer.grouped_gemm_triton(inner, w2, num_experts, *meta, block_size_m=block_m)
        return peer.post_reorder(down, src2dst, problem.gamma)

    return run
