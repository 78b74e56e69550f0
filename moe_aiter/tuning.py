"""Launch configurations of the mixture-of-experts kernels, per architecture, with the evidence
behind each.

Facts a row may ask for: tokens, bits (of the activations), choices (T * K), rows (choices per
expert, rounded down), width (I of this rank), hidden, bulk (the Hopper variant can take the call).
"""

from kernel_base.tuning import TuningRow, TuningTable

_GUESS = (
    "starting point: tile sizes from the bytes in flight and registers a tile needs; not yet timed"
)
_H200 = "bench/results/moe_tuning_h200_2026-11-30.jsonl"
_CROSSOVERS = "bench/results/moe_crossovers_h200_2026-11-30.jsonl"
AMD = ("gfx942", "gfx950")
NVIDIA = ("sm80", "sm90", "sm100")


def _row(arch, when, constexprs, options, evidence="guess", source=_GUESS):
    return TuningRow(
        arch=arch,
        when=when,
        constexprs=constexprs,
        options=options,
        evidence=evidence,
        source=source,
    )


def _measured(when, constexprs, options):
    """A row found on an H200."""
    return _row("sm90", when, constexprs, options, "measured", _H200)


def _amd(num_warps, num_stages=2, **more):
    return {"num_warps": num_warps, "num_stages": num_stages, "matrix_instr_nonkdim": 16, **more}


def _fp32(arch):
    """fp32 is for tests: one stage needs no second LDS buffer."""
    return _amd(4, 1) if arch == "gfx950" else _amd(4)


def _nvidia(num_warps, num_stages, **more):
    return {"num_warps": num_warps, "num_stages": num_stages, **more}


def _gemm(block_m, block_n, block_k, group_m=1):
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": group_m}


def _swiglu_tokens():
    for arch in AMD:
        yield _row(arch, {"bits": 32, "tokens": (None, 16)}, _gemm(16, 32, 64), _fp32(arch))
        yield _row(arch, {"bits": 32}, _gemm(64, 32, 32, 8), _fp32(arch))
        yield _row(arch, {"tokens": (None, 16)}, _gemm(16, 32, 128), _amd(4))
        yield _row(arch, {"tokens": (None, 64)}, _gemm(64, 32, 64), _amd(4))
        yield _row(arch, {}, _gemm(128, 64, 64, 8), _amd(4))
    for arch in NVIDIA:
        stages = 3 if arch == "sm80" else 4
        yield _row(arch, {"bits": 32, "tokens": (None, 16)}, _gemm(16, 32, 32), _nvidia(4, 3))
        yield _row(arch, {"bits": 32}, _gemm(64, 32, 32, 8), _nvidia(4, 3))
        if arch == "sm90":
            yield _measured({"tokens": (None, 2)}, _gemm(16, 32, 256), _nvidia(4, 4))
            yield _measured({"tokens": (None, 16)}, _gemm(16, 32, 128), _nvidia(4, 3))
            yield _measured({"tokens": (None, 64)}, _gemm(16, 32, 256, 8), _nvidia(4, 3))
            yield _measured({"tokens": (None, 2048)}, _gemm(64, 64, 64, 8), _nvidia(4, 4))
            yield _measured({}, _gemm(128, 128, 64, 8), _nvidia(8, 3))
            continue
        yield _row(arch, {"tokens": (None, 2)}, _gemm(16, 16, 256), _nvidia(4, stages))
        yield _row(arch, {"tokens": (None, 16)}, _gemm(16, 32, 128), _nvidia(4, stages))
        yield _row(arch, {"tokens": (None, 64)}, _gemm(64, 32, 128), _nvidia(4, 3))
        # 128 columns of both products spill on sm80, whose accumulators share the registers.
        block_n = 64 if arch == "sm80" else 128
        yield _row(arch, {}, _gemm(128, block_n, 64, 8), _nvidia(8, 3))


