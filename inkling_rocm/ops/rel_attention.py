"""rel_attention: paged attention with the learned relative-position bias.

    rel[t, h, e]   = tau(t) * sum_r r[t, h, r] * P[r, e]                                   e = 0 ..
    E-1 logit[t, h, n] = q[t, h] . k[n, h // (h/g)] / D + rel[t, h, t - n]     no bias where t - n
    >= E out[t, h]      = softmax_n(logit) v                                    0 <= t - n (<
    window)

q arrives normed and scaled by tau. Everything is computed in fp32 (float64 for float64 inputs) and
rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    out_ThD = torch.zeros_like(q_ThD)
    for tokens, rows in _rows_by_length(meta):
        keys = _gather_keys(rows, tokens, meta, kv)
        scores_a_query = keys[0].shape[0] * keys[0].shape[1] * attention.num_heads
        for block in tokens.split(max(1, MAX_SCORES // scores_a_query), dim=1):
            out_ThD[block] = _attend(
                q_ThD[block],
                r_ThR[block],
                rel_proj_RE,
                meta.positions[block],
                *keys,
                attention=attention,
                window=kv.window,
            )
    return out_ThD


def _rows_by_length(meta: BatchMeta) -> list[tuple[Tensor, Tensor]]:
    """Rows with equally many query tokens share one padded batch: pairs (tokens [B', q], rows
    [B'])."""
    key = ("rows_by_length",)
    groups = meta.memo.get(key)
    if groups is None:
        q_len = meta.cu_seqlens_q.diff()
        groups = []
        for length in q_len.unique().tolist():
            if length:
                rows = (q_len == length).nonzero()[:, 0]
                first = meta.cu_seqlens_q[rows].long()
                tokens = first[:, None] + torch.arange(length, device=first.device)
                groups.append((tokens, rows))
        meta.memo[key] = groups
    return groups


def _gather_keys(rows: Tensor, tokens: Tensor, meta: BatchMeta, kv: KVCacheView):
    """K, V [B', n, g, D] and absolute key positions int64 [B', n]; positions past a row's end are
    repeated from page 0 and masked by _attend (they are greater than every query position)."""
    key = ("keys", kv.page_table.data_ptr(), kv.window, tokens.shape[1])
    found = meta.memo.get(key)
    if found is None:
        page = kv.page_size
        floor = torch.zeros_like(rows)
        if kv.window:
            floor = (meta.q_start[rows].long() - (kv.window - 1)).clamp(min=0)
        span = int((meta.kv_len[rows].long() - floor).max())
        position = floor[:, None] + torch.arange(span, device=rows.device)
        column = position // page - kv.first_page[rows].long()[:, None]
        in_table = column.clamp(0, kv.page_table.shape[1] - 1)
        slot = kv.page_table[rows].long().gather(1, in_table) * page + position % page
        real = position < meta.kv_len[rows].long()[:, None]
        slot = torch.where(real, slot, 0)
        found = meta.memo[key] = (slot, position)
    slot, position = found
    k_SgD = kv.k.view(-1, *kv.k.shape[2:])
    v_SgD = kv.v.view(-1, *kv.v.shape[2:])
    return k_SgD[slot], v_SgD[slot], position


def _attend(q, r, rel_proj, q_position, k, v, k_position, *, attention: AttentionConfig, window):
    """q [B', q, h, D], r [B', q, h, R], k and v [B', n, g, D] -> [B', q, h, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    B, Q, h, D = q.shape
    g = k.shape[2]
    q, k, v = (x.to(wide) for x in (q, k, v))

    distance = q_position[:, :, None].long() - k_position[:, None, :]  # [B', q, n]
    visible = distance >= 0
    if window:
        visible &= distance < window

    rel_BqhE = r.to(wide) @ rel_proj.to(wide)
    scale = tau(q_position, attention, wide)
    if scale is not None:
        rel_BqhE = rel_BqhE * scale[:, :, None, None]
    extent = rel_BqhE.shape[-1]
    index = distance.clamp(0, extent - 1)[:, :, None, :].expand(-1, -1, h, -1)
    has_bias = (distance >= 0) & (distance < extent)
    bias_Bqhn = rel_BqhE.gather(-1, index) * has_bias[:, :, None, :]

    q_BgxD = q.view(B, Q, g, h // g, D).permute(0, 2, 1, 3, 4).reshape(B, g, -1, D)
    logits = q_BgxD @ k.permute(0, 2, 3, 1) * attention.softmax_scale  # [B', g, q * h/g, n]
    logits = logits.view(B, g, Q, h // g, -1).permute(0, 2, 1, 3, 4).reshape(B, Q, h, -1)
    logits = (logits + bias_Bqhn).masked_fill(~visible[:, :, None, :], float("-inf"))
    probs = logits.softmax(-1).view(B, Q, g, h // g, -1).permute(0, 2, 1, 3, 4)
    out = probs.reshape(B, g, Q * (h // g), -1) @ v.permute(0, 2, 1, 3)
    out = out.view(B, g, Q, h // g, D).permute(0, 2, 1, 3, 4)
    return out.reshape(B, Q, h, D).to(r.dtype)


VARIANTS = (Variant(name="torch", function="inkling_rocm.ops.rel_attention:rel_attention"),)
