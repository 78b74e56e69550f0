"""Small float formats and their conversion instructions, from the format definitions."""

import math

import numpy as np
import pytest
from harness import b16, f32, floats, ints, run, same_float

FORMATS = {
    "e4m3": (4, 3, False),
    "e5m2": (5, 2, False),
    "e4m3fnuz": (4, 3, True),
    "e5m2fnuz": (5, 2, True),
}
KIND = {
    ("gfx950", "fp8"): "e4m3",
    ("gfx950", "bf8"): "e5m2",
    ("gfx942", "fp8"): "e4m3fnuz",
    ("gfx942", "bf8"): "e5m2fnuz",
}
SATURATE = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def decode(code, kind):
    exp_bits, man_bits, fnuz = FORMATS[kind]
    sign = -1 if code & 128 else 1
    e, m = code >> man_bits & (1 << exp_bits) - 1, code & (1 << man_bits) - 1
    if fnuz and code == 0x80:
        return math.nan
    if not fnuz and exp_bits == 4 and code & 127 == 127:
        return math.nan
    if not fnuz and exp_bits == 5 and e == 31:
        return math.nan if m else sign * math.inf
    bias = (1 << exp_bits - 1) - (0 if fnuz else 1)
    if e == 0:
        return sign * m * 2.0 ** (1 - bias - man_bits)
    return sign * (1 + m / (1 << man_bits)) * 2.0 ** (e - bias)


def nearest(x, kind):
    """Saturating round to nearest even by exhaustive search."""
    if x != x:
        return None
    codes = [c for c in range(256) if math.isfinite(decode(c, kind))]
    top = max(decode(c, kind) for c in codes)
    x = max(-top, min(top, x))
    return min(
        codes,
        key=lambda c: (abs(decode(c, kind) - x), c & 1, (c >> 7) != (math.copysign(1, x) < 0)),
    )


@pytest.mark.parametrize(("arch", "name"), KIND)
def test_decode(arch, name):
    kind, x = KIND[arch, name], ints(1)
    for suffix, mods, shift in (
        ("_e32", "", 0),
        ("_sdwa", "src0_sel:WORD_1", 16),
        ("_e64", "op_sel:[1,0]", 16),
    ):
        wave = run(f"v_cvt_pk_f32_{name}{suffix} v[2:3], v1 {mods}", v={1: x}, arch=arch)
        for lane in range(64):
            for i in range(2):
                want = decode(int(x[lane]) >> shift + 8 * i & 255, kind)
                got = f32(int(wave.rows[2 + i][lane]))
                assert got == want or (got != got and want != want)
    for sel, shift in (("BYTE_0", 0), ("BYTE_2", 16), ("BYTE_3", 24)):
        wave = run(f"v_cvt_f32_{name}_sdwa v2, v1 src0_sel:{sel}", v={1: x}, arch=arch)
        want = decode(int(x[5]) >> shift & 255, kind)
        assert f32(int(wave.rows[2][5])) == want or want != want


@pytest.mark.parametrize(("arch", "name"), KIND)
def test_encode(arch, name):
    kind = KIND[arch, name]
    rng = np.random.default_rng(0)
    x = floats(2)
    y = (
        (rng.standard_normal(64) * 2.0 ** rng.integers(-9, 9, 64))
        .astype(np.float32)
        .view(np.uint32)
    )
    old = ints(5)
    for high in (0, 1):
        wave = run(
            f"{SATURATE}v_cvt_pk_{name}_f32 v0, v1, v2 op_sel:[0,0,{high}]",
            v={0: old, 1: x, 2: y},
            arch=arch,
        )
        for lane in range(64):
            got = int(wave.rows[0][lane])
            part, kept = (got >> 16, got & 0xFFFF) if high else (got & 0xFFFF, got >> 16)
            assert kept == (int(old[lane]) & 0xFFFF if high else int(old[lane]) >> 16)
            for code, bits in ((part & 255, x[lane]), (part >> 8, y[lane])):
                value, want = f32(int(bits)), nearest(f32(int(bits)), kind)
                if want is None:
                    assert math.isnan(decode(code, kind))
                else:
                    assert decode(code, kind) == decode(want, kind), value


