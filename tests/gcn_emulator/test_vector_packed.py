"""Packed, 16-bit, mixed-precision and bfloat16 vector instructions."""

import numpy as np
import pytest
from harness import (
    b16,
    b32,
    bf16,
    f16,
    f32,
    floats,
    halves,
    ints,
    run,
    same_float,
    signed,
)
from vector_reference import L16, check, fmax, fmin, guarded, lanes


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
