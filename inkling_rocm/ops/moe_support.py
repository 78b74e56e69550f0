"""Whether moe_aiter's variants can run; imports Triton and aiter only once that can matter."""

from __future__ import annotations

from importlib.util import find_spec

from inkling_rocm.ops.registry import OpContext


def triton(context: OpContext) -> str | None:
    """Why the Triton kernels cannot run here."""
    if context.arch.vendor == "cpu":
        return "Triton kernels need a GPU"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


def aiter_experts(context: OpContext) -> str | None:
    """Why aiter cannot run the experts."""
    if reason := _no_aiter(context):
        return reason
    from inkling_rocm.ops.moe_vendor import supports_experts

    return supports_experts(context)


def aiter_gate(context: OpContext) -> str | None:
    """Why aiter cannot be the gate."""
    if reason := _no_aiter(context):
        return reason
    from inkling_rocm.ops.moe_vendor import supports_gate

    return supports_gate(context)


def _no_aiter(context: OpContext) -> str | None:
    if context.arch.vendor != "amd":
        return f"aiter needs an AMD GPU; this is {context.arch.name}"
    return triton(context)
