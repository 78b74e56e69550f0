"""Launch configurations of the attention kernels, per architecture, with the evidence behind each."""

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = "starting point: the shape of public Triton attention configurations"


def _prefill(arch, when, tile, options, evidence="guess", source=_GUESS):
    block_m, block_n, stages = tile
    constexprs = {"VARIANT": "triton", "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages}
    return TuningRow(
        arch=arch, when=when, constexprs=constexprs, options=options, evidence=evidence, source=source
    )


def _amd_prefill(arch):
    return (
        _prefill(arch, {"bits": 32}, (64, 32, 1), {"num_warps": 4, "matrix_instr_nonkdim": 16}),
        _prefill(arch, {"bits": 16, "head_dim": (129, None)}, (64, 32, 2), {"num_warps": 4, "matrix_instr_nonkdim": 16}),
        _prefill(arch, {"bits": 16, "head_dim": (None, 128)}, (128, 64, 2), {"num_warps": 4, "matrix_instr_nonkdim": 16}),
    )  # fmt: skip


def _nvidia_prefill(arch):
    return (
        _prefill(arch, {"bits": 32}, (64, 32, 2), {"num_warps": 8}),
        _prefill(arch, {"bits": 16, "head_dim": (129, None)}, (128, 32, 2), {"num_warps": 8}),
        _prefill(arch, {"bits": 16, "head_dim": (None, 128)}, (128, 64, 3), {"num_warps": 8}),
    )


PREFILL = TuningTable(
    "triton_attn.attention_prefill",
    (
        *_amd_prefill("gfx942"),
        *_amd_prefill("gfx950"),
        *_nvidia_prefill("sm80"),
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


PROFILE_WRITER = TuningTable(
    "triton_attn.write_profile_rows",
    tuple(
        row
        for arch in ("gfx942", "gfx950", "sm80", "sm90", "sm100")
        for row in (
            _writer(arch, 16, 64, 512, 128, 2, {"num_warps": 4}),
            _writer(arch, 32, 32, 256, 64, 1, {"num_warps": 4}),
        )
    ),
)


def _decode(arch, when, block_n, split, stages, options, evidence="guess", source=_GUESS):
    constexprs = {"BLOCK_N": block_n, "SPLIT": split, "STAGES": stages}
    return TuningRow(
        arch=arch, when=when, constexprs=constexprs, options=options, evidence=evidence, source=source
    )


def _decode_rows(arch, stages, options):
    many = {**options, "num_warps": 8}
    return (
        _decode(arch, {"bits": 32, "rows": (None, 32)}, 32, 256, 1, options),
        _decode(arch, {"bits": 32}, 16, 256, 1, many),
        _decode(arch, {"head_dim": (129, None)}, 32, 256, 2, options),
        _decode(arch, {"window": (1, None), "rows": (None, 32)}, 64, 128, stages, options),
        _decode(arch, {"window": (1, None)}, 64, 128, 2, many),
        _decode(arch, {"rows": (None, 32)}, 64, 256, stages, options),
        _decode(arch, {}, 64, 256, 2, many),
    )


DECODE = TuningTable(
    "triton_attn.attention_decode",
    (
        *_decode_rows("gfx942", 2, {"num_warps": 4, "matrix_instr_nonkdim": 16}),
        *_decode_rows("gfx950", 2, {"num_warps": 4, "matrix_instr_nonkdim": 16}),
        *_decode_rows("sm80", 3, {"num_warps": 4}),
        *_decode_rows("sm90", 3, {"num_warps": 4}),
        *_decode_rows("sm100", 3, {"num_warps": 4}),
    ),
)
