"""Launch configurations of the layer kernels, per architecture, with the evidence behind each.

Facts a row may ask for: tokens (T), rows (tokens times heads), channels, hidden, bits.
"""

from dataclasses import replace

from kernel_base.tuning import TuningRow, TuningTable

_MEASURED = "bench/results/layer_tuning_h200_2026-11-30.jsonl: the best sum over T, relative"
_GUESS = "starting point: 8 to 16 elements a lane, 16-byte accesses; not yet timed"
AMD = ("gfx942", "gfx950")
NVIDIA = ("sm80", "sm90", "sm100")


def _row(arch, when, constexprs, num_warps, measured=False, **options):
    measured = measured and arch == "sm90"
    return TuningRow(
        arch=arch,
        when=when,
        constexprs=constexprs,
        options={"num_warps": num_warps, **options},
        evidence="measured" if measured else "guess",
        source=_MEASURED if measured else _GUESS,
    )


def _prologue():
    # One warp where a program may overwrite the history it has read (conv.py): a warp's accesses
    # stay in order, several warps' do not.
    for arch in AMD:
        yield _row(arch, {"decode": True}, {"ROWS": 4}, 1)
        yield _row(arch, {"tokens": (None, 512)}, {"ROWS": 4}, 1)
        yield _row(arch, {}, {"ROWS": 16}, 4)
    for arch in NVIDIA:
        yield _row(arch, {"decode": True}, {"ROWS": 1}, 1, measured=True)
        yield _row(arch, {"tokens": (None, 512)}, {"ROWS": 2}, 1)
        yield _row(arch, {}, {"ROWS": 8}, 2, measured=True)


ATTENTION_PROLOGUE = TuningTable("inkling_rocm.attention_prologue", tuple(_prologue()))

# One warp: a program's reads of the ring come before its writes (conv.py).
RING_TAIL = TuningTable(
    "inkling_rocm.ring_tail",
    tuple(
        _row(arch, {}, {"BLOCK_C": 512 if arch in AMD else 128}, 1, measured=True)
        for arch in AMD + NVIDIA
    ),
)


def _residual():
    for arch in AMD:
        yield _row(arch, {"hidden": (None, 1024)}, {"TOKENS": 1, "KEEP": True}, 1)
        yield _row(arch, {"tokens": (None, 1024)}, {"TOKENS": 1, "KEEP": True}, 8)
        yield _row(arch, {}, {"TOKENS": 8, "KEEP": True}, 8)
    for arch in NVIDIA:
        yield _row(arch, {"hidden": (None, 1024)}, {"TOKENS": 1, "KEEP": True}, 2)
        yield _row(arch, {"tokens": (None, 1024)}, {"TOKENS": 1, "KEEP": False}, 32, measured=True)
        if arch == "sm90":
            # The bound makes the assembler use more registers than it takes without (112), and keep
            # more loads in flight: 133 us where 8 warps and 4 without it took 144 (T=8192).
            row = _row(arch, {}, {"TOKENS": 1, "KEEP": False}, 4, measured=True, maxnreg=128)
            yield replace(row, accepted_spills="16 to 40 bytes a thread; the fastest all the same")
        else:
            yield _row(arch, {}, {"TOKENS": 1, "KEEP": False}, 8)


RESIDUAL_CONV_NORM = TuningTable("inkling_rocm.residual_conv_norm", tuple(_residual()))


def _norm():
    for arch in AMD:
        yield _row(arch, {"hidden": (None, 1024)}, {}, 1)
        yield _row(arch, {}, {}, 8)
    for arch in NVIDIA:
        yield _row(arch, {"hidden": (None, 1024)}, {}, 2)
        yield _row(arch, {}, {}, 8, measured=True)


RMS_NORM = TuningTable("inkling_rocm.rms_norm", tuple(_norm()))
EMBED = TuningTable("inkling_rocm.embed", tuple(_norm()))
