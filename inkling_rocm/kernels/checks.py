"""Argument checks shared by the launchers; host-side facts only, nothing reads device memory."""

from __future__ import annotations

from functools import partial

import torch

from inkling_rocm.host import BatchMeta, ConvStateView
from kernel_base import arch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


request_arch = partial(
    arch.request_arch, package="inkling_rocm.kernels", reference="the torch reference of the op"
)


def require(op: str, ok: bool, what: str, got, wanted) -> None:
    """Raise a ValueError that names the op, the argument, what was got and what was wanted."""
    if not ok:
        raise ValueError(f"{op}: {what} is {got}; wanted {wanted}")


def check_rows(op: str, name: str, x: torch.Tensor, width: int, like: torch.Tensor) -> None:
    """Rows of `width` in `like`'s dtype and number, of any pitch, last dimension contiguous."""
    wanted = (like.shape[0], width)
    require(op, tuple(x.shape) == wanted, f"{name}'s shape", tuple(x.shape), wanted)
    require(op, x.dtype in DTYPES, f"{name}'s dtype", x.dtype, " or ".join(map(str, DTYPES)))
    require(op, x.dtype == like.dtype, f"{name}'s dtype", x.dtype, like.dtype)
    require(op, x.stride(1) == 1 or width == 1, f"{name}'s last stride", x.stride(1), 1)


def check_vector(op: str, name: str, w: torch.Tensor, shape: tuple[int, ...], dtype) -> None:
    """A contiguous weight."""
    require(op, tuple(w.shape) == shape, f"{name}'s shape", tuple(w.shape), shape)
    require(op, w.dtype == dtype, f"{name}'s dtype", w.dtype, dtype)
    require(op, w.is_contiguous(), f"{name}'s strides", w.stride(), "contiguous")


def check_ring(
    op: str, name: str, ring: ConvStateView, channels: int, taps: int, dtype: torch.dtype
) -> None:
    """A ring of `channels` in the model dtype that holds the history of `taps` taps."""
    state = ring.state
    require(op, state.dtype == dtype, f"{name}.state's dtype", state.dtype, dtype)
    require(op, state.shape[2] == channels, f"{name}'s channels", state.shape[2], channels)
    rows = state.shape[1]
    require(op, rows >= max(taps - 1, 1), f"{name}'s rows", rows, f"at least {max(taps - 1, 1)}")
    require(op, state.is_contiguous(), f"{name}.state's strides", state.stride(), "contiguous")


def check_pages(
    op: str, name: str, pages: torch.Tensor, row: tuple[int, int], dtype: torch.dtype
) -> None:
    """Pages [pages, page_size, g, D] whose token rows have one pitch, so that a flat slot is an
    address."""
    require(op, tuple(pages.shape[2:]) == row, f"{name}'s heads", tuple(pages.shape[2:]), row)
    require(op, pages.dtype == dtype, f"{name}'s dtype", pages.dtype, dtype)
    flat = pages[0, 0].is_contiguous() and pages.stride(0) == pages.shape[1] * pages.stride(1)
    require(op, flat, f"{name}'s strides", pages.stride(), "contiguous token rows of one pitch")


def writes_in_place(meta: BatchMeta, ring_len: int, taps: int) -> bool:
    """Whether one launch may read histories and write the ring.

    Rows of up to R - (W-1) tokens never write a ring row that is history of the same forward. A
    row of one token may overwrite its oldest history, which only its own program reads, before it
    writes.
    """
    return meta.max_q <= 1 or meta.max_q + taps - 1 <= ring_len
