"""Argument checks shared by the launchers; host-side facts only, nothing here reads device
memory."""

from __future__ import annotations

from functools import partial

import torch
import triton

from kernel_base import arch
from triton_attn.score_mod import RelativeBias, ScoreMod

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256


def head_dim_fits(head_dim: int) -> bool:
    """Whether the kernels take it: 16-byte rows in 16 bits, and a tile that registers hold."""
    return head_dim % 8 == 0 and 8 <= head_dim <= MAX_HEAD_DIM


def padded_head_dim(head_dim: int) -> int:
    """Columns of the kernels' tiles: a power of two, and at least a matrix instruction's 16."""
    return max(16, triton.next_power_of_2(head_dim))


request_arch = partial(arch.request_arch, package="triton_attn", reference="triton_attn.reference")


def check_paged(
    name, q, k_pages, v_pages, page_table, first_page, kv_len, window, score_mod, out
) -> None:
    """Raise ValueError naming the argument that does not fit the others."""

    def require(ok: bool, what: str, got, wanted) -> None:
        if not ok:
            raise ValueError(f"{name}: {what} is {got}; wanted {wanted}")

    T, h, D = q.shape
    require(q.dtype in DTYPES, "q's dtype", q.dtype, " or ".join(map(str, DTYPES)))
    require(head_dim_fits(D), "head_dim", D, f"a multiple of 8, at most {MAX_HEAD_DIM}")
    require(q.stride(2) == 1, "q's last stride", q.stride(2), "1 (make the head dim contiguous)")
    for what, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        require(
            pages.dim() == 4 and pages.shape[3] == D,
            f"{what}'s shape",
            tuple(pages.shape),
            f"[pages, page_size, g, {D}]",
        )
        require(pages.dtype == q.dtype, f"{what}'s dtype", pages.dtype, q.dtype)
        require(pages.stride(3) == 1, f"{what}'s last stride", pages.stride(3), 1)
    require(
        k_pages.shape == v_pages.shape, "v_pages' shape", tuple(v_pages.shape), tuple(k_pages.shape)
    )
    g, page_size = k_pages.shape[2], k_pages.shape[1]
    require(h % g == 0, "query heads", h, f"a multiple of the {g} K/V heads")
    require(page_size & (page_size - 1) == 0, "page_size", page_size, "a power of two")
    B = kv_len.shape[0]
    require(
        page_table.dim() == 2 and page_table.shape[0] == B,
        "page_table's shape",
        tuple(page_table.shape),
        f"[{B}, P]",
    )
    require(
        page_table.stride(1) == 1 or page_table.shape[1] <= 1,
        "page_table's last stride",
        page_table.stride(1),
        1,
    )
    require(first_page.shape == (B,), "first_page's shape", tuple(first_page.shape), (B,))
    for what, tensor in (
        ("page_table", page_table),
        ("first_page", first_page),
        ("kv_len", kv_len),
    ):
        require(tensor.dtype == torch.int32, f"{what}'s dtype", tensor.dtype, torch.int32)
    require(
        window >= 0,
        "window",
        window,
        "0 (none) or the number of visible keys, current one included",
    )
    require(
        out.shape == q.shape and out.dtype == q.dtype,
        "out",
        (tuple(out.shape), out.dtype),
        (tuple(q.shape), q.dtype),
    )
    require(out.stride(2) == 1, "out's last stride", out.stride(2), 1)
    if isinstance(score_mod, RelativeBias):
        r, profile, tau = score_mod.r, score_mod.profile, score_mod.tau
        d_rel = profile.projection.shape[0]
        require(r.shape == (T, h, d_rel), "score_mod.r's shape", tuple(r.shape), (T, h, d_rel))
        require(r.stride(2) == 1, "score_mod.r's last stride", r.stride(2), 1)
        require(
            r.dtype == q.dtype and profile.table.dtype == q.dtype,
            "dtypes of score_mod.r and P",
            (r.dtype, profile.table.dtype),
            q.dtype,
        )
        if tau is not None:
            require(
                tau.shape == (T,) and tau.dtype == torch.float32,
                "score_mod.tau",
                (tuple(tau.shape), tau.dtype),
                ((T,), torch.float32),
            )
    elif score_mod is not None:
        require(
            isinstance(score_mod, ScoreMod),
            "score_mod",
            type(score_mod).__name__,
            "None, ScoreMod or RelativeBias",
        )
