"""SDWA, DPP and comparisons."""

import numpy as np
import pytest
from harness import (
    FULL,
    M32,
    b16,
    b32,
    exec_bits,
    f16,
    f32,
    floats,
    halves,
    ints,
    run,
    same_float,
    signed,
)
from test_vector_integer import INTEGER
from vector_reference import L16, check, fmin, guarded, lanes

COMPARISONS = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: a < b or a > b,
    "o": lambda a, b: a == a and b == b,
    "u": lambda a, b: a != a or b != b,
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}


KINDS = {
    "f32": (floats, f32),
    "f16": (halves, f16),
    "u32": (ints, lambda x: x),
    "i32": (ints, signed),
    "u16": (ints, lambda x: x & L16),
    "i16": (ints, lambda x: signed(x, 16)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exec_", [FULL, 0x0F0F00FFFF12345A])
def test_compare(kind, exec_):
    make, read = KINDS[kind]
    a, b = make(1), make(2).copy()
    b[::3] = a[::3]
    integer_names = ("lt", "eq", "le", "gt", "ge", "ne")
    names = integer_names if kind[0] in "ui" else [n for n in COMPARISONS if n != "ne"]
    for name in names:
        fn = COMPARISONS[name]
        bits = sum(
            fn(read(x), read(y)) << i
            for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
        )
        wave = run(f"v_cmp_{name}_{kind}_e32 vcc, v1, v2", v={1: a, 2: b}, exec_=exec_)
        assert wave.read_sgpr64(106) == bits & exec_, name
        wave = run(f"v_cmp_{name}_{kind}_e64 s[4:5], v1, v2", v={1: a, 2: b}, exec_=exec_)
        assert wave.read_sgpr64(4) == bits & exec_
        assert exec_bits(wave) == exec_
        wave = run(f"v_cmpx_{name}_{kind}_e64 s[4:5], v1, v2", v={1: a, 2: b}, exec_=exec_)
        assert wave.read_sgpr64(4) == exec_bits(wave) == bits & exec_
    if kind in ("i32", "u32"):  # 64-bit comparisons on register pairs, scalars and constants
        for name in integer_names:
            pairs = [(x << 32 | y, y << 32 | x) for x, y in zip(lanes(a), lanes(b), strict=False)]
            read64 = (lambda v: signed(v, 64)) if kind == "i32" else (lambda v: v)
            bits = sum(
                COMPARISONS[name](read64(p), read64(q)) << i for i, (p, q) in enumerate(pairs)
            )
            text = f"v_cmp_{name}_{kind[0]}64_e32 vcc, v[1:2], v[3:4]"
            wave = run(text, v={1: b, 2: a, 3: a, 4: b}, exec_=exec_)
            assert wave.read_sgpr64(106) == bits & exec_
            text = text.replace("_e32 vcc", "_e64 s[6:7]")
            wave = run(text, v={1: b, 2: a, 3: a, 4: b}, exec_=exec_)
            assert wave.read_sgpr64(6) == bits & exec_
        wave = run("v_cmp_gt_i64_e64 s[0:1], -1, v[1:2]", v={1: b, 2: a})
        assert wave.read_sgpr64(0) == sum(
            (signed(x << 32 | y, 64) < -1) << i
            for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
        )
        wave = run("v_cmp_lt_i64_e64 s[0:1], s[2:3], 8", s={2: M32, 3: M32})
        assert wave.read_sgpr64(0) == FULL


def test_compare_modifiers_and_sdwa():
    a, b = floats(1), floats(2)
    wave = run("v_cmp_nlt_f32_e64 s[0:1], |v1|, -v2", v={1: a, 2: b})
    want = sum(
        (not abs(f32(x)) < -f32(y)) << i
        for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
    )
    assert wave.read_sgpr64(0) == want
    x = ints(4)
    x[::5] = (x[::5] & np.uint32(0x00FFFFFF)) | np.uint32(0x12000000)
    for sel, shift in (("BYTE_0", 0), ("BYTE_1", 8), ("BYTE_3", 24)):
        text = f"v_cmp_eq_u16_sdwa vcc, v1, s4 src0_sel:{sel} src1_sel:DWORD"
        wave = run(text, v={1: x}, s={4: 0x12})
        assert wave.read_sgpr64(106) == sum(
            (v >> shift & 255 == 0x12) << i for i, v in enumerate(lanes(x))
        )
    want = {0x1: 0, 0x3: 1, 0x4: 2}  # signalling NaN, quiet NaN ... see the class bits below
    classes = [
        0x7F800001,
        0x7FC00000,
        0xFF800000,
        0xBF800000,
        0x80000001,
        0x80000000,
        0,
        1,
        0x3F800000,
        0x7F800000,
    ]
    row = np.zeros(64, np.uint32)
    row[:10] = classes
    for bit in range(10):
        wave = run("v_cmp_class_f32_e64 vcc, v0, s2", v={0: row}, s={2: 1 << bit})
        assert wave.read_sgpr64(106) & 0x3FF == 1 << bit
    assert want


SELECT = {
    "DWORD": (0, M32),
    "WORD_0": (0, L16),
    "WORD_1": (16, L16),
    **{f"BYTE_{i}": (8 * i, 255) for i in range(4)},
}


@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
@pytest.mark.parametrize("dst", SELECT)
def test_sdwa(dst, unused):
    a, b, old = ints(1), ints(2), ints(3)
    for s0, (h0, m0) in SELECT.items():
        for s1 in ("DWORD", "BYTE_3", "WORD_1"):
            h1, m1 = SELECT[s1]
            text = (
                f"v_add_u32_sdwa v0, v1, v2 dst_sel:{dst} dst_unused:{unused} "
                f"src0_sel:{s0} src1_sel:{s1}"
            )
            want = []
            for x, y, o in zip(lanes(a), lanes(b), lanes(old), strict=False):
                total = ((x >> h0 & m0) + (y >> h1 & m1)) & M32
                shift, mask = SELECT[dst]
                part = (total & mask) << shift
                if dst != "DWORD" and unused == "UNUSED_PRESERVE":
                    part |= o & ~(mask << shift)
                if dst != "DWORD" and unused == "UNUSED_SEXT":
                    part = signed(part, shift + mask.bit_length())
                want.append(part)
            check(run(text, v={0: old, 1: a, 2: b}).rows[0], want)


def test_sdwa_users():
    a, b, h = ints(1), ints(2), halves(1)
    tail = "dst_unused:UNUSED_PAD"
    al, bl = lanes(a), lanes(b)
    cases = {
        f"v_and_b32_sdwa v0, v1, v2 dst_sel:BYTE_3 {tail} src0_sel:DWORD src1_sel:DWORD": [
            (x & y & 255) << 24 for x, y in zip(al, bl, strict=False)
        ],
        f"v_or_b32_sdwa v0, v1, v2 dst_sel:WORD_1 {tail} src0_sel:BYTE_3 src1_sel:DWORD": [
            ((x >> 24 | y) & L16) << 16 for x, y in zip(al, bl, strict=False)
        ],
        f"v_lshlrev_b32_sdwa v0, v1, v2 dst_sel:DWORD {tail} src0_sel:DWORD src1_sel:BYTE_1": [
            (y >> 8 & 255) << x % 32 for x, y in zip(al, bl, strict=False)
        ],
        f"v_lshlrev_b16_sdwa v0, v1, v2 dst_sel:DWORD {tail} src0_sel:DWORD src1_sel:BYTE_3": [
            (y >> 24) << x % 16 & L16 for x, y in zip(al, bl, strict=False)
        ],
        f"v_lshrrev_b32_sdwa v0, v1, v2 dst_sel:BYTE_1 {tail} src0_sel:DWORD src1_sel:DWORD": [
            (y >> x % 32 & 255) << 8 for x, y in zip(al, bl, strict=False)
        ],
        f"v_max_u16_sdwa v0, v1, v2 dst_sel:WORD_1 {tail} src0_sel:DWORD src1_sel:DWORD": [
            max(x & L16, y & L16) << 16 for x, y in zip(al, bl, strict=False)
        ],
        f"v_add_u32_sdwa v0, sext(v1), v2 dst_sel:DWORD {tail} src0_sel:BYTE_1 src1_sel:DWORD": [
            signed(x >> 8, 8) + y for x, y in zip(al, bl, strict=False)
        ],
    }
    for text, want in cases.items():
        check(run(text, v={1: a, 2: b}).rows[0], want)
    text = f"v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD {tail} src0_sel:WORD_1"
    check(run(text, v={1: h}).rows[0], [b32(f16(x >> 16)) for x in lanes(h)], "f")
    text = "v_cvt_f16_f32_sdwa v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD"
    f = floats(4)
    wave = run(text, v={0: a, 1: f})
    assert all(
        g & L16 == o & L16 and same_float(g >> 16, b16(f32(x)), "h")
        for g, o, x in zip(lanes(wave.rows[0]), al, lanes(f), strict=False)
    )


def dpp_source(control, lane):
    """Source lane by the definition of each control, None if invalid."""
    row, position = lane // 16, lane % 16
    name, _, arg = control.partition(":")
    if name == "quad_perm":
        return lane // 4 * 4 + [int(x) for x in arg.strip("[]").split(",")][lane % 4]
    n = int(arg or 0)
    if name == "row_shl":
        return lane + n if position + n < 16 else None
    if name == "row_shr":
        return lane - n if position >= n else None
    if name == "row_ror":
        return row * 16 + (position - n) % 16
    if name == "row_mirror":
        return row * 16 + 15 - position
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8
    if name == "row_newbcast":
        return row * 16 + n
    if name == "row_bcast":
        return {15: None if row == 0 else row * 16 - 1, 31: 31 if lane >= 32 else None}[n]
    return {
        "wave_shl": lane + 1 if lane < 63 else None,
        "wave_shr": lane - 1 if lane else None,
        "wave_rol": (lane + 1) % 64,
        "wave_ror": (lane - 1) % 64,
    }[name]


CONTROLS = [
    "quad_perm:[1,0,3,2]",
    "quad_perm:[3,3,0,1]",
    "row_mirror",
    "row_half_mirror",
    "row_bcast:15",
    "row_bcast:31",
    "row_newbcast:5",
    "wave_shl:1",
    "wave_shr:1",
    "wave_rol:1",
    "wave_ror:1",
] + [f"row_{k}:{n}" for k in ("shl", "shr", "ror") for n in (1, 2, 4, 7, 8, 15)]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("exec_", [FULL, 0xFFFFFFFF0F0FA5A5])
def test_dpp(control, exec_):
    a, b, old = ints(1), ints(2), ints(3)
    al, bl, ol = lanes(a), lanes(b), lanes(old)
    for row_mask, bank_mask in ((0xF, 0xF), (0xA, 0xF), (0xF, 0x5), (0x3, 0xC)):
        for bound in ("", " bound_ctrl:1"):
            want_mov, want_add = [], []
            for lane in range(64):
                source = dpp_source(control, lane)
                if source is not None and not exec_ >> source & 1:
                    source = None
                enabled = row_mask >> lane // 16 & 1 and bank_mask >> lane % 16 // 4 & 1
                enabled = enabled and exec_ >> lane & 1 and (source is not None or bound)
                value = al[source] if source is not None else 0
                want_mov.append(value if enabled else ol[lane])
                want_add.append(value - bl[lane] if enabled else ol[lane])
            tail = f"{control} row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}{bound}"
            v = {0: old, 1: a, 2: b}
            check(run(f"v_mov_b32_dpp v0, v1 {tail}", v=v, exec_=exec_).rows[0], want_mov)
            check(run(f"v_sub_u32_dpp v0, v1, v2 {tail}", v=v, exec_=exec_).rows[0], want_add)
    tail = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1"
    check(
        run(f"v_xor_b32_dpp v0, v1, v1 {tail}", v={1: a}).rows[0],
        [al[i] ^ al[i ^ 1] for i in range(64)],
    )
    f = floats(2)
    wave = run(f"v_add_f32_dpp v0, v1, v1 {tail}", v={1: f})
    want = [b32(guarded(lambda p, q: p + q)(f32(int(f[i])), f32(int(f[i ^ 1])))) for i in range(64)]
    check(wave.rows[0], want, "f")


SDWA_NAMES = [
    "add_u16",
    "mul_lo_u16",
    "xor_b32",
    "mul_i32_i24",
    "mul_u32_u24",
    "min_i16",
    "min_i32",
    "max_u16",
    "max_i16",
    "min_u32",
    "sub_u32",
    "sub_u16",
    "ashrrev_i16",
    "lshlrev_b16",
    "ashrrev_i32",
]


@pytest.mark.parametrize("name", SDWA_NAMES)
@pytest.mark.parametrize("sign", [False, True])
def test_sdwa_sources(name, sign):
    """Byte and word selection, zero- or sign-extended, of both sources."""
    a, b = ints(1), ints(2)
    fn = INTEGER[f"v_{name}_e32"]
    for s0 in SELECT:
        for s1 in ("DWORD", "BYTE_2", "WORD_1", "WORD_0"):
            srcs = "sext(v1), sext(v2)" if sign else "v1, v2"
            text = (
                f"v_{name}_sdwa v0, {srcs} dst_sel:DWORD dst_unused:UNUSED_PAD "
                f"src0_sel:{s0} src1_sel:{s1}"
            )
            want = []
            for pair in zip(lanes(a), lanes(b), strict=False):
                values = []
                for x, selector in zip(pair, (s0, s1), strict=False):
                    shift, mask = SELECT[selector]
                    x = x >> shift & mask
                    values.append(signed(x, mask.bit_length()) & M32 if sign else x)
                want.append(fn(*values))
            check(run(text, v={1: a, 2: b}).rows[0], want)


@pytest.mark.parametrize("kind", ["i16", "u16", "u32", "i32"])
@pytest.mark.parametrize("relation", ["lt", "gt", "ne", "eq", "le", "ge"])
def test_compare_sdwa(kind, relation):
    a, b = ints(1), ints(2)
    b[::4] = a[::4]
    read = KINDS[kind][1]
    for s0 in ("DWORD", "BYTE_0", "WORD_1"):
        for s1 in ("DWORD", "BYTE_3", "WORD_0"):
            for dst, register in (("vcc", 106), ("s[4:5]", 4)):
                text = f"v_cmp_{relation}_{kind}_sdwa {dst}, v1, v2 src0_sel:{s0} src1_sel:{s1}"
                values = [
                    (x >> SELECT[s0][0] & SELECT[s0][1], y >> SELECT[s1][0] & SELECT[s1][1])
                    for x, y in zip(lanes(a), lanes(b), strict=False)
                ]
                want = sum(
                    COMPARISONS[relation](read(x), read(y)) << i for i, (x, y) in enumerate(values)
                )
                assert run(text, v={1: a, 2: b}).read_sgpr64(register) == want


@pytest.mark.parametrize(
    "name", ["add_u32", "max_i32", "min_i32", "max_u32", "min_u32", "and_b32", "or_b32"]
)
def test_dpp_operations(name):
    a, b = ints(1), ints(2)
    for control in ("row_shr:1", "quad_perm:[2,3,0,1]", "row_ror:4", "row_half_mirror"):
        text = f"v_{name}_dpp v0, v1, v2 {control} row_mask:0xf bank_mask:0xf bound_ctrl:1"
        sources = [dpp_source(control, i) for i in range(64)]
        moved = [0 if i is None else int(a[i]) for i in sources]
        want = [INTEGER[f"v_{name}_e32"](x, y) for x, y in zip(moved, lanes(b), strict=False)]
        check(run(text, v={1: a, 2: b}).rows[0], want)
    f, g = floats(1), floats(2)
    tail = "row_ror:8 row_mask:0xf bank_mask:0xf"
    for op, fn in (("sub", lambda p, q: p - q), ("mul", lambda p, q: p * q)):
        wave = run(f"v_{op}_f32_dpp v0, -v1, |v2| {tail}", v={1: f, 2: g})
        sources = [dpp_source("row_ror:8", i) for i in range(64)]
        want = [
            b32(guarded(fn)(-f32(int(f[i])), abs(f32(y))))
            for i, y in zip(sources, lanes(g), strict=False)
        ]
        check(wave.rows[0], want, "f")
    h = floats(3)
    wave = run(f"v_fmac_f32_dpp v0, v1, v2 {tail}", v={0: h, 1: f, 2: g})
    fma = guarded(lambda p, q, r: p * q + r)
    want = [
        b32(fma(f32(int(f[i])), f32(y), f32(z)))
        for i, y, z in zip(sources, lanes(g), lanes(h), strict=False)
    ]
    check(wave.rows[0], want, "f")


def test_more_compares_and_bitop3_b16():
    a, b = ints(1), ints(2)
    b[::2] = a[::2]
    for name, fn in (("eq", lambda x, y: x == y), ("ne", lambda x, y: x != y)):
        wave = run(f"v_cmp_{name}_u64_e64 s[0:1], v[1:2], v[3:4]", v={1: a, 2: 7, 3: b, 4: 7})
        assert wave.read_sgpr64(0) == sum(
            fn(x, y) << i for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
        )
    x = floats(1)
    wave = run("v_cmp_class_f32_e32 vcc, v1, v2\nv_min_f32_e64 v3, -v1, |v1|", v={1: x, 2: 3})
    assert wave.read_sgpr64(106) == sum((f32(v) != f32(v)) << i for i, v in enumerate(lanes(x)))
    check(wave.rows[3], [b32(fmin(-f32(v), abs(f32(v)))) for v in lanes(x)], "f")
    wave = run("v_bitop3_b16 v0, v1, v2, v3 bitop3:0x6c", v={1: a, 2: b, 3: ints(3)})
    whole = run("v_bitop3_b32 v0, v1, v2, v3 bitop3:0x6c", v={1: a, 2: b, 3: ints(3)})
    check(wave.rows[0], [v & L16 for v in lanes(whole.rows[0])])


def test_compare_sdwa_f16():
    a, b = halves(1), halves(2)
    for relation in ("ngt", "lt", "o", "neq"):
        text = f"v_cmp_{relation}_f16_sdwa vcc, v1, -v2 src0_sel:WORD_1 src1_sel:WORD_0"
        fn = COMPARISONS[relation]
        want = sum(
            fn(f16(x >> 16), -f16(y)) << i
            for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
        )
        assert run(text, v={1: a, 2: b}).read_sgpr64(106) == want