def _down_tokens():
    for arch in AMD:
        yield _row(arch, {"bits": 32, "tokens": (None, 16)}, _gemm(16, 32, 64), _fp32(arch))
        yield _row(arch, {"bits": 32}, _gemm(64, 64, 32, 8), _fp32(arch))
        yield _row(arch, {"tokens": (None, 16)}, _gemm(16, 32, 128), _amd(4))
        yield _row(arch, {"tokens": (None, 64)}, _gemm(64, 32, 64), _amd(4))
        yield _row(arch, {}, _gemm(128, 128, 64, 8), _amd(8))
    for arch in NVIDIA:
        stages = 3 if arch == "sm80" else 4
        yield _row(arch, {"bits": 32, "tokens": (None, 16)}, _gemm(16, 32, 32), _nvidia(4, 3))
        yield _row(arch, {"bits": 32}, _gemm(64, 64, 32, 8), _nvidia(4, 3))
        if arch == "sm90":
            few = {**_gemm(16, 16, 128), "SHARED_FIRST": True}
            yield _measured({"tokens": (None, 16)}, few, _nvidia(2, 10, launch_pdl=True))
            yield _measured({"tokens": (None, 64)}, _gemm(64, 32, 128), _nvidia(4, 3))
            yield _measured({}, _gemm(128, 256, 64, 8), _nvidia(8, 3))
            continue
        yield _row(arch, {"tokens": (None, 16)}, _gemm(16, 32, 128), _nvidia(4, stages))
        yield _row(arch, {"tokens": (None, 64)}, _gemm(64, 32, 128), _nvidia(4, 3))
        yield _row(arch, {}, _gemm(128, 256, 64, 8), _nvidia(8, 3))


# The warp-specialised variant of hopper.py: a block of 256 rows is all that most experts have.
# At 48 rows an expert the Triton products were faster (960 us, 1018), at 60 these (1052 us, 1155).
_MANY_ROWS = {"rows": (49, None), "bits": 16, "bulk": True}


def _hopper(**more):
    return {"VARIANT": "hopper", "BLOCK_M": 256, "STAGES": 4, **more}


# BLOCK_M must agree between the two products for the same facts: one sort serves both.
def _swiglu_grouped():
    for arch in AMD:
        yield _row(arch, {"bits": 32}, _gemm(32, 32, 32, 4), _fp32(arch))
        yield _row(arch, {"rows": (None, 12)}, _gemm(16, 64, 64, 4), _amd(4))
        yield _row(arch, {"rows": (None, 48)}, _gemm(64, 64, 64, 4), _amd(4))
        yield _row(arch, {}, _gemm(128, 64, 64, 4), _amd(8))
    for arch in NVIDIA:
        yield _row(arch, {"bits": 32}, _gemm(32, 32, 32, 4), _nvidia(4, 3))
        if arch == "sm90":
            yield _measured({"rows": (None, 12)}, _gemm(16, 64, 128, 4), _nvidia(4, 3))
            yield _measured({"rows": (None, 24)}, _gemm(32, 64, 128, 4), _nvidia(4, 3))
            yield _measured({"rows": (None, 48)}, _gemm(64, 64, 128, 1), _nvidia(4, 4))
            yield _measured(_MANY_ROWS, _hopper(MIX=True), {})
            yield _measured({}, _gemm(128, 128, 64, 4), _nvidia(8, 3))
            continue
        yield _row(arch, {"rows": (None, 12)}, _gemm(16, 64, 128, 4), _nvidia(4, 3))
        yield _row(arch, {"rows": (None, 48)}, _gemm(64, 64, 128, 4), _nvidia(4, 3))
        block_n = 64 if arch == "sm80" else 128  # as in _swiglu_tokens
        yield _row(arch, {}, _gemm(128, block_n, 64, 4), _nvidia(8, 3))


def _down_grouped():
    for arch in AMD:
        yield _row(arch, {"bits": 32}, _gemm(32, 64, 32, 4), _fp32(arch))
        yield _row(arch, {"rows": (None, 12)}, _gemm(16, 128, 64, 4), _amd(4))
        yield _row(arch, {"rows": (None, 48)}, _gemm(64, 128, 64, 4), _amd(4))
        yield _row(arch, {}, _gemm(128, 128, 64, 4), _amd(8))
    for arch in NVIDIA:
        yield _row(arch, {"bits": 32}, _gemm(32, 64, 32, 4), _nvidia(4, 3))
        if arch == "sm90":
            yield _measured({"rows": (None, 12)}, _gemm(16, 128, 128, 4), _nvidia(4, 3))
            yield _measured({"rows": (None, 24)}, _gemm(32, 128, 128, 4), _nvidia(4, 2))
            yield _measured({"rows": (None, 48)}, _gemm(64, 128, 64, 4), _nvidia(4, 3))
            yield _measured(_MANY_ROWS, _hopper(MIX=False), {})
            yield _measured({}, _gemm(128, 256, 64, 4), _nvidia(8, 3))
            continue
        yield _row(arch, {"rows": (None, 12)}, _gemm(16, 128, 128, 4), _nvidia(4, 3))
        yield _row(arch, {"rows": (None, 48)}, _gemm(64, 128, 64, 4), _nvidia(4, 4))
        yield _row(arch, {}, _gemm(128, 256, 64, 4), _nvidia(8, 3))


