"""Small paged problems that prove a tuning row with its own tiles; used by the kernel register."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_base.tuning import TuningRow
from triton_attn.score_mod import RelativeBias, RelativeProfile


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """q, pages (NaN where no key was written), the shared arguments, and a relative bias or
    None."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    cu_seqlens_q: torch.Tensor
    q_start: torch.Tensor
    paged: dict
    bias: RelativeBias
    biased: bool
    max_q_len: int


def fact(row: TuningRow, name: str, default: int) -> int:
    """A value of this fact for which the row holds."""
    bound = row.when.get(name, default)
    if isinstance(bound, tuple):
        low, high = bound
        if low is not None and default < low:
            return {129: 192}.get(low, max(low, default))
        return default if high is None or default <= high else high
    return int(bound)


def make_case(
    q_lens,
    kv_lens,
    *,
    heads,
    kv_heads,
    head_dim,
    window,
    extent,
    dtype,
    device,
    biased=True,
    page_size=16,
) -> PagedCase:
    """Random tensors from a fixed seed, pages in reverse order."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    def i32(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [n - q for n, q in zip(kv_lens, q_lens, strict=True)]
    first = [max(s - window + 1, 0) // page_size if window else 0 for s in starts]
    counts = [-(-n // page_size) - f for n, f in zip(kv_lens, first, strict=True)]
    total = sum(counts) + 1
    k = torch.full((total, page_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    v = k.clone()
    table = torch.zeros(len(q_lens), max(*counts, 1), dtype=torch.int32, device=device)
    page = total
    for b, count in enumerate(counts):
        for p in range(count):
            page -= 1
            table[b, p] = page
            rows = min(page_size, kv_lens[b] - (first[b] + p) * page_size)
            k[page, :rows] = normal(rows, kv_heads, head_dim)
            v[page, :rows] = normal(rows, kv_heads, head_dim)
    T = sum(q_lens)
    bias = RelativeBias(
        r=normal(T, heads, 16),
        profile=RelativeProfile.prepare(normal(16, extent, scale=0.5)),
        tau=torch.linspace(0.5, 1.5, T).to(device),
    )
    return PagedCase(
        q=normal(T, heads, head_dim),
        k_pages=k,
        v_pages=v,
        cu_seqlens_q=i32([0, *torch.tensor(q_lens).cumsum(0).tolist()]),
        q_start=i32(starts),
        paged={
            "page_table": table,
            "first_page": i32(first),
            "kv_len": i32(kv_lens),
            "softmax_scale": 1 / head_dim,
            "window": window,
        },
        bias=bias,
        biased=biased,
        max_q_len=max(q_lens),
    )


def score_mod_of(case: PagedCase) -> RelativeBias | None:
    """The bias, if the case uses it."""
    return case.bias if case.biased else None
