"""Whether moe_aiter's variants can run; imports Triton and aiter only once that can matter."""

from __future__ import annotations

from inkling_rocm.ops.registry import OpContext
from inkling_rocm.ops.triton_support import layer as triton


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
