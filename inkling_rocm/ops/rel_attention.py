"""rel_attention: paged attention with the learned relative-position bias.

    rel[t, h, e]   = tau(t) * sum_r r[t, h, r] * P[r, e]                                   e = 0 ..
    E-1 logit[t, h, n] = q[t, h] . k[n, h // (h/g)] / D + rel[t, h, t - n]     no bias where t - n
    >= E out[t, h]      = softmax_n(logit) v                                    0 <= t - n (<
    window)

q arrives normed and scaled by tau. Everything is computed in fp32 (float64 for float64 inputs) and
rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import BatchMeta, KVCacheView
from inkling_rocm.ops.attention_prologue import tau
from inkling_rocm.ops.registry import Variant

MAX_SCORES = 1 << 24  # scores held at a time: bounds the memory of a long prefill


def rel_attention(
    q_ThD: Tensor,
    r_ThR: Tensor,
    rel_proj_RE: Tensor,
    *,
    attention: AttentionConfig,
    meta: BatchMeta,
    kv: KVCacheView,
) -> Tensor:
    """Attend from every token to its row's pages, which already hold this forward's keys.

    Args:
        q_ThD: [T, h, D]; r_ThR: [T, h, R]; rel_proj_RE: [R, E]: all of the model dtype.
        attention: this rank's head counts and the softmax scale; kv.window is the visible span.
    Returns: [T, h, D] in q's dtype. Rows of tokens with slot 0 are finite and otherwise undefined.
    """
    out_ThD = torch.empty_like(q_ThD)
    for group in _groups(meta, kv):
        k = _pages_to_rows(kv.k, group.key_slot)
        v = _pages_to_rows(kv.v, group.key_slot)
        span = group.key_slot.shape[1]
        scores_a_query = len(group.tokens) * span * attention.num_heads
        num_queries = group.tokens.shape[1]
        step = max(1, MAX_SCORES // scores_a_query)
        for first in range(0, num_queries, step):
            queries = slice(first, min(first + step, num_queries))
            tokens = group.tokens[:, queries]
            # Keys are right-aligned, so a (query, key) distance is the same in every row.
            distance = (
                torch.arange(queries.start, queries.stop, device=tokens.device)[:, None]
                + (span - num_queries)
                - torch.arange(span, device=tokens.device)
            )
            out_ThD[tokens] = _attend(
                q_ThD[tokens],
                r_ThR[tokens],
                rel_proj_RE,
                tau(meta.positions[tokens], attention, _wide(q_ThD)),
                k,
                v,
                distance,
                group.key_exists,
                attention=attention,
                window=kv.window,
            )
    return out_ThD


@dataclass(frozen=True)
class _Group:
    """Rows with equally many query tokens: one padded batch.

    Attributes:
        tokens: int64 [B', q]. key_slot: int64 [B', n], flat page slots of the last n positions of
            each row, 0 where there is none. key_exists: bool [B', n], or None when all do.
    """

    tokens: Tensor
    key_slot: Tensor
    key_exists: Tensor | None


def _groups(meta: BatchMeta, kv: KVCacheView) -> list[_Group]:
    key = ("attention_groups", kv.page_table.data_ptr(), kv.window)
    groups = meta.memo.get(key)
    if groups is not None:
        return groups
    q_len = meta.cu_seqlens_q.diff()
    groups = []
    for length in q_len.unique().tolist():
        if length == 0:
            continue
        rows = (q_len == length).nonzero()[:, 0]
        first = meta.cu_seqlens_q[rows].long()
        tokens = first[:, None] + torch.arange(length, device=first.device)
        kv_len = meta.kv_len[rows].long()
        span = int(kv_len.max())
        if kv.window:
            span = min(span, length + kv.window - 1)
        position = (kv_len - span)[:, None] + torch.arange(span, device=first.device)
        exists = position >= 0
        column = position // kv.page_size - kv.first_page[rows].long()[:, None]
        in_table = column.clamp(0, kv.page_table.shape[1] - 1)
        page = kv.page_table[rows].long().gather(1, in_table)
        slot = torch.where(exists, page * kv.page_size + position % kv.page_size, 0)
        groups.append(_Group(tokens, slot, None if bool(exists.all()) else exists))
    meta.memo[key] = groups
    return groups


def _pages_to_rows(pages: Tensor, slot: Tensor) -> Tensor:
    """[pages, page_size, g, D] and slots [B', n] -> [B', n, g, D]."""
    g, D = pages.shape[2:]
    return pages.view(-1, g * D).index_select(0, slot.flatten()).view(*slot.shape, g, D)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _attend(
    q, r, rel_proj, tau_Bq, k, v, distance, key_exists, *, attention: AttentionConfig, window
):
    """q [B', q, h, D], r [B', q, h, R], k and v [B', n, g, D], distance [q, n] -> [B', q, h, D]."""
    wide = _wide(q)
    visible = distance >= 0
    if window:
        visible &= distance < window
    mask = visible if key_exists is None else visible & key_exists[:, None, None, :]
    bias = _bias(r.to(wide), rel_proj.to(wide), distance)  # [B', h, q, n]
    if tau_Bq is not None:
        bias = bias * tau_Bq[:, None, :, None]
    out = F.scaled_dot_product_attention(
        q.to(wide).transpose(1, 2),
        k.to(wide).transpose(1, 2),
        v.to(wide).transpose(1, 2),
        attn_mask=bias.masked_fill(~mask, float("-inf")),
        scale=attention.softmax_scale,
        enable_gqa=attention.num_heads != attention.num_kv_heads,
    )
    return out.transpose(1, 2).to(q.dtype)


def _bias(r: Tensor, rel_proj: Tensor, distance: Tensor) -> Tensor:
    """r [B', q, h, R], P [R, E], distance [q, n] -> bias [B', h, q, n], zero outside [0, E)."""
    extent = rel_proj.shape[1]
    inside = (distance >= 0) & (distance < extent)
    if len(distance) == 1:  # one query a row: P's columns in key order give the bias at once
        profile = rel_proj.index_select(1, distance[0].clamp(0, extent - 1)) * inside
        return (r @ profile).transpose(1, 2)
    rel = (r @ rel_proj).transpose(1, 2)  # [B', h, q, E]
    index = distance.clamp(0, extent - 1).expand(*rel.shape[:2], -1, -1)
    return rel.gather(-1, index) * inside


VARIANTS = (Variant(name="torch", function="inkling_rocm.ops.rel_attention:rel_attention"),)
