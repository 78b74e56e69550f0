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

# A slice as long as any depth.
WHOLE = 1 << 20


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
        one = {"num_warps": 4, "num_stages": 1 if arch == "gfx950" else 2}
        two = {"num_warps": 4, "num_stages": 2}
        for bits, tokens, depth, tile, options in (
            (32, None, None, (16, 32, 64, 512), one),
            (16, 16, 1024, (16, 16, 256, WHOLE), two),
            (16, 16, None, (16, 32, 128, 1536), two),
            (16, None, None, (64, 64, 64, 1536), two),
        ):
            yield _tile_row(
                arch, bits, tokens, depth, tile, {**options, "matrix_instr_nonkdim": 16}
            )
    for arch in ("sm80", "sm90", "sm100"):
        for bits, tokens, depth, tile, warps, stages in (
            (32, None, None, (16, 32, 64, 512), 4, 3),
            (16, 16, 1024, (16, 16, 128, WHOLE), 2, 4),
            (16, 16, None, (16, 32, 128, 1536), 4, 4),
            (16, 32, None, (32, 32, 128, 1536), 4, 4),
            (16, None, None, (64, 64, 64, 1536), 4, 6),
        ):
            options = {"num_warps": warps, "num_stages": stages}
            measured = arch == "sm90" and bits == 16
            yield _tile_row(arch, bits, tokens, depth, tile, options, measured)


def _tile_row(arch, bits, tokens, depth, tile, options, measured=False) -> TuningRow:
    when = {"bits": bits, "tokens": (None, tokens), "depth": (None, depth)}
    sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "SLICE"), tile, strict=True))
    sizes |= {"TAIL": 0, "W_FIRST": False}
    return _row(arch, when, sizes, options, measured)


VECTOR = TuningTable("inkling_rocm.linear_vector", tuple(_vector_rows()))
TILES = TuningTable("inkling_rocm.linear_tiles", tuple(_tile_rows()))
