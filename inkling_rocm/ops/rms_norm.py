"""rms_norm: scale each row to unit RMS, round, then multiply by the weight.

    rms_norm(x) = weight * cast(x / sqrt(mean(x^2) + eps))        sums in fp32; source:
    arXiv:1910.07467 eq. 4

The rounding to the model dtype before the multiplication is visible in bf16 and is the released
model's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.ops import triton_support
from inkling_rocm.ops.registry import Variant


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension.

    Args:    x: [..., N], any float dtype. weight: [N], x's dtype. eps: added to the mean square.
    Returns: x's shape and dtype.
    """
    if x.dtype in (torch.float32, torch.float64):  # nothing is rounded: one kernel does it all
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.layer_triton:make_rms_norm",
        per_engine=True,
        supports=triton_support.layer,
    ),
    Variant(name="torch", function="inkling_rocm.ops.rms_norm:rms_norm"),
)
