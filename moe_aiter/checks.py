"""Argument checks shared by the launchers; host-side facts only, nothing here reads device
memory."""

from __future__ import annotations

from functools import partial

import torch

from kernel_base import arch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Kernels address rows of activations with 32-bit element offsets (weights and partials with 64-bit
# ones).
MAX_ELEMENTS = 2**31


request_arch = partial(arch.request_arch, package="moe_aiter", reference="moe_aiter.reference")


def require(op: str, ok: bool, what: str, got, wanted) -> None:
    """Raise a ValueError that names the op, the argument, what was got and what was wanted."""
    if not ok:
        raise ValueError(f"{op}: {what} is {got}; wanted {wanted}")


def check_rows(op: str, name: str, x: torch.Tensor, width: int | None = None) -> None:
    """A matrix of activations: [rows, width], unit last stride, a kernel dtype, 32-bit offsets."""
    require(op, x.dim() == 2, f"{name}'s shape", tuple(x.shape), "two dimensions")
    require(op, x.dtype in DTYPES, f"{name}'s dtype", x.dtype, " or ".join(map(str, DTYPES)))
    require(op, x.stride(1) == 1, f"{name}'s last stride", x.stride(1), 1)
    if width is not None:
        require(op, x.shape[1] == width, f"{name}'s width", x.shape[1], width)
    elements = x.shape[0] * x.stride(0)
    require(
        op, elements < MAX_ELEMENTS, f"{name}'s extent", elements, "below 2^31: split the batch"
    )


def check_weight(op: str, name: str, w: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor):
    """A contiguous weight of the given shape, in the dtype and on the device of the activations."""
    require(op, tuple(w.shape) == shape, f"{name}'s shape", tuple(w.shape), shape)
    require(op, w.dtype == like.dtype, f"{name}'s dtype", w.dtype, like.dtype)
    require(op, w.device == like.device, f"{name}'s device", w.device, like.device)
    require(op, w.is_contiguous(), f"{name}'s strides", w.stride(), "contiguous")
