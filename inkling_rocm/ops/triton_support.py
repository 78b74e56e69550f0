"""Whether the Triton variants of the layer's ops can run; imports Triton only once that can
matter."""

from __future__ import annotations

from importlib.util import find_spec

from inkling_rocm.ops.registry import OpContext


def layer(context: OpContext) -> str | None:
    """Why the kernels of inkling_rocm.kernels cannot run here."""
    if context.arch.vendor == "cpu":
        return "Triton kernels need a GPU"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def attention(context: OpContext) -> str | None:
    """Why triton_attn cannot run this model's attention here."""
    if reason := layer(context):
        return reason
    from triton_attn.checks import MAX_HEAD_DIM, head_dim_fits

    text = context.config.text
    for kind in (text.local_attention, text.global_attention):
        if not head_dim_fits(kind.head_dim):
            return f"head_dim {kind.head_dim}: wanted a multiple of 8, at most {MAX_HEAD_DIM}"
    return None
