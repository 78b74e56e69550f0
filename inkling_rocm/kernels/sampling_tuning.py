"""Launch configurations of the sampling kernels.

Facts: vocabulary. enable_fp_fusion is off in the scan, so that penalties round as the reference's.
"""

from __future__ import annotations

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = "starting point: bytes in flight a program, registers a tile; not timed on this GPU"
ARCHS = ("gfx942", "gfx950", "sm80", "sm90", "sm100")


def _rows(constexprs, options, amd_options=None) -> tuple[TuningRow, ...]:
    return tuple(
        TuningRow(
            arch=arch,
            constexprs=constexprs,
            options=amd_options if amd_options and arch.startswith("gfx") else options,
            evidence="guess",
            source=_GUESS,
        )
        for arch in ARCHS
    )


SCAN = TuningTable(
    "inkling_rocm.sampling_scan",
    _rows({"SCAN_BLOCKS": 16}, {"num_warps": 4, "enable_fp_fusion": False}),
)
BOUND = TuningTable("inkling_rocm.sampling_bound", _rows({"CANDIDATES": 64}, {"num_warps": 4}))
COUNT = TuningTable("inkling_rocm.sampling_count", _rows({}, {"num_warps": 4}))
GATHER = TuningTable("inkling_rocm.sampling_gather", _rows({}, {"num_warps": 4}))
CUT = TuningTable(
    "inkling_rocm.sampling_cut", _rows({"TILE": 16}, {"num_warps": 16}, {"num_warps": 8})
)
DRAW = TuningTable("inkling_rocm.sampling_draw", _rows({"TILE": 32}, {"num_warps": 8}))

# Verification of drafts. One warp owns a row's token counts, so the accept and settle kernels have
# no other choice.
MASS = TuningTable("inkling_rocm.verification_mass", _rows({"TOKENS": 2048}, {"num_warps": 4}))
ACCEPT = TuningTable("inkling_rocm.verification_accept", _rows({}, {"num_warps": 1}))
RESIDUAL = TuningTable("inkling_rocm.verification_residual", _rows({}, {"num_warps": 4}))
SETTLE = TuningTable("inkling_rocm.verification_settle", _rows({}, {"num_warps": 1}))
