"""Launch configurations of lm_head.

Facts: tokens, bits. Measured rows were the fastest of several tiles on an H200 at 200058 and 25128
vocabulary rows of 6144.
"""

from __future__ import annotations

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = "starting point: tile sizes from the bytes in flight and registers a tile needs; not timed"
_MEASURED = "bench/results/sampling_tuning_h200_2026-11-30.jsonl, op lm_head"


def _row(arch, when, tile, options, evidence="guess") -> TuningRow:
    m, n, k = tile
    return TuningRow(
        arch=arch,
        when=when,
        constexprs={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k},
        options=options,
        evidence=evidence,
        source=_MEASURED if evidence == "measured" else _GUESS,
    )


def _rows():
    for arch in ("gfx942", "gfx950"):
        for tokens, tile, bits, warps in (
            (16, (16, 32, 64), 32, 4),
            (64, (64, 32, 32), 32, 4),
            (16, (16, 64, 128), 16, 4),
            (64, (64, 64, 64), 16, 4),
        ):
            stages = 1 if bits == 32 and arch == "gfx950" else 2
            options = {"num_warps": warps, "num_stages": stages, "matrix_instr_nonkdim": 16}
            yield _row(arch, {"bits": bits, "tokens": (None, tokens)}, tile, options)
    for arch in ("sm80", "sm90", "sm100"):
        evidence = "measured" if arch == "sm90" else "guess"
        for tokens, tile, bits, warps, stages in (
            (16, (16, 32, 64), 32, 4, 3),
            (64, (64, 32, 32), 32, 4, 3),
            (16, (16, 64, 128), 16, 4, 4 if arch == "sm90" else 3),
            (32, (32, 128, 128), 16, 8, 3),
            (64, (64, 128, 64), 16, 4, 4),
        ):
            yield _row(
                arch, {"bits": bits, "tokens": (None, tokens)}, tile,
                {"num_warps": warps, "num_stages": stages},
                "guess" if bits == 32 else evidence,
            )  # fmt: skip


LM_HEAD = TuningTable("inkling_rocm.lm_head", tuple(_rows()))
