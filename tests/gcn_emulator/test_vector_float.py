"""Float vector instructions, conversions and divisions, against exact rationals."""

import math
from fractions import Fraction

import numpy as np
import pytest
from harness import (
    M32,
    RNG,
    b16,
    b32,
    bf16,
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
from vector_reference import INF, L16, NAN, check, clip, fmax, fmin, guarded, lanes, med3, rounding

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
