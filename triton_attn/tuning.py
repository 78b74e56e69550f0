"""Launch configurations of the attention kernels, per architecture, with the evidence behind
each."""

from functools import partial

from kernel_base.tuning import TuningRow, TuningTable

# Where the measured rows come from: every configuration tried is a line of this file.
_TUNED = "bench/results/attention_tuning_h200_2026-11-30.jsonl"
_TUNED_EMULATED = "bench/results/attention_tuning_emulated_2026-11-30.jsonl"
_GUESS = "starting point: the shape of public Triton attention configurations"


def _prefill(arch, when, tile, options, evidence="guess", source=_GUESS, variant="triton"):
    block_m, block_n, stages = tile
    constexprs = {"VARIANT": variant, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages}
    return TuningRow(
        arch=arch,
        when=when,
        constexprs=constexprs,
        options=options,
        evidence=evidence,
        source=source,
    )


def _amd_prefill(arch, wide, long):
    """`wide` and `long`: (BLOCK_M, BLOCK_N, warps, matrix shape) for head_dim above 128 and for
    global layers.

    One stage: with two, the tiles in LDS cost several times the bank cycles on gfx942, and half the
    waves a SIMD on both.
    """

    def amd_row(when, block_m, block_n, warps, shape):
        options = {"num_warps": warps, "matrix_instr_nonkdim": shape}
        return _prefill(arch, when, (block_m, block_n, 1), options, "emulated", _TUNED_EMULATED)

    return (
        amd_row({"bits": 32}, 64, 16, 4, 16),
        amd_row({"bits": 16, "head_dim": (129, None)}, *wide),
        amd_row({"bits": 16, "head_dim": (None, 128), "window": (1, None)}, 64, 64, 4, 16),
        amd_row({"bits": 16, "head_dim": (None, 128)}, *long),
    )


def _nvidia_prefill(arch):
    return (
        _prefill(arch, {"bits": 32}, (64, 32, 2), {"num_warps": 8}),
        _prefill(arch, {"bits": 16, "head_dim": (129, None)}, (128, 32, 2), {"num_warps": 8}),
        _prefill(arch, {"bits": 16, "head_dim": (None, 128)}, (128, 64, 3), {"num_warps": 8}),
    )


# The warp-specialised variant: no score mod (0) or the relative bias (2), 16-bit inputs, head_dim
# 64 or 128.
_HOPPER_PREFILL = tuple(
    _prefill(
        "sm90",
        {"bits": 16, "head_dim": head_dim, "mod": mod},
        # The bias tiles take the shared memory of a stage.
        (128, 64, 3 if mod == 2 else 4),
        # The rows' writer is always the launch before: the attention may start under its end.
        {"num_warps": 4, **({"launch_pdl": True} if mod == 2 else {})},
        evidence,
        _TUNED,
        "hopper",
    )
    for head_dim, evidence in ((128, "measured"), (64, "guess"))
    for mod in (0, 2)
)

PREFILL = TuningTable(
    "triton_attn.attention_prefill",
    (
        *_amd_prefill("gfx942", wide=(128, 32, 8, 16), long=(128, 64, 8, 16)),
        *_amd_prefill("gfx950", wide=(64, 16, 4, 16), long=(128, 32, 4, 32)),
        *_nvidia_prefill("sm80"),
        *_HOPPER_PREFILL,
        *_nvidia_prefill("sm90"),
        *_nvidia_prefill("sm100"),
    ),
)


def _writer(arch, bits, rows, columns, block_c, stages, options, evidence="guess", source=_GUESS):
    constexprs = {"ROWS": rows, "COLUMNS": columns, "BLOCK_C": block_c, "STAGES": stages}
    return TuningRow(
        arch=arch,
        when={"bits": bits},
        constexprs=constexprs,
        options=options,
        evidence=evidence,
        source=source,
    )


_AMD_WRITER = (16, 576, 64, 1, {"num_warps": 2})
_NVIDIA_WRITER = (32, 192, 64, 3, {"num_warps": 4})

PROFILE_WRITER = TuningTable(
    "triton_attn.write_profile_rows",
    tuple(
        row
        for arch, tile, evidence in (
            ("gfx942", _AMD_WRITER, ("emulated", _TUNED_EMULATED)),
            ("gfx950", _AMD_WRITER, ("emulated", _TUNED_EMULATED)),
            ("sm80", _NVIDIA_WRITER, ("guess", "sm90's row")),
            ("sm90", _NVIDIA_WRITER, ("measured", _TUNED)),
            ("sm100", _NVIDIA_WRITER, ("guess", "sm90's row")),
        )
        for row in (
            _writer(arch, 16, *tile, *evidence),
            _writer(arch, 32, 32, 256, 64, 1, {"num_warps": 4}),
        )
    ),
)


def tile_rows(arch: str, window: int, head_dim: int) -> int:
    """Query rows of a decode or verify tile: more tokens of a request are more programs, which read
    the same keys at the same time. Never less than the heads of one token."""
    if window:
        return 16
    return 64 if arch == "sm90" and head_dim <= 128 else 32


