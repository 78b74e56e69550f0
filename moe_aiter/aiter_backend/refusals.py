"""Why aiter's kernels cannot be used for a model on a machine; None = they can."""

from __future__ import annotations

from kernel_base.arch import Arch
from moe_aiter.aiter_backend.features import Aiter

# Its bf16 grouped GEMM tiles the expert width by this, and raises at the first call otherwise.
WIDTH_MULTIPLE = 128
# Its composable-kernel GEMMs of 2026 form expert offsets in 32 bits; no release is known to be free
# of it.
MAX_WEIGHT_ELEMENTS = 2**31


def refuse_experts(
    arch: Arch,
    aiter: Aiter | str,
    *,
    hip: bool,
    dtype: str,
    experts: int,
    hidden: int,
    width: int,
) -> str | None:
    """Why `fused_moe` cannot run a rank's experts.

    Args: aiter: what `find_aiter` returned. hip: torch is a ROCm build. experts: of this rank,
        shared ones included. width: I of this rank.
    """
    if arch.vendor != "amd":
        return f"aiter needs an AMD GPU; this is {arch.name}"
    if not hip:
        return "aiter needs a ROCm build of torch"
    if isinstance(aiter, str):
        return aiter
    if dtype != "bfloat16":
        return f"aiter's unquantised experts are bf16; the model is {dtype}"
    if width % WIDTH_MULTIPLE:
        return f"expert width {width} on this rank is no multiple of {WIDTH_MULTIPLE}"
    if hidden % WIDTH_MULTIPLE:
        return f"hidden size {hidden} is no multiple of {WIDTH_MULTIPLE}"
    elements = experts * 2 * width * hidden
    if elements >= MAX_WEIGHT_ELEMENTS:
        return (
            f"{experts} experts of 2 x {width} x {hidden} are {elements} elements, beyond the 2^31 "
            "that aiter indexes; use more tensor or expert parallelism"
        )
    return None


def refuse_gate(arch: Arch, aiter: Aiter | str, *, hip: bool) -> str | None:
    """Why `biased_grouped_topk_hip` cannot be the gate."""
    if arch.vendor != "amd":
        return f"aiter needs an AMD GPU; this is {arch.name}"
    if not hip:
        return "aiter needs a ROCm build of torch"
    if isinstance(aiter, str):
        return aiter
    if not aiter.gate_with_sinks:
        return (
            f"aiter {aiter.version} is too old for a gate with shared experts (needs 2026-06-14; "
            "known by the linear_beta of fused_moe)"
        )
    return None