# Few choices, whose row blocks are looked up. BLOCK_M must agree here too. On an H200 time goes in
# rounds of programs: half of the columns a program up to 85 tokens; above, four stages and two
# programs a multiprocessor (three of each: 1 % faster to 3 % slower at 96 to 170 tokens).
def _swiglu_lookup():
    for arch in (*AMD, *NVIDIA):
        few, k = (_amd(4), 64) if arch in AMD else (_nvidia(4, 3), 128)
        fp32 = _fp32(arch) if arch in AMD else _nvidia(4, 3)
        yield _row(arch, {"bits": 32}, _gemm(16, 32, 32), fp32)
        if arch == "sm90":
            yield _measured({"rows": (None, 1)}, _gemm(16, 32, 256, 4), _nvidia(4, 3))
            yield _measured({"rows": (None, 12)}, _gemm(16, 64, 128, 4), _nvidia(4, 4))
            yield _row(arch, {}, _gemm(32, 64, 128, 4), few)
            continue
        yield _row(arch, {"rows": (None, 12)}, _gemm(16, 64, k, 4), few)
        yield _row(arch, {}, _gemm(32, 64, k, 4), few)


def _down_lookup():
    """TAIL: programs behind the products add up, having waited for them: only where that has run.
    BLOCK_T, BLOCK_C: tokens and columns added up at a time. Row blocks come fastest: a tile's
    arrive together, and early tiles' sums run beside later tiles' products."""
    every = 1 << 20
    for arch in (*AMD, *NVIDIA):
        few, k = (_amd(4), 64) if arch in AMD else (_nvidia(4, 3), 128)
        fp32 = _fp32(arch) if arch in AMD else _nvidia(4, 3)
        if arch == "sm90":
            tail = {"TAIL": True, "BLOCK_T": 8, "BLOCK_C": 128}
            small = {**tail, "BLOCK_C": 64}
            yield _row(arch, {"bits": 32}, _gemm(16, 64, 32, every) | small, fp32)
            yield _measured({"rows": (None, 1)}, _gemm(16, 128, 128, every) | tail, few)
            yield _measured({"rows": (None, 12)}, _gemm(16, 128, 128, every) | tail, few)
            yield _row(arch, {}, _gemm(32, 128, 128, every) | tail, few)
            continue
        last = {"TAIL": False, "BLOCK_T": 16, "BLOCK_C": 64}
        yield _row(arch, {"bits": 32}, _gemm(16, 64, 32, every) | last, fp32)
        yield _row(arch, {"rows": (None, 12)}, _gemm(16, 128, k, every) | last, few)
        yield _row(arch, {}, _gemm(32, 128, k, every) | last, few)


def _router():
    def tile(m, n, k, slice_, **select):
        """LAST: tokens that the last program selects for at a time; BEHIND: tokens of a program
        that waits for the products; neither: a second launch."""
        return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SLICE": slice_, **select}

    for arch in AMD:
        yield _row(arch, {"tokens": (None, 4)}, tile(16, 32, 64, 512, LAST=4), _amd(4))
        yield _row(arch, {"tokens": (None, 16)}, tile(16, 32, 64, 512), _amd(4))
        yield _row(arch, {"tokens": (None, 512)}, tile(64, 32, 64, 1024), _amd(4))
        yield _row(arch, {}, tile(64, 64, 64, 8192), _amd(4))
    for arch in NVIDIA:
        few = tile(16, 32, 64, 512, BEHIND=8)
        yield _row(arch, {"bits": 32, "tokens": (None, 512)}, few, _nvidia(8, 3))
        yield _row(arch, {"bits": 32}, tile(16, 32, 64, 512), _nvidia(8, 3))
        if arch == "sm90":
            for tokens, sizes, warps, stages in (
                (16, (16, 16, 256, 512), 1, 3),
                (32, (16, 32, 256, 512), 1, 3),
                (64, (64, 32, 256, 512), 4, 3),
                (128, (64, 32, 128, 1024), 4, 5),
                (256, (64, 64, 128, 1024), 4, 5),
                (512, (128, 64, 64, 1024), 4, 6),
            ):
                yield _measured(
                    {"tokens": (None, tokens)}, tile(*sizes, BEHIND=warps), _nvidia(warps, stages)
                )
            # Slices such that 128 programs, or fewer, are one round of the multiprocessors.
            yield _measured({"tokens": (None, 2048), "bulk": True}, _hopper_router(768), {})
            yield _measured({"tokens": (None, 4096), "bulk": True}, _hopper_router(1536), {})
            yield _measured({"tokens": (None, 8192), "bulk": True}, _hopper_router(3072), {})
            yield _row(arch, {"bulk": True}, _hopper_router(6144), {})
            yield _measured({"tokens": (None, 1024)}, tile(64, 64, 64, 1024), _nvidia(4, 4))
            yield _measured({"tokens": (None, 8192)}, tile(128, 64, 64, 2048), _nvidia(8, 4))
            yield _measured({}, tile(128, 64, 64, 8192), _nvidia(8, 3))
            continue
        yield _row(arch, {"tokens": (None, 16)}, tile(16, 32, 128, 512, BEHIND=4), _nvidia(4, 4))
        yield _row(arch, {"tokens": (None, 512)}, tile(64, 32, 64, 1024, BEHIND=4), _nvidia(4, 4))
        yield _row(arch, {}, tile(128, 64, 64, 8192), _nvidia(8, 4))


