"""Launch configurations of linear.

Facts: tokens, bits, depth (what is summed over), columns. A layer's products are [1664 or 1408,
6144] and [6144, 1024] on a rank of eight, [6656, 4096] and [4096, 4096] in the small model.
Measured rows were the fastest there on an H200, of 16 for one token and of 30 to 350 for more, or
within a fiftieth of it.
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
            when = {"bits": bits, "tokens": (None, tokens), "depth": (None, depth)}
            yield _tile_row(arch, when, tile, {**options, "matrix_instr_nonkdim": 16})
    yield from _hopper_rows()
    for arch in ("sm80", "sm90", "sm100"):
        for bits, tokens, depth, tile, warps, stages in (
            (32, None, None, (16, 32, 64, 512), 4, 3),
            (16, 16, 1024, (16, 16, 128, WHOLE), 2, 4),
            (16, 16, None, (16, 32, 128, 1536), 4, 4),
            (16, 32, None, (32, 32, 128, 1536), 4, 4),
            (16, None, None, (64, 64, 64, 1536), 4, 6),
        ):
            if bits == 32 or arch != "sm90":
                when = {"bits": bits, "tokens": (None, tokens), "depth": (None, depth)}
                yield _tile_row(arch, when, tile, {"num_warps": warps, "num_stages": stages})


def _hopper_rows():
    """Columns as rows of the matrix instruction, of 64 weight rows; 100 to 200 KB in flight.
    Programs that add (TAIL) pay where there is much to add: at 128 tokens."""
    few = (None, 2048)  # columns that do not fill the GPU without slices
    for columns, block_k, stages in ((few, 64, 8), ((None, 4096), 128, 3)):
        when = {"bits": 16, "tokens": (None, 8), "depth": (1025, None), "columns": columns}
        sizes = {"PARTS": 4, "BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": block_k}
        yield _row("sm90", when, sizes, {"num_warps": 4, "num_stages": stages}, True)
    for tokens, columns, tile, stages, tail in (
        (16, few, (16, 64, 128, 1536), 6, 0),
        (32, few, (32, 64, 128, 1536), 6, 0),
        (64, few, (64, 64, 64, 1536), 8, 0),
        (128, (None, 1408), (128, 64, 64, 1024), 8, 32),
        (128, few, (128, 64, 64, 1280), 8, 32),
    ):
        when = {"bits": 16, "tokens": (None, tokens), "depth": (1025, None), "columns": columns}
        options = {"num_warps": 4, "num_stages": stages}
        yield _tile_row("sm90", when, tile, options, True, tail=tail, w_first=True)
    for tokens, block_k, stages in (
        (8, 128, 6),
        (16, 128, 6),
        (32, 128, 6),
        (64, 128, 6),
        (128, 64, 8),
    ):
        tile = (tokens, 64, block_k, WHOLE)
        when, options = (
            {"bits": 16, "tokens": (None, tokens)},
            {"num_warps": 4, "num_stages": stages},
        )
        yield _tile_row("sm90", when, tile, options, True, w_first=True)


def _tile_row(arch, when, tile, options, measured=False, *, tail=0, w_first=False) -> TuningRow:
    sizes = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "SLICE"), tile, strict=True))
    return _row(arch, when, sizes | {"TAIL": tail, "W_FIRST": w_first}, options, measured)


VECTOR = TuningTable("inkling_rocm.linear_vector", tuple(_vector_rows()))
TILES = TuningTable("inkling_rocm.linear_tiles", tuple(_tile_rows()))
