"""Integer vector instructions, carries, lane access and EXEC."""

from fractions import Fraction

import numpy as np
import pytest
from harness import (
    FULL,
    M32,
    b16,
    b32,
    ints,
    run,
    signed,
)
from vector_reference import (
    L16,
    S,
    bits_above,
    bits_below,
    check,
    clip,
    dot4,
    field,
    lanes,
    perm,
    s24,
    sad,
    u24,
)

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
