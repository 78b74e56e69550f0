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
from inkling_rocm.ops import triton_support
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
    key = ("attention", kv.page_table.data_ptr(), kv.window, attention)
    if key not in meta.memo:
        meta.memo[key] = _blocks(
            meta, kv, attention, torch.promote_types(q_ThD.dtype, torch.float32)
        )
    blocks = meta.memo[key]
    if len(blocks) == 1 and blocks[0].in_order:
        return _attend(q_ThD, r_ThR, rel_proj_RE, kv, attention, blocks[0])
    out_ThD = torch.empty_like(q_ThD)
    for block in blocks:
        tokens = block.tokens
        out_ThD[tokens] = _attend(q_ThD[tokens], r_ThR[tokens], rel_proj_RE, kv, attention, block)
    return out_ThD


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Queries of rows with equally many tokens, padded to one batch of B' rows with n keys each.

    Keys are right-aligned (the last n positions of each row), so that the distance of a query and
    a key is the same in every row.

    Attributes:
        tokens: int64 [B' * Q], row-major. in_order: they are simply all tokens.
        rows, queries: B' and Q.
        key_slots: int64 [B' * n], flat page slots, those of the sink where a row has no such
            position.
        distance: int64 [Q * n], clamped to 0 .. E-1.
        has_bias: [Q, n], 1 or 0; None when all are 1.
        hidden: bool [B' or 1, 1, Q, 1, n], keys that must not be seen; None when there are none.
        tau: [B', Q], length scaling of the bias, or None.
    """

    tokens: Tensor
    in_order: bool
    rows: int
    queries: int
    key_slots: Tensor
    distance: Tensor
    has_bias: Tensor | None
    hidden: Tensor | None
    tau: Tensor | None


def _blocks(
    meta: BatchMeta, kv: KVCacheView, attention: AttentionConfig, wide: torch.dtype
) -> list[_Block]:
    device, page_size = kv.k.device, kv.page_size
    blocks = []
    for length, rows in _rows_by_length(meta):
        kv_len = meta.kv_len[rows]
        shortest, span = (int(bound) for bound in kv_len.aminmax())
        if kv.window:
            span = min(span, length + kv.window - 1)
        back = torch.arange(span, device=device)
        position = (kv_len - span)[:, None] + back
        column = position // page_size - kv.first_page[rows][:, None]
        page = kv.page_table[rows].gather(1, column.clamp_(0, kv.page_table.shape[1] - 1))
        slots = page * page_size + position % page_size
        missing = None
        if shortest < span:
            missing = position < 0
            slots.masked_fill_(missing, 0)
        first_token = meta.cu_seqlens_q[:-1][rows].long()
        step = max(1, MAX_SCORES // (kv_len.shape[0] * span * attention.num_heads))
        for first in range(0, length, step):
            query = torch.arange(first, min(first + step, length), device=device)
            tokens = first_token[:, None] + query
            distance = query[:, None] + (span - length) - back
            hidden = None if missing is None else missing[:, None, None, None]
            if length > 1:  # a row's only query sees every key there is
                unseen = distance < 0
                if kv.window:
                    unseen |= distance >= kv.window
                unseen = unseen[None, None, :, None]
                hidden = unseen if hidden is None else hidden | unseen
            has_bias = None
            if length > 1 or span > attention.extent:
                has_bias = ((distance >= 0) & (distance < attention.extent)).to(wide)
                distance.clamp_(0, attention.extent - 1)
            blocks.append(
                _Block(
                    tokens=tokens.flatten(),
                    in_order=tokens.numel() == meta.num_tokens,
                    rows=kv_len.shape[0],
                    queries=query.shape[0],
                    key_slots=slots.flatten(),
                    distance=distance.flatten(),
                    has_bias=has_bias,
                    hidden=hidden,
                    tau=tau(meta.positions[tokens], attention, wide),
                )
            )
    return blocks


def _rows_by_length(meta: BatchMeta) -> list[tuple[int, Tensor | slice]]:
    """(length, rows) of every number of query tokens that rows have, 0 left out."""
    if meta.q_uniform:
        return [(meta.q_uniform, slice(None))]
    q_len = meta.cu_seqlens_q.diff()
    return [
        (length, (q_len == length).nonzero()[:, 0]) for length in q_len.unique().tolist() if length
    ]


def _attend(q, r, rel_proj, kv: KVCacheView, attention: AttentionConfig, block: _Block) -> Tensor:
    """q [B' * Q, h, D] and r [B' * Q, h, R] of a block -> [B' * Q, h, D].

    To the attention call a kv head is a head, and the query heads that share it are more queries.
    """
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    h, g, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    B, Q, x = block.rows, block.queries, h // g
    k = kv.k.view(-1, g * D).index_select(0, block.key_slots).view(B, -1, g, D).transpose(1, 2)
    v = kv.v.view(-1, g * D).index_select(0, block.key_slots).view(B, -1, g, D).transpose(1, 2)
    if dtype != wide:
        q, r, rel_proj, k, v = (tensor.to(wide) for tensor in (q, r, rel_proj, k, v))
    bias = _bias(r, rel_proj, block).view(B, Q, g, x, -1).transpose(1, 2)  # [B', g, Q, x, n]
    if block.hidden is not None:
        bias = bias.masked_fill(block.hidden, float("-inf"))
    out = F.scaled_dot_product_attention(
        q.view(B, Q, g, x, D).transpose(1, 2).reshape(B, g, Q * x, D),
        k,
        v,
        attn_mask=bias.reshape(B, g, Q * x, -1),
        scale=attention.softmax_scale,
    )
    return out.view(B, g, Q, x, D).transpose(1, 2).reshape(B * Q, h, D).to(dtype)


def _bias(r: Tensor, rel_proj: Tensor, block: _Block) -> Tensor:
    """r [B' * Q, h, R] and P [R, E] -> bias [B' * Q, h, n], zero where there is none."""
    if block.queries == 1:  # P's columns in key order give the bias at once
        profile = rel_proj.index_select(1, block.distance)
        bias = r @ (profile if block.has_bias is None else profile * block.has_bias)
    else:
        rel = (r @ rel_proj).view(block.rows, block.queries, r.shape[1], -1)
        index = block.distance.view(1, block.queries, 1, -1).expand(*rel.shape[:3], -1)
        bias = rel.gather(-1, index)
        if block.has_bias is not None:
            bias *= block.has_bias[:, None]
        bias = bias.flatten(0, 1)
    return bias if block.tau is None else bias * block.tau.view(-1, 1, 1)


VARIANTS = (
    Variant(
        name="triton",
        function="inkling_rocm.ops.rel_attention_triton:RelAttention",
        per_engine=True,
        prepare="inkling_rocm.ops.rel_attention_triton:prepare",
        supports=triton_support.attention,
    ),
    Variant(name="torch", function="inkling_rocm.ops.rel_attention:rel_attention"),
)