def test_overflow_without_clamping():
    x = np.zeros(64, np.float32)
    x[:6] = [448, 464, 465, -1e9, 57344, 61440]
    wave = run(
        "v_cvt_pk_fp8_f32 v0, v1, v1\nv_cvt_pk_bf8_f32 v2, v1, v1",
        v={0: 0, 1: x.view(np.uint32), 2: 0},
    )
    assert [int(c) & 255 for c in wave.rows[0][:4]] == [0x7E, 0x7E, 0x7F, 0x7F]
    assert [int(c) & 255 for c in wave.rows[2][3:6]] == [0xFC, 0x7B, 0x7C]


@pytest.mark.parametrize("name", ["fp8", "bf8"])
@pytest.mark.parametrize("exponent", [-3, 0, 5])
def test_scaled(name, exponent):
    kind = KIND["gfx950", name]
    scale = int(np.float32(2.0**exponent).view(np.uint32))
    x, y, codes, old = floats(1), floats(3), ints(2), ints(4)
    for high in (0, 1):
        text = f"{SATURATE}v_cvt_scalef32_pk_{name}_f32 v0, v1, v2, s0 op_sel:[0,0,0,{high}]"
        wave = run(text, v={0: old, 1: x, 2: y}, s={0: scale})
        for lane in range(64):
            part = int(wave.rows[0][lane]) >> 16 * high & 0xFFFF
            for code, bits in ((part & 255, x[lane]), (part >> 8, y[lane])):
                want = nearest(f32(int(bits)) / 2.0**exponent, kind)
                assert want is None or decode(code, kind) == decode(want, kind)
        text = f"v_cvt_scalef32_pk_f32_{name} v[2:3], v1, s0 op_sel:[{high},0]"
        wave = run(text, v={1: codes}, s={0: scale})
        for lane in range(64):
            for i in range(2):
                want = decode(int(codes[lane]) >> 16 * high + 8 * i & 255, kind) * 2.0**exponent
                got = f32(int(wave.rows[2 + i][lane]))
                assert got == want or want != want
        wave = run(
            text.replace("pk_f32_", "pk_f16_").replace("v[2:3]", "v2"), v={1: codes}, s={0: scale}
        )
        value = decode(int(codes[9]) >> 16 * high & 255, kind) * 2.0**exponent
        assert same_float(int(wave.rows[2][9]) & 0xFFFF, b16(value), "h")


@pytest.mark.parametrize("byte", range(4))
def test_scaled_fp4(byte):
    codes, old, x, y = ints(2), ints(4), floats(1), floats(3)
    scale = int(np.float32(2.0).view(np.uint32))
    text = f"v_cvt_scalef32_pk_f32_fp4 v[2:3], v1, s0 op_sel:[{byte & 1},{byte >> 1}]"
    wave = run(text, v={1: codes}, s={0: scale})
    for lane in range(64):
        octet = int(codes[lane]) >> 8 * byte & 255
        assert f32(int(wave.rows[2][lane])) == 2 * FP4[octet & 15]
        assert f32(int(wave.rows[3][lane])) == 2 * FP4[octet >> 4]
    text = f"v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, s0 op_sel:[0,0,{byte & 1},{byte >> 1}]"
    wave = run(text, v={0: old, 1: x, 2: y}, s={0: scale})
    for lane in range(64):
        got = int(wave.rows[0][lane])
        assert (got ^ int(old[lane])) & ~(255 << 8 * byte) == 0
        octet = got >> 8 * byte & 255
        for code, bits in ((octet & 15, x[lane]), (octet >> 4, y[lane])):
            value = f32(int(bits)) / 2
            if value == value:
                value = max(-6.0, min(6.0, value))
                best = min(range(16), key=lambda c: (abs(FP4[c] - value), c & 1))
                assert FP4[code] == FP4[best]
