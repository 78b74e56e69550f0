"""Launch configurations of linear.

Facts: tokens, bits, depth (what is summed over). A layer's products are [1664 or 1408, 6144] and
[6144, 1024] on a rank of eight, [6656, 4096] and [4096, 4096] in the small model. Measured rows
were the fastest at the former on an H200, of 37 for one token and 44 for eight and sixteen, or
within a twentieth of it.
"""

from __future__ import annotations

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = "starting point: bytes in flight on every multiprocessor, registers; not timed"
_MEASURED = "bench/results/linear_tuning_h200_2026-11-30.jsonl"


def _row(arch, when, constexprs, options, measured=False) -> TuningRow:
    return TuningRow(
        arch=arch,
        when=when,
        constexprs=constexprs,
        options=options,
        evidence="measured" if measured else "guess",
        source=_MEASURED if measured else _GUESS,
    )


def _vector_rows():
    for arch in ("gfx942", "gfx950"):
        for bits, depth, n, k, warps in (
            (32, None, 4, 512, 4),
            (16, 512, 8, 512, 4),
            (16, 1024, 16, 1024, 8),
            (16, None, 8, 2048, 8),
        ):
            when = {"bits": bits, "depth": (None, depth)}
            yield _row(arch, when, {"BLOCK_N": n, "BLOCK_K": k}, {"num_warps": warps})
    for arch in ("sm80", "sm90", "sm100"):
        for bits, depth, n, k in ((32, None, 4, 512), (16, 1024, 4, 512), (16, None, 2, 2048)):
            when = {"bits": bits, "depth": (None, depth)}
            shape = {"BLOCK_N": n, "BLOCK_K": k}
            yield _row(arch, when, shape, {"num_warps": 4}, arch == "sm90" and bits == 16)


def _tile_rows():
    for arch in ("gfx942", "gfx950"):
        for tile, bits in (((16, 32, 64), 32), ((16, 16, 256), 16)):
            stages = 1 if bits == 32 and arch == "gfx950" else 2
            options = {"num_warps": 4, "num_stages": stages, "matrix_instr_nonkdim": 16}
            yield _tile_row(arch, bits, None, tile, options)
    for arch in ("sm80", "sm90", "sm100"):
        for bits, depth, tile, warps, stages in (
            (32, None, (16, 32, 64), 4, 3),
            (16, 1024, (16, 16, 128), 2, 4),
            (16, None, (16, 16, 512), 2, 4),
        ):
            options = {"num_warps": warps, "num_stages": stages}
            yield _tile_row(arch, bits, depth, tile, options, arch == "sm90" and bits == 16)


def _tile_row(arch, bits, depth, tile, options, measured=False) -> TuningRow:
    m, n, k = tile
    when = {"bits": bits, "depth": (None, depth)}
    return _row(arch, when, {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, options, measured)


VECTOR = TuningTable("inkling_rocm.linear_vector", tuple(_vector_rows()))
TILES = TuningTable("inkling_rocm.linear_tiles", tuple(_tile_rows()))
