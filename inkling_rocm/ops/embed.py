"""embed: token ids to normed rows, x0 = rms_norm(embed[ids]); the vocabulary is split over the
ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.host import Comm
from inkling_rocm.ops import triton_support
from inkling_rocm.ops.registry import Variant
from inkling_rocm.ops.rms_norm import rms_norm


def embed(input_ids: Tensor, table_VH: Tensor, norm_H: Tensor, *, eps: float, comm: Comm) -> Tensor:
    """Look up and normalise.

    Args:
        input_ids: int64 [T], ids below the padded vocabulary size.
        table_VH: [V / tp_size, H], this rank's rows.
        norm_H: [H].
    Returns: [T, H] in the table's dtype, the same on every rank.
    """
    return rms_norm(look_up(input_ids, table_VH, comm), norm_H, eps)


def look_up(input_ids: Tensor, table_VH: Tensor, comm: Comm) -> Tensor:
    """Rows of a table that the ranks share, without the norm.

    Args:    input_ids: int64, of any shape.
    Returns: [*shape, H] in the table's dtype, the same on every rank.
    """
    if comm.tp_size == 1:
        return F.embedding(input_ids, table_VH)
    first = comm.tp_rank * table_VH.shape[0]
    local = input_ids - first
    ours = (local >= 0) & (local < table_VH.shape[0])
    rows = F.embedding(local.clamp(0, table_VH.shape[0] - 1), table_VH) * ours[..., None]
    return comm.all_reduce(rows)


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.layer_triton:make_embed",
        per_engine=True,
        supports=triton_support.layer,
    ),
    Variant(name="torch", function="inkling_rocm.ops.embed:embed"),
)
