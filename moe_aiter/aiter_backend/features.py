"""What the installed aiter offers, read from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

# Parameters of fused_moe in every release since 0.1.7. All are passed by keyword: their order and
# what else there is differs between releases.
COMMON_PARAMETERS = (
    "hidden_states", "w1", "w2", "topk_weight", "topk_ids", "expert_mask", "activation",
    "quant_type", "doweight_stage1", "w1_scale", "w2_scale", "a1_scale", "a2_scale",
    "block_size_M", "num_local_tokens", "moe_sorting_dispatch_policy", "dtype", "hidden_pad",
    "intermediate_pad", "bias1", "bias2",
)  # fmt: skip
GATE_PARAMETERS = (
    "gating_output", "correction_bias", "topk_weights", "topk_ids", "num_expert_group", "topk_grp",
    "need_renorm", "routed_scaling_factor",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Aiter:
    """An importable aiter.

    Attributes:
        version: as its package metadata says; "unknown" for a source checkout.
        fused_moe, gate: the functions. silu, no_quant: the enum members our calls pass.
        extra: parameters of fused_moe beyond the common ones.
        gate_with_sinks: biased_grouped_topk_hip takes expert counts that no power of two divides.
    """

    version: str
    fused_moe: Callable[..., Any]
    gate: Callable[..., Any]
    silu: Any
    no_quant: Any
    extra: frozenset[str]
    gate_with_sinks: bool


def parameters_of(function: Callable) -> tuple[str, ...]:
    """Parameter names, through aiter's wrappers."""
    return tuple(inspect.signature(function).parameters)


def missing_parameters(function: Callable, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `wanted` that the function does not take."""
    there = parameters_of(function)
    return tuple(name for name in wanted if name not in there)


def find_aiter() -> Aiter | str:
    """The installed aiter, or why there is none that these calls fit."""
    if find_spec("aiter") is None:
        return "aiter is not installed (pip install amd-aiter on a ROCm machine)"
    try:
        aiter, fused = import_module("aiter"), import_module("aiter.fused_moe")
        topk = import_module("aiter.ops.topk")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return f"aiter does not import: {type(error).__name__}: {error}"
    return describe(aiter, fused.fused_moe, topk.biased_grouped_topk_hip)


def describe(aiter: Any, fused_moe: Callable, gate: Callable) -> Aiter | str:
    """The features of these functions, or what they lack."""
    missing = missing_parameters(fused_moe, COMMON_PARAMETERS)
    if missing:
        return f"aiter's fused_moe lacks {', '.join(missing)}: a release these calls do not fit"
    extra = frozenset(parameters_of(fused_moe)) - set(COMMON_PARAMETERS)
    # The gate kernel was mended for such counts on 2026-06-14, which no interface shows; this
    # parameter came on 2026-07-28. Checkouts between the two are refused although they would do.
    recent = "linear_beta" in extra
    try:
        release = version("amd-aiter")
    except PackageNotFoundError:
        release = "unknown"
    return Aiter(
        version=release, fused_moe=fused_moe, gate=gate, silu=aiter.ActivationType.Silu,
        no_quant=aiter.QuantType.No, extra=extra,
        gate_with_sinks=recent and not missing_parameters(gate, GATE_PARAMETERS),
    )  # fmt: skip