def _decode(
    arch, when, block_n, split, stages, options, evidence="guess", source=_GUESS, units=4,
    merge=(True, 2), alone=None, fill=None, merge_warps=None,
):  # fmt: skip
    """`split` keys are a unit, `units` units a group; `merge`: whether the last program merges (or
    a second launch, which sm90 may start under the first one's end, of `merge_warps` warps a row),
    groups in flight; `alone`:
    stages of programs that take one unit (default: as those that take a group); `fill`: programs
    per 100 compute units from which on they take groups (default: decode.FILL)."""
    constexprs = {
        "BLOCK_N": block_n,
        "SPLIT": split,
        "UNITS": units,
        "STAGES": stages,
        "MERGE_HERE": merge[0],
        "MERGE": merge[1],
        "PDL": arch == "sm90" and not merge[0],
        **({"ALONE": alone} if alone else {}),
        **({"FILL": fill} if fill else {}),
        **({"MERGE_WARPS": merge_warps} if merge_warps else {}),
    }
    return TuningRow(
        arch=arch,
        when=when,
        constexprs=constexprs,
        options=options,
        evidence=evidence,
        source=source,
    )


def _amd_decode(arch, options):
    many = {**options, "num_warps": 8}
    return (
        _decode(arch, {"bits": 32, "rows": (None, 32)}, 32, 128, 1, options),
        # Registers hold neither a second accumulator nor several partial results (twice below).
        _decode(arch, {"bits": 32}, 16, 256, 1, many, units=1, merge=(True, 1)),
        _decode(arch, {"head_dim": (129, None), "rows": (None, 32)}, 32, 128, 2, options),
        _decode(arch, {"head_dim": (129, None)}, 16, 256, 1, many, units=1, merge=(True, 1)),
        _decode(arch, {"window": (1, None), "rows": (None, 32)}, 64, 128, 2, options),
        _decode(arch, {"window": (1, None)}, 32, 128, 2, many, merge=(True, 1)),
        _decode(arch, {"rows": (None, 32)}, 64, 256, 2, options),
        _decode(arch, {}, 32, 256, 2, many, merge=(True, 1)),
    )


def _nvidia_decode(arch, evidence, source):
    few, many = {"num_warps": 4}, {"num_warps": 8}
    merge = (True, 2)
    rows: tuple[TuningRow, ...] = (
        _decode(arch, {"window": (1, None)}, 64, 64, 5, few, units=8, merge=(True, 1)),
        _decode(arch, {"rows": (None, 32)}, 64, 256, 5, few, merge=merge),
        _decode(arch, {}, 32, 256, 5, few, merge=merge),
    )
    if arch == "sm90":
        merge = (False, 8)
        row = partial(_decode, arch, evidence=evidence, source=source)
        # Four programs a processor: with fewer, those of 32 requests would take turns.
        lean = {**few, "maxnreg": 128}
        window, small = {"window": (1, None)}, {"window": (1, None), "rows": (None, 16)}
        whole = {"units": 10, "alone": 1, "fill": 150, "merge": (True, 1)}
        rows = (
            # Many K/V heads: a group is a whole window, and groups alone fill the GPU.
            row({**small, "kv_heads": (8, None)}, 64, 64, 3, lean, **whole),
            row(small, 64, 64, 2, lean, units=2, alone=1, merge=merge, merge_warps=1),
            row(window, 128, 128, 3, few, units=8, merge=(True, 1), alone=1, fill=70),
            row({"rows": (None, 32)}, 64, 256, 5, few, alone=4, merge=(False, 16), merge_warps=2),
            row({}, 32, 256, 5, few, merge=merge),
        )
    return (
        _decode(arch, {"bits": 32, "rows": (None, 32)}, 32, 128, 2, few, merge=merge),
        _decode(arch, {"bits": 32}, 16, 128, 2, many, merge=merge),
        _decode(arch, {"head_dim": (129, None)}, 32, 128, 3, few, merge=merge),
        *rows,
    )


def _hopper_verify(when, constexprs):
    """Verification over warp groups: hopper_verify.py, hopper_window.py."""
    return TuningRow(
        arch="sm90",
        when={"bits": 16, "tokens": (2, None), "warp_groups": True, **when},
        constexprs={"VARIANT": "hopper", "BLOCK_N": 64, "STAGES": 3, "P_STAGES": 2, **constexprs},
        options={"num_warps": 4},
        evidence="measured",
        source=_TUNED,
    )


_HOPPER_VERIFY = (
    # More rows than a tile of 32: one partial result a unit.
    _hopper_verify(
        {"window": 0, "packed": (33, None)},
        {"SPLIT": 512, "MERGE": 8, "MERGE_WARPS": 1, "PDL": True},
    ),
    # Fewer tokens fit the 16 rows of an ordinary tile.
    _hopper_verify({"window": (1, None), "tokens": (5, None)}, {}),
)

DECODE = TuningTable(
    "triton_attn.attention_decode",
    (
        *_HOPPER_VERIFY,
        *_amd_decode("gfx942", {"num_warps": 4, "matrix_instr_nonkdim": 16}),
        *_amd_decode("gfx950", {"num_warps": 4, "matrix_instr_nonkdim": 16}),
        *_nvidia_decode("sm80", "guess", _GUESS),
        *_nvidia_decode("sm90", "measured", _TUNED),
        *_nvidia_decode("sm100", "guess", _GUESS),
    ),
)
