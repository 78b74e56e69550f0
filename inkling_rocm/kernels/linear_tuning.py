"""Launch configurations of linear.

Facts: tokens, bits, depth (what is summed over). A layer's products are [1664 or 1408, 6144] and
[6144, 1024] on a rank of eight, [6656, 4096] and [4096, 4096] in the small model.
"""

from __future__ import annotations

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = "starting point: bytes in flight on every multiprocessor, registers; not timed"


def _row(arch, when, constexprs, options) -> TuningRow:
    return TuningRow(
        arch=arch,
        when=when,
        constexprs=constexprs,
        options=options,
        evidence="guess",
        source=_GUESS,
    )


def _vector_rows():
    for arch in ("gfx942", "gfx950", "sm80", "sm90", "sm100"):
        for bits, depth, n, k, warps in (
            (32, None, 4, 512, 4),
            (16, 512, 8, 512, 4),
            (16, 1024, 16, 1024, 8),
            (16, None, 8, 2048, 8),
        ):
            when = {"bits": bits, "depth": (None, depth)}
            yield _row(arch, when, {"BLOCK_N": n, "BLOCK_K": k}, {"num_warps": warps})


def _tile_rows():
    for arch in ("gfx942", "gfx950"):
        for tokens, tile, bits in (
            (16, (16, 32, 64), 32),
            (64, (64, 32, 32), 32),
            (16, (16, 16, 256), 16),
            (64, (64, 32, 64), 16),
        ):
            stages = 1 if bits == 32 and arch == "gfx950" else 2
            options = {"num_warps": 4, "num_stages": stages, "matrix_instr_nonkdim": 16}
            yield _tile_row(arch, tokens, bits, tile, options)
    for arch in ("sm80", "sm90", "sm100"):
        for tokens, tile, bits, stages in (
            (16, (16, 32, 64), 32, 3),
            (64, (64, 32, 32), 32, 3),
            (16, (16, 16, 256), 16, 4),
            (32, (32, 16, 256), 16, 4),
            (64, (64, 32, 128), 16, 3),
        ):
            yield _tile_row(arch, tokens, bits, tile, {"num_warps": 4, "num_stages": stages})


def _tile_row(arch, tokens, bits, tile, options) -> TuningRow:
    m, n, k = tile
    when = {"bits": bits, "tokens": (None, tokens)}
    return _row(arch, when, {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, options)


VECTOR = TuningTable("inkling_rocm.linear_vector", tuple(_vector_rows()))
TILES = TuningTable("inkling_rocm.linear_tiles", tuple(_tile_rows()))
