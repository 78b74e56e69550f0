"""attention_prologue: from packed [q | k | v | r] rows to normed q, r, and K/V in their pages.

    q = rms_norm(q) * tau(position)        per head; tau in fp32, then rounded; global layers only
    k = rms_norm(short_conv(k))            per head, written to the token's page slot
    v = short_conv(v)                      written to the token's page slot
    tau(p) = 1 + alpha * ln(max((p + 1) / floor, 1))

r passes through: tau scales the bias inside rel_attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import BatchMeta, ConvStateView, KVCacheView
from inkling_rocm.ops import triton_support
from inkling_rocm.ops.registry import Variant
from inkling_rocm.ops.rms_norm import rms_norm
from inkling_rocm.ops.short_conv import short_conv


def tau(positions: Tensor, attention: AttentionConfig, dtype=torch.float32) -> Tensor | None:
    """Length scaling of queries and bias, [T] in `dtype`; None where it is 1 everywhere (local
    layers)."""
    if attention.log_floor is None:
        return None
    length = (positions + 1).to(dtype)
    return 1.0 + attention.log_alpha * torch.log((length / attention.log_floor).clamp(min=1.0))


def tau_key(attention: AttentionConfig) -> tuple:
    """Where BatchMeta.memo keeps a forward's tau, fp32 [T], for layers with these constants."""
    return ("tau", attention.log_floor, attention.log_alpha)


def attention_prologue(
    qkvr: Tensor,
    *,
    attention: AttentionConfig,
    k_conv: Tensor,
    v_conv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    meta: BatchMeta,
    kv: KVCacheView,
    k_ring: ConvStateView,
    v_ring: ConvStateView,
) -> tuple[Tensor, Tensor]:
    """Prepare one layer's attention.

    Args:
        qkvr: [T, (h + 2g) D + h R], this rank's packed projections.
        attention: this rank's head counts (h, g), D, R, tau's constants.
        k_conv, v_conv: fp32 [W, g D]. q_norm, k_norm: [D].
    Returns: q [T, h, D] and r [T, h, R] in qkvr's dtype.
    In place: K/V rows of tokens with kv.slot != 0; the two rings (see short_conv).
    """
    h, g, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    T = qkvr.shape[0]
    q, k, v, r = qkvr.split((h * D, g * D, g * D, h * attention.d_rel), dim=-1)
    q_ThD = rms_norm(q.view(T, h, D), q_norm, eps)
    scale = tau(meta.positions, attention, torch.promote_types(q.dtype, torch.float32))
    if scale is not None:
        q_ThD = (q_ThD.to(scale.dtype) * scale[:, None, None]).to(qkvr.dtype)
    k_TgD = rms_norm(short_conv(k, k_conv, meta, k_ring).view(T, g, D), k_norm, eps)
    v_TgD = short_conv(v, v_conv, meta, v_ring).view(T, g, D)
    write_kv(k_TgD, v_TgD, meta, kv)
    return q_ThD, r.view(T, h, attention.d_rel)


def write_kv(k_TgD: Tensor, v_TgD: Tensor, meta: BatchMeta, kv: KVCacheView) -> None:
    """Store the rows of tokens whose slot is not 0 in their pages."""
    key = ("kv_write", kv.slot.data_ptr())
    if key not in meta.memo:
        tokens = kv.slot.nonzero()[:, 0]
        everyone = len(tokens) == len(kv.slot)
        meta.memo[key] = (None, kv.slot) if everyone else (tokens, kv.slot[tokens])
    tokens, slots = meta.memo[key]
    for pages, rows in ((kv.k, k_TgD), (kv.v, v_TgD)):
        stored = rows if tokens is None else rows.index_select(0, tokens)
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, stored)


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.layer_triton:make_attention_prologue",
        per_engine=True,
        supports=triton_support.layer,
    ),
    Variant(name="torch", function="inkling_rocm.ops.attention_prologue:attention_prologue"),
)
