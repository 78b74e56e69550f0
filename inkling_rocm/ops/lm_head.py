"""lm_head: logits = (hidden / mup) unembed^T over the real vocabulary rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.host import Comm
from inkling_rocm.ops import moe_support
from inkling_rocm.ops.registry import Variant


def lm_head(
    hidden_TH: Tensor, weight_VH: Tensor, *, mup_multiplier: float, vocab_size: int, comm: Comm
) -> Tensor:
    """Score every real token.

    Args:
        hidden_TH: [T, H], after the final norm, not yet divided.
        weight_VH: [padded V / tp_size, H], this rank's rows.
        vocab_size: rows that are real tokens; padded rows never reach the caller.
    Returns: fp32 [T, vocab_size], the same on every rank.
    """
    scaled_TH = hidden_TH / mup_multiplier
    # Padded rows are computed and cut off: 200058 rows are no multiple of 8, which costs libraries
    # on a GPU half their speed.
    local_TV = F.linear(scaled_TH, weight_VH)
    return comm.all_gather(local_TV, dim=-1)[:, :vocab_size].float()


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.kernels.lm_head:LmHead",
        per_engine=True,
        supports=moe_support.triton,
    ),
    Variant(name="torch", function="inkling_rocm.ops.lm_head:lm_head"),
)
