"""The dense SwiGLU MLP: one expert that every token hits, with global_scale as its weight."""

from __future__ import annotations

import torch

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from moe_aiter.checks import check_rows, check_weight, request_arch, require
from moe_aiter.tokens import experts_by_token

# On an H200 the library's down product is the faster from so many tokens on (docs/moe.md).
LIBRARY_FROM = 128


def by_library(arch: Arch, tokens: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the down product of so many tokens is the library's. Its fp32 products may be TF32's,
    as torch is told; elsewhere nothing was measured."""
    measured = arch.name == "sm90" and device.type == "cuda"
    return measured and dtype != torch.float32 and tokens >= LIBRARY_FROM


def dense_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    arch: Arch | str | None = None,
    rows: tuple[TuningRow | None, TuningRow | None] = (None, None),
) -> torch.Tensor:
    """down(silu(x gate^T) * (x up^T)) * global_scale in two launches; the scale enters in fp32
    before the inner rounding.

    Args:
        x: [T, H]. gate_up: [2I, H], gate rows then up rows. down: [H, I]. All of one dtype.
        global_scale: fp32 [1].
    Returns: [T, H] in x's dtype, this rank's partial sum.
    Raises: ValueError: an argument does not fit, or no tuning row.
    """
    op = "dense_mlp"
    check_rows(op, "x", x)
    arch = request_arch(arch, x)
    (T, H), I = x.shape, down.shape[1]
    check_weight(op, "gate_up", gate_up, (2 * I, H), x)
    check_weight(op, "down", down, (H, I), x)
    scale_is = (global_scale.numel(), global_scale.dtype)
    require(op, scale_is == (1, torch.float32), "global_scale", scale_is, (1, torch.float32))
    out = torch.empty(T, H, dtype=x.dtype, device=x.device) if out is None else out
    check_rows(op, "out", out, H)
    if T == 0:
        return out
    gamma = global_scale.view(1, 1).expand(T, 1)
    library = rows[1] is None and by_library(arch, T, x.dtype, x.device)
    return experts_by_token(
        x, None, gamma, w13=None, w2=None, shared_w13=gate_up[None], shared_w2=down[None], out=out,
        arch=arch, rows=rows, library=library,
    )  # fmt: skip