def _hopper_router(slice_):
    return {"VARIANT": "hopper", "BLOCK_K": 64, "SLICE": slice_, "STAGES": 4}


def _each(constexprs, options):
    for arch in (*AMD, *NVIDIA):
        yield _row(arch, {}, constexprs, options)


SWIGLU_TOKENS = TuningTable("moe_aiter.swiglu_tokens", tuple(_swiglu_tokens()))
DOWN_TOKENS = TuningTable("moe_aiter.down_tokens", tuple(_down_tokens()))
SWIGLU_GROUPED = TuningTable("moe_aiter.swiglu_grouped", tuple(_swiglu_grouped()))
DOWN_GROUPED = TuningTable("moe_aiter.down_grouped", tuple(_down_grouped()))
SWIGLU_LOOKUP = TuningTable("moe_aiter.swiglu_lookup", tuple(_swiglu_lookup()))
DOWN_LOOKUP = TuningTable("moe_aiter.down_lookup", tuple(_down_lookup()))
ROUTER = TuningTable("moe_aiter.router", tuple(_router()))
SELECT = TuningTable(
    "moe_aiter.select",
    (
        _measured({}, {"BLOCK_T": 1}, {"num_warps": 1}),
        *(row for row in _each({"BLOCK_T": 4}, {"num_warps": 4}) if row.arch != "sm90"),
    ),
)
SORT = TuningTable(
    "moe_aiter.sort",
    tuple(
        _row(arch, when, {"LAUNCHES": launches, "BLOCK_P": block}, {"num_warps": warps})
        for arch in (*AMD, *NVIDIA)
        if arch != "sm90"
        for when, launches, block, warps in (
            ({"choices": (None, 1024)}, 1, 256, 4),
            ({"choices": (None, 8192)}, 1, 2048, 8),
            ({}, 3, *((128, 8) if arch in AMD else (64, 4))),  # what does not spill
        )
    )
    + tuple(
        _row(
            "sm90", when, {"LAUNCHES": launches, "BLOCK_P": block}, options, "measured", _CROSSOVERS
        )
        for when, launches, block, options in (
            ({"choices": (None, 384)}, 1, 256, {"num_warps": 4}),
            ({"choices": (None, 1024)}, 1, 1024, {"num_warps": 4}),
            ({"choices": (None, 2048)}, 1, 2048, {"num_warps": 8}),
            ({"choices": (None, 4096)}, 1, 4096, {"num_warps": 8}),
            ({"choices": (None, 16384)}, 2, 128, {"num_warps": 4, "launch_pdl": True}),
            ({}, 3, 64, {"num_warps": 2, "launch_pdl": True}),
        )
    ),
)
COMBINE = TuningTable(
    "moe_aiter.combine",
    (
        _row("sm90", {}, {"BLOCK_N": 2048}, _nvidia(4, 3, launch_pdl=True)),
        *(row for row in _each({"BLOCK_N": 2048}, {"num_warps": 4}) if row.arch != "sm90"),
    ),
)


# Which way the experts of a call run. BY_TOKEN_CHOICES: most T * K for rows that are tokens;
# LOOKUP_CHOICES: for programs that look their choices up; above, choices are sorted.
# The shared experts join the sorted launches up to FOLD_ROWS choices per expert, and again from
# FOLD_FROM (0 = never), where 256-row blocks serve them as well; between, they are their own dense
# block.
def _plan():
    def bounds(by_token, lookup, fold_rows, fold_from):
        return {
            "BY_TOKEN_CHOICES": by_token, "LOOKUP_CHOICES": lookup, "FOLD_ROWS": fold_rows,
            "FOLD_FROM": fold_from,
        }  # fmt: skip

    # Looking choices up saves two launches and their time, as far as one scan holds them all.
    yield _row("sm90", {"width": (320, None)}, bounds(48, 1024, 6, 49), {}, "measured", _CROSSOVERS)
    yield _row("sm90", {}, bounds(48, 1024, 9, 49), {}, "measured", _CROSSOVERS)
    yield from (row for row in _each(bounds(96, 1024, 12, 0), {}) if row.arch != "sm90")


PLAN = TuningTable("moe_aiter.plan", tuple(_plan()))
