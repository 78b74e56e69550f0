"""Launch configurations of the sampling kernels.

Facts: vocabulary. enable_fp_fusion is off in the scan, so that penalties round as the reference's.
"""

from __future__ import annotations

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = "starting point: bytes in flight a program, registers a tile; not timed on this GPU"
_MEASURED = "bench/results/sampling_tuning_h200_2026-11-30.jsonl"
AMD = ("gfx942", "gfx950")
NVIDIA = ("sm80", "sm90", "sm100")


def _rows(constexprs, options, *, amd=None, measured=False) -> tuple[TuningRow, ...]:
    """The same for every architecture but for `amd`: (constexprs, options)."""
    return tuple(
        TuningRow(
            arch=arch,
            constexprs=amd[0] if amd and arch in AMD else constexprs,
            options=amd[1] if amd and arch in AMD else options,
            evidence="measured" if measured and arch == "sm90" else "guess",
            source=_MEASURED if measured and arch == "sm90" else _GUESS,
        )
        for arch in AMD + NVIDIA
    )


SCAN = TuningTable(
    "inkling_rocm.sampling_scan",
    _rows({"SCAN_BLOCKS": 16}, {"num_warps": 4, "enable_fp_fusion": False}, measured=True),
)
BOUND = TuningTable(
    "inkling_rocm.sampling_bound", _rows({"CANDIDATES": 64}, {"num_warps": 4}, measured=True)
)
# One warp: sixteen sums over a tile need no shared memory then.
COUNT = TuningTable("inkling_rocm.sampling_count", _rows({}, {"num_warps": 1}, measured=True))
GATHER = TuningTable("inkling_rocm.sampling_gather", _rows({}, {"num_warps": 4}, measured=True))
# The tile is of rows that are read whole; it halves their time.
CUT = TuningTable(
    "inkling_rocm.sampling_cut",
    _rows({"TILE": 32}, {"num_warps": 16}, amd=({"TILE": 16}, {"num_warps": 8}), measured=True),
)
DRAW = TuningTable(
    "inkling_rocm.sampling_draw", _rows({"TILE": 32}, {"num_warps": 8}, measured=True)
)

# Verification of drafts. One warp owns a row's token counts, so the accept and settle kernels have
# no other choice.
MASS = TuningTable("inkling_rocm.verification_mass", _rows({"TOKENS": 2048}, {"num_warps": 4}))
ACCEPT = TuningTable("inkling_rocm.verification_accept", _rows({}, {"num_warps": 1}))
RESIDUAL = TuningTable("inkling_rocm.verification_residual", _rows({}, {"num_warps": 4}))
SETTLE = TuningTable("inkling_rocm.verification_settle", _rows({}, {"num_warps": 1}))
