"""LDS instructions: reads, writes, transposing reads, lane exchange, atomics."""

import numpy as np
import pytest
from harness import FULL, M32, ints, run, signed
from memory_data import LANES, LDS, PARTIAL, addresses, lanes, word


@pytest.mark.parametrize("exec_", [FULL, PARTIAL])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("bits", [32, 64, 96, 128])
def test_lds_wide(bits, exec_, lazy):
    size, where, old = bits // 8, addresses(16), ints(8)
    dst = "v4" if bits == 32 else f"v[4:{3 + bits // 32}]"
    v = {1: where, **{4 + i: old for i in range(4)}}
    wave = run(
        f"ds_read_b{bits} {dst}, v1 offset:64\ns_waitcnt lgkmcnt(0)",
        v=v,
        lds=LDS,
        exec_=exec_,
        lazy=lazy,
    )
    for lane in range(64):
        for i in range(size // 4):
            want = word(LDS, int(where[lane]) + 64 + 4 * i) if exec_ >> lane & 1 else int(old[lane])
            assert int(wave.rows[4 + i][lane]) == want
    data = {10 + i: ints(20 + i) for i in range(size // 4)}
    src = "v10" if bits == 32 else f"v[10:{9 + bits // 32}]"
    wave = run(
        f"ds_write_b{bits} v1, {src} offset:32",
        v={1: where, **data},
        lds=LDS,
        exec_=exec_,
        lazy=lazy,
    )
    want = LDS.copy()
    for lane in range(64):
        if exec_ >> lane & 1:
            for i in range(size // 4):
                at = int(where[lane]) + 32 + 4 * i
                want[at : at + 4] = np.frombuffer(
                    int(data[10 + i][lane]).to_bytes(4, "little"), np.uint8
                )
    assert np.array_equal(wave.lds.data.bytes[: len(want)], want)


def test_lds_narrow():
    where, old = addresses(3), ints(8)
    for kind, size, sign in (("u8", 1, 0), ("i8", 1, 1), ("u16", 2, 0), ("i16", 2, 1)):
        wave = run(f"ds_read_{kind} v4, v1 offset:5", v={1: where, 4: old}, lds=LDS)
        for lane in range(64):
            x = word(LDS, int(where[lane]) + 5, size)
            assert int(wave.rows[4][lane]) == (signed(x, 8 * size) & M32 if sign else x)
    for kind in ("u16_d16", "u16_d16_hi", "u8_d16", "u8_d16_hi"):
        for lazy in (False, True):
            text = f"ds_read_{kind} v4, v1\ns_waitcnt lgkmcnt(0)"
            wave = run(text, v={1: where, 4: old}, lds=LDS, lazy=lazy)
            for lane in range(64):
                x = word(LDS, int(where[lane]), int(kind[1:3].rstrip("_")) // 8)
                keep = int(old[lane])
                want = keep & 0xFFFF | x << 16 if kind.endswith("hi") else keep & 0xFFFF0000 | x
                assert int(wave.rows[4][lane]) == want
    data = ints(3)
    for kind, size, shift in (
        ("b8", 1, 0),
        ("b16", 2, 0),
        ("b16_d16_hi", 2, 16),
        ("b8_d16_hi", 1, 16),
    ):
        wave = run(f"ds_write_{kind} v1, v2 offset:3", v={1: where, 2: data}, lds=LDS)
        want = LDS.copy()
        for lane in range(64):
            at, x = int(where[lane]) + 3, int(data[lane]) >> shift
            want[at : at + size] = list((x & (1 << 8 * size) - 1).to_bytes(size, "little"))
        assert np.array_equal(wave.lds.data.bytes[: len(want)], want)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("st64", ["", "st64"])
def test_lds_pairs(bits, st64):
    n = bits // 32
    unit = bits // 8 * (64 if st64 else 1)
    where = addresses(8)
    o0, o1 = 1, 5
    dst = f"v[1:{2 * n}]"  # overlaps the address register
    wave = run(f"ds_read2{st64}_b{bits} {dst}, v1 offset0:{o0} offset1:{o1}", v={1: where}, lds=LDS)
    for lane in range(64):
        for part, offset in enumerate((o0, o1)):
            for i in range(n):
                want = word(LDS, int(where[lane]) + offset * unit + 4 * i)
                assert int(wave.rows[1 + part * n + i][lane]) == want
    data = {10 + i: ints(i) for i in range(2 * n)}
    srcs = "v10, v11" if n == 1 else "v[10:11], v[12:13]"
    base = (LANES * 8).astype(np.uint32)
    if not st64:
        base *= 8
    wave = run(
        f"ds_write2{st64}_b{bits} v1, {srcs} offset0:2 offset1:3", v={1: base, **data}, lds=LDS
    )
    want = LDS.copy()
    for part, offset in enumerate((2, 3)):
        for lane in range(64):
            for i in range(n):
                at = int(base[lane]) + offset * unit + 4 * i
                want[at : at + 4] = list(int(data[10 + part * n + i][lane]).to_bytes(4, "little"))
    assert np.array_equal(wave.lds.data.bytes[: len(want)], want)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transposing_read(bits):
    """Groups of 16 lanes exchange a (64 / bits) x 16 matrix and receive its columns."""
    where = (LANES * 8).astype(np.uint32)
    wave = run(f"ds_read_b64_tr_b{bits} v[2:3], v1", v={1: where}, lds=LDS)
    rows, lanes_per_row = 64 // bits, bits // 4
    for lane in range(64):
        group, column = divmod(lane, 16)
        got = int(wave.rows[2][lane]) | int(wave.rows[3][lane]) << 32
        for row in range(rows):
            holder = 16 * group + row * lanes_per_row + column * bits // 64
            element = column % (64 // bits)
            want = word(LDS, int(where[holder]), 8) >> element * bits & (1 << bits) - 1
            assert got >> row * bits & (1 << bits) - 1 == want


@pytest.mark.parametrize("exec_", [FULL, PARTIAL])
def test_lane_exchange(exec_):
    index, data, old = ints(1), ints(2), ints(3)
    v = {0: old, 1: index, 2: data}

    def active(lane):
        return exec_ >> lane & 1

    wave = run("ds_bpermute_b32 v0, v1, v2", v=v, exec_=exec_)
    for lane in range(64):
        source = int(index[lane]) // 4 % 64
        want = (int(data[source]) if active(source) else 0) if active(lane) else int(old[lane])
        assert int(wave.rows[0][lane]) == want
    wave = run("ds_permute_b32 v0, v1, v2", v=v, exec_=exec_)
    out = [0] * 64
    for lane in range(64):
        if active(lane):
            out[int(index[lane]) // 4 % 64] = int(data[lane])
    assert all(int(wave.rows[0][i]) == (out[i] if active(i) else int(old[i])) for i in range(64))
    patterns = {
        "swizzle(SWAP,16)": lambda i: i ^ 16,
        "swizzle(SWAP,1)": lambda i: i ^ 1,
        "swizzle(REVERSE,8)": lambda i: i ^ 7,
        "swizzle(BROADCAST,4,2)": lambda i: i // 4 * 4 + 2,
        "swizzle(QUAD_PERM,3,1,0,2)": lambda i: i // 4 * 4 + (3, 1, 0, 2)[i % 4],
        'swizzle(BITMASK_PERM,"01pi0")': lambda i: i & 32 | 8 | i & 4 | ~i & 2,
    }
    for text, fn in patterns.items():
        wave = run(f"ds_swizzle_b32 v0, v2 offset:{text}", v=v)
        assert lanes(wave.rows[0]) == [int(data[fn(i)]) for i in range(64)], text


def test_lds_atomics():
    where = (LANES % 5 * 4).astype(np.uint32)
    data = ints(4)
    start = np.frombuffer(ints(7).tobytes(), np.uint8).copy()
    table = {
        "add_u32": lambda o, x: o + x,
        "sub_u32": lambda o, x: o - x,
        "min_u32": min,
        "max_u32": max,
        "min_i32": lambda o, x: min(signed(o), signed(x)),
        "and_b32": lambda o, x: o & x,
        "max_i32": lambda o, x: max(signed(o), signed(x)),
        "or_b32": lambda o, x: o | x,
        "xor_b32": lambda o, x: o ^ x,
    }
    for name, fn in table.items():
        op, kind = name.split("_")
        for rtn in ("", "_rtn"):
            text = f"ds_{op}{rtn}_{kind} {'v3, ' if rtn else ''}v1, v2"
            wave = run(text, v={1: where, 2: data}, lds=start, exec_=PARTIAL)
            memory = lanes(start.view(np.uint32))
            for lane in range(64):
                if PARTIAL >> lane & 1:
                    if rtn:
                        assert int(wave.rows[3][lane]) == memory[lane % 5]
                    memory[lane % 5] = fn(memory[lane % 5], int(data[lane])) & M32
            assert lanes(wave.lds.data.words[:64]) == memory
    wave = run(
        "ds_cmpst_rtn_b32 v3, v1, v2, v4",
        v={1: LANES * 4, 2: start.view(np.uint32), 4: data},
        lds=start,
    )
    assert lanes(wave.lds.data.words[:64]) == lanes(data)
    zero = np.zeros(256, np.uint8)
    wave = run(
        "ds_add_f32 v1, v2", v={1: np.zeros(64), 2: np.float32(1.5).view(np.uint32)}, lds=zero
    )
    assert wave.lds.data.words.view(np.float32)[0] == 96


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("ds_read_b32 v4, v1 offset:4096", 4096),
        ("ds_read2_b32 v[4:5], v1 offset0:16 offset1:17", 64),
        ("ds_read_u16 v4, v1 offset:512", 512),
    ],
)
def test_lds_addresses_wrap_at_32_bits(text, offset):
    """LLVM splits an address into a negative base and an offset that brings it back."""
    base = (np.arange(64, dtype=np.int64) * 8 - offset) & M32
    wave = run(text + "\ns_waitcnt lgkmcnt(0)", v={1: base.astype(np.uint32)}, lds=LDS)
    size = 2 if "u16" in text else 4
    for lane in range(64):
        assert int(wave.rows[4][lane]) == word(LDS, lane * 8, size)
