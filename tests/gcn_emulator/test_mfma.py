"""Matrix instructions against element-by-element definitions of the register layouts."""

import numpy as np
import pytest
from harness import run

from gcn_emulator.formats import FP4, FP8

RNG = np.random.default_rng(3)


def k_of(lane_group, element, per_lane, k, f8_split):
    """k index held by an element of a lane group."""
    if f8_split:  # two runs of 16, half of K apart
        return (
            16 * lane_group + element if element < 16 else k // 2 + 16 * lane_group + element - 16
        )
    return lane_group * per_lane + element


def pack(matrix, m, k, blocks, bits, encode, f8_split=False):
    """matrix[block][row][k] -> registers, filled one element at a time."""
    groups = 64 // (m * blocks)
    per_lane = k // groups
    regs = np.zeros((per_lane * bits // 32, 64), np.uint32)
    for lane in range(64):
        block = lane // m if blocks > 1 else 0
        group = 0 if blocks > 1 else lane // m
        for e in range(per_lane):
            code = encode(matrix[block][lane % m][k_of(group, e, per_lane, k, f8_split)])
            regs[e * bits // 32, lane] |= np.uint32(int(code) << (e * bits % 32))
    return regs


def result_at(lane, register, m, blocks):
    """(block, row, column) of a destination register."""
    if m == 4:
        return lane // 4, register, lane % 4
    if m == 16:
        return register // 4, 4 * (lane // 16) + register % 4, lane % 16
    block, r = divmod(register, 16)
    return block, 8 * (r // 4) + 4 * (lane // 32) + r % 4, lane % 32


ENCODE = {
    "f32": (32, lambda x: np.float32(x).view(np.uint32)),
    "f16": (16, lambda x: np.float16(x).view(np.uint16)),
    "bf16": (16, lambda x: np.float32(x).view(np.uint32) >> 16),
    "i8": (8, lambda x: int(x) & 255),
}


def small(table):
    return 8 if len(table) == 256 else 4, lambda x: int(np.nonzero(table == np.float32(x))[0][0])


def values(kind, shape):
    if kind == "i8":
        return RNG.integers(-128, 128, shape)
    if kind == "fp4":
        return FP4[RNG.integers(0, 8, shape)]
    return RNG.integers(-8, 9, shape) / 2  # exact in every format


def check_case(
    name,
    m,
    k,
    blocks,
    ka,
    kb,
    enc_a,
    enc_b,
    arch,
    mods="",
    split=(False, False),
    extra="",
    scale=None,
    v_extra=None,
):
    a, b = values(ka, (blocks, m, k)), values(kb, (blocks, m, k))
    ra = pack(a, m, k, blocks, *enc_a, split[0])
    rb = pack(b, m, k, blocks, *enc_b, split[1])
    count = m * m * blocks // 64
    integer = "_i32_" in name
    c = RNG.integers(-5, 6, (count, 64))
    cbits = c.astype(np.int32 if integer else np.float32).view(np.uint32)
    v = {10 + i: r for i, r in enumerate(ra)} | {30 + i: r for i, r in enumerate(rb)}
    v |= {100 + i: r for i, r in enumerate(cbits)} | (v_extra or {})
    ops = f"v[10:{9 + len(ra)}], v[30:{29 + len(rb)}]"
    if len(ra) == 1:
        ops = ops.replace("v[10:10]", "v10")
    if len(rb) == 1:
        ops = ops.replace("v[30:30]", "v30")
    dst = f"v[60:{59 + count}]"
    sa, sb = scale or (np.ones((m, k)), np.ones((m, k)))
    for source, zero in ((f"v[100:{99 + count}]", False), ("0", True)):
        wave = run(f"{name} {dst}, {ops}, {source}{extra} {mods}", v=v, arch=arch, exec_=0x1)
        got = wave.vgprs[60 : 60 + count].view(np.int32 if integer else np.float32)
        for lane in range(64):
            for register in range(count):
                block, row, col = result_at(lane, register, m, blocks)
                terms = a[block][row] * sa[row] * b[block][col] * sb[col]
                want = float(sum(terms)) + (0 if zero else c[register][lane])
                slack = 1e-6 * float(sum(abs(terms))) if scale else 0.0
                assert abs(got[register][lane] - want) <= slack, (lane, register)


CASES = [
    ("v_mfma_f32_32x32x2_f32", 32, 2, 1, "f32"),
    ("v_mfma_f32_16x16x4_f32", 16, 4, 1, "f32"),
    ("v_mfma_f32_32x32x8_f16", 32, 8, 1, "f16"),
    ("v_mfma_f32_16x16x16_f16", 16, 16, 1, "f16"),
    ("v_mfma_f32_32x32x8_bf16", 32, 8, 1, "bf16"),
    ("v_mfma_f32_16x16x16_bf16", 16, 16, 1, "bf16"),
    ("v_mfma_f32_32x32x16_f16", 32, 16, 1, "f16"),
    ("v_mfma_f32_16x16x32_f16", 16, 32, 1, "f16"),
    ("v_mfma_f32_32x32x16_bf16", 32, 16, 1, "bf16"),
    ("v_mfma_f32_16x16x32_bf16", 16, 32, 1, "bf16"),
    ("v_mfma_i32_32x32x16_i8", 32, 16, 1, "i8"),
    ("v_mfma_i32_16x16x32_i8", 16, 32, 1, "i8"),
    ("v_mfma_i32_32x32x32_i8", 32, 32, 1, "i8"),
    ("v_mfma_i32_16x16x64_i8", 16, 64, 1, "i8"),
    ("v_mfma_f32_4x4x4_16b_f16", 4, 4, 16, "f16"),
    ("v_mfma_f32_4x4x4_16b_bf16", 4, 4, 16, "bf16"),
    ("v_mfma_f32_16x16x4_4b_f16", 16, 4, 4, "f16"),
    ("v_mfma_f32_32x32x4_2b_bf16", 32, 4, 2, "bf16"),
    ("v_mfma_f32_4x4x1_16b_f32", 4, 1, 16, "f32"),
]


@pytest.mark.parametrize(("name", "m", "k", "blocks", "kind"), CASES)
def test_mfma(name, m, k, blocks, kind):
    check_case(name, m, k, blocks, kind, kind, ENCODE[kind], ENCODE[kind], "gfx950")


@pytest.mark.parametrize(("arch", "suffix"), [("gfx942", "fnuz"), ("gfx950", "")])
@pytest.mark.parametrize("ta", ["fp8", "bf8"])
@pytest.mark.parametrize("tb", ["fp8", "bf8"])
@pytest.mark.parametrize(("m", "k"), [(32, 16), (16, 32)])
def test_mfma_fp8(arch, suffix, ta, tb, m, k):
    table = {"fp8": FP8["e4m3" + suffix], "bf8": FP8["e5m2" + suffix]}
    name = f"v_mfma_f32_{m}x{m}x{k}_{ta}_{tb}"
    check_case(name, m, k, 1, ta, tb, small(table[ta]), small(table[tb]), arch)


F8F6F4 = {0: "e4m3", 1: "e5m2", 4: "fp4"}


@pytest.mark.parametrize("fa", F8F6F4)
@pytest.mark.parametrize("fb", F8F6F4)
@pytest.mark.parametrize(("m", "k"), [(32, 64), (16, 128)])
@pytest.mark.parametrize("scaled", [False, True])
def test_mfma_f8f6f4(fa, fb, m, k, scaled):
    table = {x: FP4 if F8F6F4[x] == "fp4" else FP8[F8F6F4[x]] for x in F8F6F4}
    name = f"v_mfma_{'scale_' if scaled else ''}f32_{m}x{m}x{k}_f8f6f4"
    mods = f"cbsz:{fa} blgp:{fb}"
    extra, scale, v_extra = "", None, None
    if scaled:
        raw = RNG.integers(120, 134, (2, 64, 4))
        words = (raw << (8 * np.arange(4))).sum(-1).astype(np.uint32)
        byte_a, byte_b = 1, 2  # op_sel is the low bit, op_sel_hi the high bit
        mods = f"op_sel:[1,0,0] op_sel_hi:[0,1,0] {mods}"
        v_extra, extra = {8: words[0], 9: words[1]}, ", v8, v9"
        scale = tuple(np.zeros((m, k)) for _ in range(2))
        for lane in range(64):
            block = slice(32 * (lane // m), 32 * (lane // m) + 32)
            scale[0][lane % m, block] = 2.0 ** (raw[0, lane, byte_a] - 127)
            scale[1][lane % m, block] = 2.0 ** (raw[1, lane, byte_b] - 127)
    split = (fa != 4, fb != 4)
    check_case(
        name,
        m,
        k,
        1,
        F8F6F4[fa],
        F8F6F4[fb],
        small(table[fa]),
        small(table[fb]),
        "gfx950",
        mods,
        split,
        extra,
        scale,
        v_extra,
    )


def test_mfma_f64():
    a, b = RNG.standard_normal((16, 4)), RNG.standard_normal((4, 16))
    v = {}
    for lane in range(64):
        for base, x in ((10, a[lane % 16, lane // 16]), (12, b[lane // 16, lane % 16])):
            bits = int(np.float64(x).view(np.uint64))
            for half in (0, 1):
                v.setdefault(base + half, np.zeros(64, np.uint32))[lane] = (
                    bits >> 32 * half & 0xFFFFFFFF
                )
    wave = run("v_mfma_f64_16x16x4_f64 v[20:27], v[10:11], v[12:13], 0", v=v)
    want = a @ b
    for lane in range(64):
        for r in range(4):
            bits = int(wave.rows[20 + 2 * r][lane]) | int(wave.rows[21 + 2 * r][lane]) << 32
            got = np.uint64(bits).view(np.float64)
            assert got == pytest.approx(want[4 * r + lane // 16, lane % 16])


def test_agpr_operands():
    one = np.uint32(0x3C003C00)
    text = "v_mfma_f32_16x16x16_f16 a[0:3], a[8:9], v[4:5], a[0:3]"
    wave = run(
        text, v={256 + 8: one, 256 + 9: one, 4: one, 5: one, **{256 + i: 0 for i in range(4)}}
    )
    assert np.all(wave.vgprs[256:260].view(np.float32) == 16)
