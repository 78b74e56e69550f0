"""dense_mlp: down(silu(x gate^T) * (x up^T)) * global_scale."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.ops import moe_support
from inkling_rocm.ops.registry import Variant


def dense_mlp(x_TH: Tensor, gate_up: Tensor, down_HI: Tensor, global_scale: Tensor) -> Tensor:
    """SwiGLU MLP of one rank.

    Args:
        x_TH: [T, H]. gate_up: [2I, H], gate rows then up rows. down_HI: [H, I]. All of one dtype.
        global_scale: fp32 [1].
    Returns: [T, H], this rank's partial sum.
    """
    gate_TI, up_TI = F.linear(x_TH, gate_up).chunk(2, dim=-1)
    out_TH = F.linear(F.silu(gate_TI) * up_TI, down_HI)
    return out_TH * global_scale.to(out_TH.dtype)


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.moe_triton:make_dense_mlp",
        per_engine=True,
        supports=moe_support.triton,
    ),
    Variant(name="torch", function="inkling_rocm.ops.dense_mlp:dense_mlp"),
)
