"""Attention problems of Inkling's shapes, as paged tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_attn import RelativeBias, RelativeProfile


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One batch: q, the pages, the arguments every entry point shares, and the bias."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    first_page: torch.Tensor
    cu_seqlens_q: torch.Tensor
    q_start: torch.Tensor
    kv_len: torch.Tensor
    window: int
    bias: RelativeBias
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def scale(self) -> float:
        return 1 / self.q.shape[2]

    @property
    def paged(self) -> dict:
        return {
            "page_table": self.page_table,
            "first_page": self.first_page,
            "kv_len": self.kv_len,
            "softmax_scale": self.scale,
            "window": self.window,
        }


def make_problem(
    *, q_lens, kv_lens, heads, kv_heads, window, extent, head_dim=128, page_size=128, d_rel=16,
    tau=False, seed=0,
    dtype=torch.bfloat16, device="cuda",
) -> Problem:  # fmt: skip
    """Random q, K, V, r, P; pages in random order, only those a window layer would still own."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape, scale=1.0):
        x = torch.randn(*shape, device=device, generator=generator, dtype=torch.float32) * scale
        return x.to(dtype)

    def i32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    T, B = sum(q_lens), len(q_lens)
    q_start = [n - q for n, q in zip(kv_lens, q_lens, strict=True)]
    first = [max(p - window + 1, 0) // page_size if window else 0 for p in q_start]
    owned = [-(-n // page_size) - f for n, f in zip(kv_lens, first, strict=True)]
    pages = sum(owned) + 1  # page 0 is the sink
    table = torch.zeros(B, max(owned), dtype=torch.int32, device=device)
    order = (torch.randperm(pages - 1, device=device, generator=generator) + 1).to(torch.int32)
    at = 0
    for b, count in enumerate(owned):
        table[b, :count] = order[at : at + count]
        at += count
    profile = RelativeProfile.prepare(normal(d_rel, extent, scale=0.3))
    return Problem(
        q=normal(T, heads, head_dim),
        k_pages=normal(pages, page_size, kv_heads, head_dim),
        v_pages=normal(pages, page_size, kv_heads, head_dim),
        page_table=table,
        first_page=i32(first),
        cu_seqlens_q=i32([0, *torch.tensor(q_lens).cumsum(0).tolist()]),
        q_start=i32(q_start),
        kv_len=i32(kv_lens),
        window=window,
        bias=RelativeBias(
            r=normal(T, heads, d_rel),
            profile=profile,
            tau=1 + torch.rand(T, device=device, generator=generator) if tau else None,
        ),
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
    )
