"""Vector instructions against per-lane Python definitions on integers and exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from harness import (
    FULL,
    M32,
    RNG,
    b16,
    b32,
    bf16,
    exec_bits,
    f16,
    f32,
    f64,
    floats,
    halves,
    ints,
    run,
    same_float,
    signed,
)

INF, NAN = float("inf"), float("nan")


def lanes(row):
    return [int(x) for x in row]


def check(got, want, kind="u"):
    for lane, (g, x) in enumerate(zip(lanes(got), want, strict=True)):
        ok = same_float(g, x, kind) if kind in "fhF" else g == x & M32
        assert ok, f"lane {lane}: got {g:#x}, want {x & M32:#x}"


def field(a, offset, width, sign):
    offset, width = offset % 32, width % 32
    bits = (a >> offset) % (1 << width) if width else 0
    return signed(bits, width) if sign and width else bits


def s24(a):
    return signed(a, 24)


def u24(a):
    return a % (1 << 24)


def bits_below(a):
    return next((i for i in range(32) if a >> i & 1), -1)


def bits_above(a):
    return next((i for i in range(32) if a >> (31 - i) & 1), -1)


def perm(a, b, s):
    octets = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    out = []
    for x in s.to_bytes(4, "little"):
        if x < 8:
            out.append(octets[x])
        elif x < 12:
            out.append(0xFF * (octets[2 * (x - 8) + 1] >> 7))
        else:
            out.append(0 if x == 12 else 0xFF)
    return int.from_bytes(bytes(out), "little")


def clip(x, low, high):
    return max(low, min(high, x))


def sad(a, b):
    return sum(
        abs(x - y) for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=False)
    )


def dot4(a, b):
    pair = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    return sum(signed(x, 8) * signed(y, 8) for x, y in pair)


S, L16 = signed, 0xFFFF
INTEGER = {
    "v_mov_b32_e32": lambda a: a,
    "v_not_b32_e32": lambda a: ~a,
    "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32_e32": bits_above,
    "v_ffbl_b32_e32": bits_below,
    "v_ffbh_i32_e32": lambda a: bits_above(a ^ (M32 if a >> 31 else 0)),
    "v_add_u32_e32": lambda a, b: a + b,
    "v_sub_u32_e32": lambda a, b: a - b,
    "v_subrev_u32_e32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: S(a) * S(b) >> 32,
    "v_mul_u32_u24_e32": lambda a, b: u24(a) * u24(b),
    "v_mul_i32_i24_e32": lambda a, b: s24(a) * s24(b),
    "v_mul_hi_i32_i24_e32": lambda a, b: s24(a) * s24(b) >> 32,
    "v_mul_hi_u32_u24_e32": lambda a, b: u24(a) * u24(b) >> 32,
    "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b,
    "v_xor_b32_e32": lambda a, b: a ^ b,
    "v_xnor_b32_e32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32_e32": lambda a, b: b << a % 32,
    "v_lshrrev_b32_e32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32_e32": lambda a, b: S(b) >> a % 32,
    "v_max_u32_e32": max,
    "v_min_u32_e32": min,
    "v_max_i32_e32": lambda a, b: max(S(a), S(b)),
    "v_min_i32_e32": lambda a, b: min(S(a), S(b)),
    "v_bcnt_u32_b32": lambda a, b: bin(a).count("1") + b,
    "v_bfm_b32": lambda a, b: (2 ** (a % 32) - 1) << b % 32,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << c % 32,
    "v_lshl_or_b32": lambda a, b, c: (a << b % 32) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": lambda a, b, c: field(a, b, c, False),
    "v_bfe_i32": lambda a, b, c: field(a, b, c, True),
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> c % 32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c % 4),
    "v_perm_b32": perm,
    "v_mad_u32_u24": lambda a, b, c: u24(a) * u24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: s24(a) * s24(b) + c,
    "v_max3_u32": max,
    "v_min3_u32": min,
    "v_max3_i32": lambda a, b, c: max(S(a), S(b), S(c)),
    "v_min3_i32": lambda a, b, c: min(S(a), S(b), S(c)),
    "v_med3_i32": lambda a, b, c: sorted((S(a), S(b), S(c)))[1],
    "v_med3_u32": lambda a, b, c: sorted((a, b, c))[1],
    "v_sad_u8": lambda a, b, c: sad(a, b) + c,
    "v_sad_u32": lambda a, b, c: abs(a - b) + c,
    "v_dot4_i32_i8": lambda a, b, c: dot4(a, b) + S(c),
    "v_add_u16_e32": lambda a, b: (a + b) & L16,
    "v_sub_u16_e32": lambda a, b: (a - b) & L16,
    "v_subrev_u16_e32": lambda a, b: (b - a) & L16,
    "v_mul_lo_u16_e32": lambda a, b: (a * b) & L16,
    "v_lshlrev_b16_e32": lambda a, b: (b << a % 16) & L16,
    "v_lshrrev_b16_e32": lambda a, b: (b & L16) >> a % 16,
    "v_ashrrev_i16_e32": lambda a, b: (S(b, 16) >> a % 16) & L16,
    "v_max_u16_e32": lambda a, b: max(a & L16, b & L16),
    "v_min_u16_e32": lambda a, b: min(a & L16, b & L16),
    "v_max_i16_e32": lambda a, b: max(S(a, 16), S(b, 16)) & L16,
    "v_min_i16_e32": lambda a, b: min(S(a, 16), S(b, 16)) & L16,
    "v_mad_legacy_u16": lambda a, b, c: (a * b + c) & L16,
    "v_mad_u32_u16": lambda a, b, c: (a & L16) * (b & L16) + c,
    "v_mad_i32_i16": lambda a, b, c: S(a, 16) * S(b, 16) + c,
    "v_pack_b32_f16": lambda a, b: a & L16 | (b & L16) << 16,
    "v_cvt_pk_u16_u32": lambda a, b: min(a, L16) | min(b, L16) << 16,
    "v_cvt_pk_i16_i32": lambda a, b: (
        clip(S(a), -32768, 32767) & L16 | (clip(S(b), -32768, 32767) & L16) << 16
    ),
    "v_cvt_f32_i32_e32": lambda a: b32(Fraction(S(a))),
    "v_cvt_f32_u32_e32": lambda a: b32(Fraction(a)),
    "v_cvt_f32_ubyte0_e32": lambda a: b32(float(a & 255)),
    "v_cvt_f32_ubyte1_e32": lambda a: b32(float(a >> 8 & 255)),
    "v_cvt_f32_ubyte2_e32": lambda a: b32(float(a >> 16 & 255)),
    "v_cvt_f32_ubyte3_e32": lambda a: b32(float(a >> 24)),
    "v_cvt_f16_u16_e32": lambda a: b16(Fraction(a & L16)),
    "v_cvt_f16_i16_e32": lambda a: b16(Fraction(S(a, 16))),
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
}


@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_integer(name, seed):
    fn = INTEGER[name]
    n = fn.__code__.co_argcount if hasattr(fn, "__code__") else (3 if "3_" in name else 2)
    args = [ints(seed * 5 + i) for i in range(n)]
    if "perm" in name and seed:
        args[2] = args[2] & np.uint32(0x0F0F0F0F)
    wave = run(
        f"{name} v0, " + ", ".join(f"v{i + 1}" for i in range(n)),
        v={i + 1: a for i, a in enumerate(args)},
    )
    check(wave.rows[0], [fn(*x) for x in zip(*map(lanes, args), strict=True)])


def guarded(fn):
    """Evaluate on floats exactly where possible: finite -> Fraction, else float rules."""

    def inner(*args):
        if all(math.isfinite(x) for x in args):
            result = fn(*map(Fraction, args))
            return result if result else fn(*args)
        return fn(*args)

    return inner


def fmax(*args):
    kept = [x for x in args if x == x]
    return max(kept) if kept else NAN


def fmin(*args):
    kept = [x for x in args if x == x]
    return min(kept) if kept else NAN


def med3(a, b, c):
    return fmin(a, b, c) if any(x != x for x in (a, b, c)) else sorted((a, b, c))[1]


def rounding(fn):
    return lambda x: x if not math.isfinite(x) else float(fn(x))


FLOAT = {
    "v_add_f32_e32": guarded(lambda a, b: a + b),
    "v_sub_f32_e32": guarded(lambda a, b: a - b),
    "v_subrev_f32_e32": guarded(lambda a, b: b - a),
    "v_mul_f32_e32": guarded(lambda a, b: a * b),
    "v_max_f32_e32": lambda a, b: fmax(a, b),
    "v_min_f32_e32": lambda a, b: fmin(a, b),
    "v_fma_f32": guarded(lambda a, b, c: a * b + c),
    "v_max3_f32": lambda a, b, c: fmax(a, b, c),
    "v_min3_f32": lambda a, b, c: fmin(a, b, c),
    "v_med3_f32": lambda a, b, c: med3(a, b, c),
    "v_maximum3_f32": lambda a, b, c: NAN if a != a or b != b or c != c else max(a, b, c),
    "v_minimum3_f32": lambda a, b, c: NAN if a != a or b != b or c != c else min(a, b, c),
    "v_floor_f32_e32": rounding(math.floor),
    "v_ceil_f32_e32": rounding(math.ceil),
    "v_trunc_f32_e32": rounding(math.trunc),
    "v_rndne_f32_e32": rounding(round),
    "v_frexp_mant_f32_e32": lambda a: math.frexp(a)[0] if math.isfinite(a) else a,
}


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_float(name, seed):
    fn = FLOAT[name]
    n = {"e32": 2, "f32": 3}[name[-3:]]
    if name in ("v_floor_f32_e32", "v_ceil_f32_e32", "v_trunc_f32_e32", "v_rndne_f32_e32") or (
        "frexp" in name
    ):
        n = 1
    args = [floats(seed * 5 + i) for i in range(n)]
    wave = run(
        f"{name} v0, " + ", ".join(f"v{i + 1}" for i in range(n)),
        v={i + 1: a for i, a in enumerate(args)},
    )
    want = [b32(fn(*map(f32, x))) for x in zip(*map(lanes, args), strict=True)]
    check(wave.rows[0], want, "f")


def test_fma_is_not_rounded_twice():
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    for c in (2**-60, -(2**-60), 2**-30 + 2**-50, 0.0):
        want = b32(Fraction(float(a)) * Fraction(float(b)) + Fraction(c) + 0)
        wave = run(
            "v_fma_f32 v0, v1, v2, v3",
            v={1: a.view(np.uint32), 2: b.view(np.uint32), 3: np.float32(c).view(np.uint32)},
        )
        assert int(wave.rows[0][0]) == want
    rng = np.random.default_rng(9)
    for _ in range(20):  # products half-way between float32 values with a tiny addend
        x = rng.integers(1 << 11, 1 << 12, 64) * 2 + 1
        y = rng.integers(1 << 11, 1 << 12, 64) * 2 + 1
        z = rng.choice([1e-20, -1e-20, 1e-9], 64)
        rows = {1: x, 2: y, 3: z}
        rows = {k: v.astype(np.float32).view(np.uint32) for k, v in rows.items()}
        wave = run("v_fma_f32 v0, v1, v2, v3", v=rows)
        cols = [[f32(q) for q in lanes(r)] for r in rows.values()]
        check(
            wave.rows[0],
            [b32(Fraction(p) * Fraction(q) + Fraction(r)) for p, q, r in zip(*cols, strict=False)],
            "f",
        )


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("exp", lambda x: 2.0**x if x < 200 else INF),
        ("log", lambda x: math.log2(x) if x > 0 else (-INF if x == 0 else NAN)),
        ("rcp", lambda x: 1 / x if x else math.copysign(INF, x)),
        ("rcp_iflag", lambda x: 1 / x if x else math.copysign(INF, x)),
        (
            "rsq",
            lambda x: 1 / math.sqrt(x) if x > 0 else (math.copysign(INF, x) if x == 0 else NAN),
        ),
        ("sqrt", lambda x: math.sqrt(x) if x >= 0 else NAN),
        ("sin", lambda x: math.sin(2 * math.pi * x)),
        ("cos", lambda x: math.cos(2 * math.pi * x)),
        ("fract", lambda x: x - math.floor(x)),
    ],
)
def test_transcendental(name, fn):
    x = floats(3)
    values = x.view(np.float32)
    if name in ("sin", "cos"):
        x = np.where(np.abs(values) < 256, x, 0).astype(np.uint32)
    wave = run(f"v_{name}_f32_e32 v0, v1", v={1: x})
    for got, bits in zip(wave.rows[0].view(np.float32), lanes(x), strict=True):
        a = f32(bits)
        if not math.isfinite(a) or (name == "fract" and abs(a) > 1e9):
            continue
        want = f32(b32(fn(a)))
        if abs(want) < 2**-126:
            want = 0.0
        assert got == pytest.approx(want, rel=3e-7, abs=1e-30, nan_ok=True), a


def to_int(x, low, high):
    return 0 if x != x else clip(math.trunc(clip(x, -1e30, 1e30)), low, high)


def test_conversions():
    x, h = floats(5), halves(5)
    wave = run(
        """v_cvt_i32_f32_e32 v1, v0
        v_cvt_u32_f32_e32 v2, v0
        v_cvt_f16_f32_e32 v3, v0
        v_cvt_f32_f16_e32 v4, v10
        v_cvt_pk_bf16_f32 v5, v0, v11
        v_cvt_pkrtz_f16_f32 v6, v0, v11
        v_cvt_pk_f16_f32 v7, v0, v11
        v_frexp_exp_i32_f32_e32 v8, v0
        v_cvt_flr_i32_f32_e32 v9, v0
        v_cvt_f64_f32_e32 v[20:21], v0
        v_cvt_f32_f64_e32 v12, v[20:21]
        v_cvt_i32_f64_e32 v13, v[20:21]
        v_cvt_u32_f64_e32 v14, v[20:21]
        v_cvt_f64_i32_e32 v[22:23], v10
        v_cvt_f64_u32_e32 v[24:25], v10""",
        v={0: x, 10: h, 11: floats(6)},
    )
    fx, fy = [f32(b) for b in lanes(x)], [f32(b) for b in lanes(floats(6))]
    check(wave.rows[1], [to_int(a, -(2**31), 2**31 - 1) for a in fx])
    check(wave.rows[2], [to_int(a, 0, M32) for a in fx])
    check(wave.rows[3], [b16(a) for a in fx], "h")
    check(wave.rows[4], [b32(f16(b)) for b in lanes(h)], "f")
    for got, a, b in zip(lanes(wave.rows[5]), fx, fy, strict=True):
        for half, value in ((got & L16, a), (got >> 16, b)):
            assert (half == bf16(value)) or (value != value and half & 0x7FFF > 0x7F80)
    for got, a, b in zip(lanes(wave.rows[6]), fx, fy, strict=True):
        for half, value in ((got & L16, a), (got >> 16, b)):
            if math.isfinite(value):
                assert abs(f16(half)) <= abs(value)
                assert math.isfinite(f16(half))
                assert abs(f16(half + 1)) > abs(value) or half & 0x7FFF == 0x7BFF
    for got, a, b in zip(lanes(wave.rows[7]), fx, fy, strict=True):
        assert same_float(got & L16, b16(a), "h")
        assert same_float(got >> 16, b16(b), "h")
    check(wave.rows[8], [math.frexp(a)[1] if math.isfinite(a) else 0 for a in fx])
    check(
        wave.rows[9],
        [0 if a != a else clip(math.floor(clip(a, -1e30, 1e30)), -(2**31), 2**31 - 1) for a in fx],
    )
    wide = wave.rows[20].astype(np.uint64) | wave.rows[21].astype(np.uint64) << np.uint64(32)
    assert all(f64(int(w)) == a or a != a for w, a in zip(wide, fx, strict=True))
    check(wave.rows[12], lanes(x), "f")
    check(wave.rows[13], [to_int(a, -(2**31), 2**31 - 1) for a in fx])
    check(wave.rows[14], [to_int(a, 0, M32) for a in fx])
    for reg, fn in ((22, signed), (24, lambda b: b)):
        wide = wave.rows[reg].astype(np.uint64) | wave.rows[reg + 1].astype(np.uint64) << np.uint64(
            32
        )
        assert [f64(int(w)) for w in wide] == [float(fn(b)) for b in lanes(h)]


def test_ldexp():
    x, e = floats(1), (ints(1) % np.uint32(300) - np.uint32(150)).astype(np.uint32)
    wave = run("v_ldexp_f32 v0, v1, v2", v={1: x, 2: e})
    want = []
    for b, n in zip(lanes(x), lanes(e), strict=True):
        a = f32(b)
        want.append(b32(Fraction(a) * Fraction(2) ** signed(n) if math.isfinite(a) else a))
    check(wave.rows[0], want, "f")


def division(code_lines, a, b):
    return run(code_lines, v={0: a, 1: b})


DIVIDE = """v_div_scale_f32 v2, s[0:1], v1, v1, v0
v_div_scale_f32 v3, vcc, v0, v1, v0
v_rcp_f32_e32 v4, v2
v_fma_f32 v5, -v2, v4, 1.0
v_fmac_f32_e32 v4, v5, v4
v_mul_f32_e32 v5, v3, v4
v_fma_f32 v6, -v2, v5, v3
v_fmac_f32_e32 v5, v6, v4
v_fma_f32 v6, -v2, v5, v3
v_div_fmas_f32 v5, v6, v4, v5
v_div_fixup_f32 v7, v5, v1, v0"""


@pytest.mark.parametrize("seed", range(6))
def test_division_sequence_is_correctly_rounded(seed):
    """v_div_scale, v_div_fmas and v_div_fixup together give IEEE division."""
    rng = np.random.default_rng(seed)
    if seed < 2:
        a, b = floats(seed), floats(seed + 50)
    else:
        exponent = rng.uniform(-120, 120, (2, 64)) if seed < 4 else rng.uniform(-148, 127, (2, 64))
        a, b = (rng.standard_normal((2, 64)) * 2.0**exponent).astype(np.float32).view(np.uint32)
    wave = division(DIVIDE, a, b)
    with np.errstate(all="ignore"):
        want = a.view(np.float32) / b.view(np.float32)
    for lane in range(64):
        got, x = int(wave.rows[7][lane]), int(want.view(np.uint32)[lane])
        tiny = abs(float(want[lane])) < 2**-126  # denormal quotients are rounded twice
        assert same_float(got, x) or (tiny and abs(got - x) <= 1), (
            f32(int(a[lane])),
            f32(int(b[lane])),
        )


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


def test_carries():
    a, b, c = ints(1), ints(2), 0x123456789ABCDEF0
    al, bl = lanes(a), lanes(b)
    cin = [c >> i & 1 for i in range(64)]
    cases = {
        "v_add_co_u32_e32 v0, vcc, v1, v2": [x + y for x, y in zip(al, bl, strict=False)],
        "v_sub_co_u32_e32 v0, vcc, v1, v2": [x - y for x, y in zip(al, bl, strict=False)],
        "v_subrev_co_u32_e32 v0, vcc, v1, v2": [y - x for x, y in zip(al, bl, strict=False)],
        "v_addc_co_u32_e32 v0, vcc, v1, v2, vcc": [
            x + y + z for x, y, z in zip(al, bl, cin, strict=False)
        ],
        "v_subb_co_u32_e32 v0, vcc, v1, v2, vcc": [
            x - y - z for x, y, z in zip(al, bl, cin, strict=False)
        ],
        "v_subbrev_co_u32_e32 v0, vcc, v1, v2, vcc": [
            y - x - z for x, y, z in zip(al, bl, cin, strict=False)
        ],
    }
    for text, totals in cases.items():
        wave = run(text, v={1: a, 2: b}, vcc=c)
        check(wave.rows[0], totals)
        assert wave.read_sgpr64(106) == sum((not 0 <= t <= M32) << i for i, t in enumerate(totals))
    wave = run("v_mad_u64_u32 v[4:5], s[0:1], v1, v2, v[6:7]", v={1: a, 2: b, 6: b, 7: a})
    totals = [x * y + (x << 32 | y) for x, y in zip(al, bl, strict=False)]
    check(wave.rows[4], totals)
    check(wave.rows[5], [t >> 32 for t in totals])
    assert wave.read_sgpr64(0) == sum((t >> 64) << i for i, t in enumerate(totals))
    wave = run("v_mad_i64_i32 v[4:5], s[0:1], v1, v2, v[6:7]", v={1: a, 2: b, 6: b, 7: a})
    check(
        wave.rows[5],
        [signed(x) * signed(y) + (x << 32 | y) >> 32 for x, y in zip(al, bl, strict=False)],
    )


def test_wide_shifts():
    a, b, n = ints(1), ints(2), ints(3)
    pairs = [y << 32 | x for x, y in zip(lanes(a), lanes(b), strict=False)]
    for name, fn in {
        "v_lshlrev_b64": lambda k, x: x << k % 64,
        "v_lshrrev_b64": lambda k, x: x >> k % 64,
        "v_ashrrev_i64": lambda k, x: signed(x, 64) >> k % 64,
    }.items():
        wave = run(f"{name} v[4:5], v3, v[1:2]", v={1: a, 2: b, 3: n})
        want = [fn(k, x) for k, x in zip(lanes(n), pairs, strict=False)]
        check(wave.rows[4], want)
        check(wave.rows[5], [w >> 32 for w in want])
    wave = run("v_lshl_add_u64 v[4:5], v[1:2], 3, v[6:7]", v={1: a, 2: b, 6: n, 7: a})
    want = [(x << 3) + (q << 32 | p) for x, p, q in zip(pairs, lanes(n), lanes(a), strict=False)]
    check(wave.rows[4], want)
    check(wave.rows[5], [w >> 32 for w in want])
    wave = run("v_mov_b64_e32 v[4:5], s[0:1]", s={0: 5, 1: 6})
    assert (int(wave.rows[4][9]), int(wave.rows[5][9])) == (5, 6)
    wave = run("v_lshrrev_b64 v[4:5], v3, exec", v={3: np.arange(64)}, exec_=0xFF00FF00FF00FF01)
    assert int(wave.rows[4][8]) == 0xFF00FF00FF00FF01 >> 8 & M32


@pytest.mark.parametrize("exec_", [FULL, 0x00FF00FF12345678])
def test_cndmask_and_exec(exec_):
    a, b, m = ints(1), ints(2), 0xDEADBEEF01234567
    old = ints(9)
    chosen = [
        y if m >> i & 1 else x for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
    ]
    want = [
        c if exec_ >> i & 1 else o for i, (c, o) in enumerate(zip(chosen, lanes(old), strict=False))
    ]
    v = {0: old, 1: a, 2: b}
    check(run("v_cndmask_b32_e32 v0, v1, v2, vcc", v=v, vcc=m, exec_=exec_).rows[0], want)
    s = {4: m & M32, 5: m >> 32}
    check(run("v_cndmask_b32_e64 v0, v1, v2, s[4:5]", v=v, s=s, exec_=exec_).rows[0], want)
    wave = run("v_cndmask_b32_e64 v0, -v1, |v2|, s[4:5]", v=v, s=s)
    check(
        wave.rows[0],
        [
            y & 0x7FFFFFFF if m >> i & 1 else x ^ 0x80000000
            for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
        ],
    )
    text = (
        "v_cndmask_b32_sdwa v0, v1, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD "
        "src0_sel:DWORD src1_sel:WORD_1"
    )
    check(
        run(text, v=v, vcc=m).rows[0],
        [
            y >> 16 if m >> i & 1 else x
            for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))
        ],
    )
    check(run("v_cndmask_b32_e64 v0, 0, 1, s[4:5]", s=s).rows[0], [m >> i & 1 for i in range(64)])


def test_float_modifiers():
    a, b, c = floats(1), floats(2), floats(3)
    v = {1: a, 2: b, 3: c}
    fa, fb, fc = ([f32(x) for x in lanes(r)] for r in (a, b, c))

    def exact(x, y, z):
        return guarded(lambda p, q, r: p * q + r)(x, y, z)

    cases = {
        "v_fma_f32 v0, -v1, |v2|, -|v3|": [
            exact(-x, abs(y), -abs(z)) for x, y, z in zip(fa, fb, fc, strict=False)
        ],
        "v_fma_f32 v0, |v1|, v2, 1.0": [
            exact(abs(x), y, 1.0) for x, y in zip(fa, fb, strict=False)
        ],
        "v_add_f32_e64 v0, |v1|, -v2": [
            guarded(lambda p, q: p + q)(abs(x), -y) for x, y in zip(fa, fb, strict=False)
        ],
        "v_mul_f32_e64 v0, -v1, v2": [
            guarded(lambda p, q: p * q)(-x, y) for x, y in zip(fa, fb, strict=False)
        ],
    }
    for text, want in cases.items():
        check(run(text, v=v).rows[0], [b32(w) for w in want], "f")
    for text, factor in (("mul:2", 2.0), ("mul:4", 4.0), ("div:2", 0.5)):
        wave = run(f"v_add_f32_e64 v0, v1, 0 {text}", v=v)
        check(wave.rows[0], [b32(f32(x) * factor) for x in lanes(a)], "f")
    wave = run("v_max_f32_e64 v0, v1, v1 clamp", v=v)
    check(wave.rows[0], [b32(0.0 if x != x else clip(x, 0.0, 1.0)) for x in fa], "f")
    wave = run("v_fmac_f32_e32 v3, v1, v2", v=v)
    check(wave.rows[3], [b32(exact(x, y, z)) for x, y, z in zip(fa, fb, fc, strict=False)], "f")
    wave = run("v_fmaak_f32 v0, v1, v2, 0xbdcac9b8", v=v)
    check(
        wave.rows[0], [b32(exact(x, y, f32(0xBDCAC9B8))) for x, y in zip(fa, fb, strict=False)], "f"
    )
    wave = run("v_fmamk_f32 v0, v1, 0x4f800000, v3", v=v)
    check(wave.rows[0], [b32(exact(x, 4294967296.0, z)) for x, z in zip(fa, fc, strict=False)], "f")
    wave = run("v_sqrt_f32_e64 v0, |v1|", v=v)
    assert not np.isnan(wave.rows[0].view(np.float32)[~np.isnan(a.view(np.float32))]).any()


def test_integer_clamp():
    a, b = ints(1), ints(2)
    al, bl = lanes(a), lanes(b)
    cases = {
        "v_sub_u32_e64": [clip(x - y, 0, M32) for x, y in zip(al, bl, strict=False)],
        "v_add_u32_e64": [clip(x + y, 0, M32) for x, y in zip(al, bl, strict=False)],
        "v_subrev_u32_e64": [clip(y - x, 0, M32) for x, y in zip(al, bl, strict=False)],
        "v_add_i32": [
            clip(signed(x) + signed(y), -(2**31), 2**31 - 1) for x, y in zip(al, bl, strict=False)
        ],
        "v_sub_i32": [
            clip(signed(x) - signed(y), -(2**31), 2**31 - 1) for x, y in zip(al, bl, strict=False)
        ],
        "v_add_u16_e64": [
            clip((x & L16) + (y & L16), 0, L16) for x, y in zip(al, bl, strict=False)
        ],
    }
    for name, want in cases.items():
        check(run(f"{name} v0, v1, v2 clamp", v={1: a, 2: b}).rows[0], want)


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


def test_lane_access():
    a, b = ints(1), ints(2)
    assert run("v_readfirstlane_b32 s0, v1", v={1: a}, exec_=0xF0).sgprs[0] == int(a[4])
    assert run("v_readlane_b32 s0, v1, 63", v={1: a}, exec_=1).sgprs[0] == int(a[63])
    assert run("v_readlane_b32 s0, v1, s2", v={1: a}, s={2: 65}).sgprs[0] == int(a[1])
    wave = run("v_writelane_b32 v1, s0, 7", v={1: a}, s={0: 42}, exec_=0)
    assert int(wave.rows[1][7]) == 42
    assert int(wave.rows[1][8]) == int(a[8])
    for name, size in (("v_permlane32_swap_b32_e32", 32), ("v_permlane16_swap_b32_e32", 16)):
        wave = run(f"{name} v1, v2", v={1: a, 2: b})
        x, y = lanes(a), lanes(b)
        for base in range(0, 64, 2 * size):
            odd, even = slice(base + size, base + 2 * size), slice(base, base + size)
            x[odd], y[even] = y[even], x[odd]
        check(wave.rows[1], x)
        check(wave.rows[2], y)
    wave = run("v_swap_b32 v1, v2", v={1: a, 2: b})
    check(wave.rows[1], lanes(b))
    check(wave.rows[2], lanes(a))
    mask = 0x123456789ABCDEF0
    wave = run(
        "v_mbcnt_lo_u32_b32 v0, s0, 5\nv_mbcnt_hi_u32_b32 v0, s1, v0",
        s={0: mask & M32, 1: mask >> 32},
    )
    check(wave.rows[0], [5 + bin(mask & ((1 << i) - 1)).count("1") for i in range(64)])
    wave = run("v_mov_b32_e32 v0, 7", v={0: a}, exec_=0xFF)
    assert int(wave.rows[0][7]) == 7
    assert int(wave.rows[0][8]) == int(a[8])


@pytest.mark.parametrize("table", [0x36, 0xC8, 0x6C, 0x01, 0x96, 0xFE, 0x40])
def test_bitop3(table):
    a, b, c = ints(1), ints(2), ints(3)
    want = []
    for x, y, z in zip(lanes(a), lanes(b), lanes(c), strict=False):
        want.append(
            sum(
                (table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1) << i
                for i in range(32)
            )
        )
    wave = run(f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table:#x}", v={1: a, 2: b, 3: c})
    check(wave.rows[0], want)


@pytest.mark.parametrize("seed", range(3))
def test_packed_f32(seed):
    a, b, c = ([floats(seed * 9 + 2 * i), floats(seed * 9 + 2 * i + 1)] for i in range(3))
    regs = {2: a[0], 3: a[1], 4: b[0], 5: b[1], 6: c[0], 7: c[1]}
    rng = np.random.default_rng(seed)
    for _ in range(12):
        sel, sel_hi, neg, neg_hi = (rng.integers(0, 2, 3).tolist() for _ in range(4))
        for name, n in (("add", 2), ("mul", 2), ("fma", 3)):
            mods = " ".join(
                f"{k}:[{','.join(map(str, v[:n]))}]"
                for k, v in (
                    ("op_sel", sel),
                    ("op_sel_hi", sel_hi),
                    ("neg_lo", neg),
                    ("neg_hi", neg_hi),
                )
            )
            srcs = ", ".join(f"v[{2 + 2 * i}:{3 + 2 * i}]" for i in range(n))
            wave = run(f"v_pk_{name}_f32 v[2:3], {srcs} {mods}", v=regs)
            fn = {
                "add": lambda p, q: p + q,
                "mul": lambda p, q: p * q,
                "fma": lambda p, q, r: p * q + r,
            }[name]
            for dst, chosen, sign in ((2, sel, neg), (3, sel_hi, neg_hi)):
                columns = [lanes((a, b, c)[i][chosen[i]]) for i in range(n)]
                want = [
                    b32(guarded(fn)(*[-f32(x) if sign[i] else f32(x) for i, x in enumerate(t)]))
                    for t in zip(*columns, strict=False)
                ]
                check(wave.rows[dst], want, "f")
    wave = run(
        "v_pk_mul_f32 v[0:1], v[2:3], s[4:5] op_sel_hi:[1,0]", v=regs, s={4: 0x40000000, 5: 0}
    )
    check(wave.rows[1], [b32(f32(x) * 2) for x in lanes(a[1])], "f")
    wave = run("v_pk_add_f32 v[0:1], v[2:3], 0 op_sel_hi:[1,0]", v=regs)
    check(wave.rows[0], lanes(a[0]), "f")
    wave = run("v_pk_mov_b32 v[2:3], v[2:3], v[4:5] op_sel:[1,0]", v=regs)
    check(wave.rows[2], lanes(a[1]))
    check(wave.rows[3], lanes(b[0]))


PACKED16 = {
    "pk_lshlrev_b16": lambda a, b: b << a % 16,
    "pk_lshrrev_b16": lambda a, b: b >> a % 16,
    "pk_ashrrev_i16": lambda a, b: signed(b, 16) >> a % 16,
    "pk_add_u16": lambda a, b: a + b,
    "pk_sub_u16": lambda a, b: a - b,
    "pk_add_i16": lambda a, b: a + b,
    "pk_sub_i16": lambda a, b: a - b,
    "pk_mul_lo_u16": lambda a, b: a * b,
    "pk_max_u16": max,
    "pk_min_u16": min,
    "pk_max_i16": lambda a, b: max(signed(a, 16), signed(b, 16)),
    "pk_min_i16": lambda a, b: min(signed(a, 16), signed(b, 16)),
    "pk_mad_u16": lambda a, b, c: a * b + c,
}
PACKED_F16 = {
    "pk_add_f16": lambda a, b: a + b,
    "pk_mul_f16": lambda a, b: a * b,
    "pk_fma_f16": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("name", [*PACKED16, *PACKED_F16, "pk_max_f16", "pk_min_f16"])
def test_packed_16(name):
    real = name.endswith("f16")
    n = 3 if "fma" in name or "mad" in name else 2
    make = halves if real else ints
    args = [make(i) for i in range(n)]
    rng = np.random.default_rng(len(name))
    for _ in range(8):
        sel, sel_hi, neg, neg_hi = (rng.integers(0, 2, n).tolist() for _ in range(4))
        mods = f"op_sel:{sel} op_sel_hi:{sel_hi}".replace(" ", "").replace(
            "op_sel_hi", " op_sel_hi"
        )
        if real:
            mods += f" neg_lo:{neg} neg_hi:{neg_hi}".replace(", ", ",")
        srcs = ", ".join(f"v{i + 1}" for i in range(n))
        wave = run(f"v_{name} v0, {srcs} {mods}", v={i + 1: a for i, a in enumerate(args)})
        for shift, chosen, sign in ((0, sel, neg), (16, sel_hi, neg_hi)):
            for lane in range(64):
                xs = [int(a[lane]) >> 16 * h & L16 for a, h in zip(args, chosen, strict=False)]
                got = int(wave.rows[0][lane]) >> shift & L16
                if real:
                    fs = [-f16(x) if s else f16(x) for x, s in zip(xs, sign, strict=False)]
                    fn = {"pk_max_f16": fmax, "pk_min_f16": fmin}.get(name) or guarded(
                        PACKED_F16[name]
                    )
                    assert same_float(got, b16(fn(*fs)), "h"), (name, fs)
                else:
                    assert got == PACKED16[name](*xs) & L16
    if name == "pk_lshlrev_b16":
        wave = run("v_pk_lshlrev_b16 v0, 8, v1 op_sel_hi:[0,1]", v={1: args[0]})
        check(
            wave.rows[0], [x << 8 & 0xFF00 | (x >> 16 << 8 & 0xFF00) << 16 for x in lanes(args[0])]
        )


@pytest.mark.parametrize("name", ["add", "sub", "mul", "max", "min", "fma"])
def test_f16(name):
    a, b, c = halves(1), halves(2), halves(3)
    fn = {
        "add": guarded(lambda p, q: p + q),
        "sub": guarded(lambda p, q: p - q),
        "mul": guarded(lambda p, q: p * q),
        "max": fmax,
        "min": fmin,
        "fma": guarded(lambda p, q, r: p * q + r),
    }[name]
    text = "v_fma_f16 v0, v1, v2, v3" if name == "fma" else f"v_{name}_f16_e32 v0, v1, v2"
    wave = run(text, v={0: 0, 1: a, 2: b, 3: c})
    cols = [a, b, c][: 3 if name == "fma" else 2]
    want = [b16(fn(*map(f16, t))) for t in zip(*map(lanes, cols), strict=False)]
    check(wave.rows[0], want, "h")


def test_fma_mix():
    a, b, c = halves(1), halves(2), floats(3)
    text = "v_fma_mix_f32 v0, v1, -v2, v3 op_sel:[1,0,0] op_sel_hi:[1,1,0]"
    wave = run(text, v={1: a, 2: b, 3: c})
    fn = guarded(lambda p, q, r: p * q + r)
    want = [
        b32(fn(f16(x >> 16), -f16(y), f32(z)))
        for x, y, z in zip(*map(lanes, (a, b, c)), strict=False)
    ]
    check(wave.rows[0], want, "f")
    wave = run("v_fma_mix_f32 v0, v1, 1.0, v1 op_sel_hi:[1,1,1]", v={1: a})
    check(wave.rows[0], [b32(fn(f16(x), 1.0, f16(x))) for x in lanes(a)], "f")
    old = ints(5)
    for half, keep in (("lo", 0xFFFF0000), ("hi", 0xFFFF)):
        wave = run(f"v_fma_mix{half}_f16 v0, v3, 1.0, 0", v={0: old, 3: c})
        for got, o, x in zip(lanes(wave.rows[0]), lanes(old), lanes(c), strict=False):
            assert got & keep == o & keep
            assert same_float((got >> (16 if half == "hi" else 0)) & L16, b16(f32(x)), "h")


def test_f64():
    a, b = RNG.standard_normal(64), RNG.standard_normal(64) * 1e3
    c = -(a * b) + RNG.standard_normal(64) * 1e-17

    def split(x):
        u = x.view(np.uint64)
        return (u & np.uint64(M32)).astype(np.uint32), (u >> np.uint64(32)).astype(np.uint32)

    v = {}
    for reg, x in ((2, a), (4, b), (6, c)):
        v[reg], v[reg + 1] = split(x)

    def result(text):
        wave = run(text, v=v)
        low, high = wave.rows[0].astype(np.uint64), wave.rows[1].astype(np.uint64)
        return (low | high << np.uint64(32)).view(np.float64)

    assert np.array_equal(result("v_add_f64 v[0:1], v[2:3], -v[4:5]"), a - b)
    assert np.array_equal(result("v_mul_f64 v[0:1], v[2:3], v[4:5]"), a * b)
    assert np.array_equal(result("v_mul_f64 v[0:1], v[2:3], 2.0"), a * 2)
    exact = [
        float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=False)
    ]
    assert np.array_equal(result("v_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]"), np.array(exact))


def test_bf16_and_dot_helpers():
    h, g, c = (
        halves(1) & np.uint32(0x3BFF3BFF),
        halves(2) & np.uint32(0x3BFF3BFF),
        floats(7) & np.uint32(0x3FFFFFFF),
    )
    wave = run("v_dot2_f32_f16 v0, v1, v2, v3", v={1: h, 2: g, 3: c})
    for got, x, y, z in zip(wave.rows[0].view(np.float32), *map(lanes, (h, g, c)), strict=False):
        want = f16(x) * f16(y) + f16(x >> 16) * f16(y >> 16) + f32(z)
        assert got == pytest.approx(want, rel=1e-6)
    wave = run("v_dot2c_f32_bf16_e32 v3, v1, v2", v={1: h, 2: g, 3: c})
    for got, x, y, z in zip(wave.rows[3].view(np.float32), *map(lanes, (h, g, c)), strict=False):
        want = f32(x << 16) * f32(y << 16) + f32(x >> 16 << 16) * f32(y >> 16 << 16) + f32(z)
        assert got == pytest.approx(want, rel=1e-6)


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


def test_carries_in_scalar_pairs():
    a, b, c = ints(1), ints(2), 0x123456789ABCDEF0
    pairs = [(x, y, c >> i & 1) for i, (x, y) in enumerate(zip(lanes(a), lanes(b), strict=False))]
    cases = {
        "v_sub_co_u32_e64 v0, s[4:5], v1, v2": lambda x, y, z: x - y,
        "v_subrev_co_u32_e64 v0, s[4:5], v1, v2": lambda x, y, z: y - x,
        "v_add_co_u32_e64 v0, s[4:5], v1, v2": lambda x, y, z: x + y,
        "v_addc_co_u32_e64 v0, s[4:5], v1, v2, s[6:7]": lambda x, y, z: x + y + z,
        "v_subb_co_u32_e64 v0, s[4:5], v1, v2, s[6:7]": lambda x, y, z: x - y - z,
    }
    for text, fn in cases.items():
        wave = run(text, v={1: a, 2: b}, s={6: c & M32, 7: c >> 32})
        totals = [fn(*p) for p in pairs]
        check(wave.rows[0], totals)
        assert wave.read_sgpr64(4) == sum((not 0 <= t <= M32) << i for i, t in enumerate(totals))


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


def test_packed_defaults():
    """Without op_sel_hi the high half uses the high halves."""
    regs = {2 + i: floats(i) for i in range(4)}
    wave = run("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", v=regs)
    for i in range(2):
        pairs = zip(lanes(regs[2 + i]), lanes(regs[4 + i]), strict=False)
        want = [b32(guarded(lambda p, q: p * q)(f32(x), f32(y))) for x, y in pairs]
        check(wave.rows[i], want, "f")


def test_bf16_ties_go_to_even():
    bits = np.arange(64, dtype=np.uint32) * np.uint32(0x8000) + np.uint32(0x3F800000)
    wave = run("v_cvt_pk_bf16_f32 v0, v1, v1", v={1: bits})
    check(wave.rows[0], [bf16(f32(x)) * 0x10001 for x in lanes(bits)])


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


def test_more_f16():
    a, b, c = halves(1), halves(2), halves(3)
    for name, fn in (("max", fmax), ("min", fmin)):
        text = (
            f"v_{name}_f16_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD "
            "src0_sel:WORD_1 src1_sel:WORD_0"
        )
        wave = run(text, v={1: a, 2: b})
        check(
            wave.rows[0],
            [b16(fn(f16(x >> 16), f16(y))) for x, y in zip(lanes(a), lanes(b), strict=False)],
            "h",
        )
        wave = run(f"v_{name}3_f16 v0, v1, v2, v3", v={1: a, 2: b, 3: c})
        want = [b16(fn(*map(f16, t))) for t in zip(*map(lanes, (a, b, c)), strict=False)]
        check(wave.rows[0], want, "h")


DIRECT = {
    "v_add_f32_e32": lambda a, b: np.float32(a) + np.float32(b),
    "v_mul_f32_e32": lambda a, b: np.float32(a) * np.float32(b),
    "v_add_u32_e32": lambda a, b: (int(a) + int(b)) & M32,
    "v_xor_b32_e32": lambda a, b: int(a) ^ int(b),
    "v_max_i32_e32": lambda a, b: max(signed(int(a)), signed(int(b))) & M32,
}


@pytest.mark.parametrize("name", DIRECT)
def test_inactive_lanes_keep_their_value(name):
    exec_, old = 0x00FF00FF12345678, ints(9)
    a, b = (np.arange(64, dtype=np.float32) + i for i in (1, 7))
    wave = run(
        f"{name} v0, v1, v2", v={0: old, 1: a.view(np.uint32), 2: b.view(np.uint32)}, exec_=exec_
    )
    sources = (a, b) if "_f32" in name else (a.view(np.uint32), b.view(np.uint32))
    for lane, (x, y) in enumerate(zip(*sources, strict=True)):
        want = DIRECT[name](x, y)
        bits = int(want.view(np.uint32)) if "_f32" in name else want
        assert int(wave.rows[0][lane]) == (bits if exec_ >> lane & 1 else int(old[lane]))


def test_op_sel_places_a_result_in_the_high_half():
    a, b, old = ints(1), ints(2), ints(3)
    text = "v_mad_u16 v0, v1, v2, 5 op_sel:[1,0,0,1]"
    wave = run(text, v={0: old, 1: a, 2: b})
    want = [
        (int(o) & L16) | (((int(x) >> 16) * (int(y) & L16) + 5) & L16) << 16
        for x, y, o in zip(a, b, old, strict=True)
    ]
    check(wave.rows[0], want)
