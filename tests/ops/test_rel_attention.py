"""rel_attention against a float64 loop over queries and keys, on poisoned pages."""

from __future__ import annotations

import math

import pytest
import torch

from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import KVCacheView
from inkling_rocm.ops import rel_attention as module
from inkling_rocm.ops.rel_attention import rel_attention
from tests.ops.test_short_conv import layout

h, g, D, R = 6, 2, 8, 4


def attention(extent, window, floor=None) -> AttentionConfig:
    return AttentionConfig(
        num_heads=h,
        num_kv_heads=g,
        head_dim=D,
        d_rel=R,
        extent=extent,
        window=window,
        log_floor=floor,
        log_alpha=0.3,
    )


def loop(q, r, P, k, v, config, position):
    """One query at a time: k, v are the row's keys from position 0."""
    out = torch.zeros_like(q)
    for t in range(len(q)):
        p = int(position[t])
        tau = 1.0
        if config.log_floor is not None:
            tau = 1 + config.log_alpha * math.log(max((p + 1) / config.log_floor, 1.0))
        first = max(0, p - config.window + 1) if config.window else 0
        for head in range(h):
            logits = []
            for n in range(first, p + 1):
                bias = 0.0
                if p - n < config.extent:
                    bias = tau * float(r[t, head] @ P[:, p - n])
                logits.append(float(q[t, head] @ k[n, head // (h // g)]) / D + bias)
            probs = torch.tensor(logits, dtype=torch.float64).softmax(0)
            out[t, head] = probs @ v[first : p + 1, head // (h // g)]
    return out


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("extent", "window", "floor"),
    [(5, 5, None), (7, 0, 3), (40, 0, None), (1, 1, None), (12, 6, None), (3, 9, None)],
)
def test_against_the_loop(monkeypatch, page_size, extent, window, floor):
    monkeypatch.setattr(module, "MAX_SCORES", 400)  # several query blocks
    config = attention(extent, window, floor)
    rows = [(1, 0, 13), (0, 0, 2), (2, 19, 1), (3, 11, 5), (4, 30, 0), (5, 7, 1)]
    meta, slot, _, start = layout(rows)
    pages_each = -(-40 // page_size)
    shape = (1 + 5 * pages_each, page_size, g, D)
    k, v = (torch.full(shape, float("nan")).double() for _ in range(2))
    k[0], v[0] = 0, 0
    permutation = 1 + torch.randperm(5 * pages_each)
    table = torch.zeros(len(rows), pages_each, dtype=torch.int32)
    whole = {}
    for b, (request, begin, length) in enumerate(rows):
        if request == 0:
            continue
        table[b] = permutation[(request - 1) * pages_each : request * pages_each].int()
        keys = begin + length
        whole[b] = torch.randn(2, keys, g, D).double()
        lowest = max(0, begin - window + 1) if window else 0  # older keys are gone: left as NaN
        for p in range(lowest, keys):
            page, offset = int(table[b, p // page_size]), p % page_size
            k[page, offset], v[page, offset] = whole[b][0, p], whole[b][1, p]
    first_page = torch.zeros(len(rows), dtype=torch.int32)
    if window:  # drop whole pages below the window from the table
        first_page = ((start - (window - 1)).clamp(min=0) // page_size).int()
        table = torch.stack(
            [row.roll(-int(drop)) for row, drop in zip(table, first_page, strict=True)]
        )
    q = torch.randn(meta.num_tokens, h, D).double()
    r = torch.randn(meta.num_tokens, h, R).double()
    P = torch.randn(R, extent).double()
    kv = KVCacheView(
        k=k,
        v=v,
        page_size=page_size,
        page_table=table,
        first_page=first_page,
        slot=slot,
        window=window,
    )
    got = rel_attention(q, r, P, attention=config, meta=meta, kv=kv)
    assert got.isfinite().all(), "a padded row, a freed page or a key past the end was read"
    for b, keys in whole.items():
        part = slice(int(meta.cu_seqlens_q[b]), int(meta.cu_seqlens_q[b + 1]))
        want = loop(q[part], r[part], P, *keys, config, meta.positions[part])
        torch.testing.assert_close(got[part], want, rtol=1e-10, atol=1e-10)
