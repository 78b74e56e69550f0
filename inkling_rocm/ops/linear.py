"""linear: y = x W^T, no bias term anywhere in the model."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.ops import triton_support
from inkling_rocm.ops.registry import Variant


def linear(x_TN: Tensor, weight_MN: Tensor) -> Tensor:
    """Args:    x_TN: [T, N]; weight_MN: [M, N], same dtype.
    Returns: [T, M] in x's dtype.
    """
    return F.linear(x_TN, weight_MN)


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.kernels.linear:Linear",
        per_engine=True,
        supports=triton_support.layer,
    ),
    Variant(name="torch", function="inkling_rocm.ops.linear:linear"),
)
