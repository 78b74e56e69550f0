"""Buffer, global, scratch and scalar memory instructions, waits and bounds."""

import numpy as np
import pytest
from harness import M32, b16, f16, f32, ints, run, signed
from memory_data import LANES, LDS, PARTIAL, addresses, lanes, word

from gcn_emulator import EmuError


def descriptor(array, records=None):
    base = array.ctypes.data
    size = array.nbytes if records is None else records
    return {4: base & M32, 5: base >> 32, 6: size, 7: 0x27000}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("ubyte", 1),
        ("sbyte", 1),
        ("ushort", 2),
        ("sshort", 2),
        ("dword", 4),
        ("dwordx2", 8),
        ("dwordx3", 12),
        ("dwordx4", 16),
    ],
)
def test_buffer_load(kind, size, lazy):
    memory = LDS[:2048].copy()
    where = addresses(4 if size >= 4 else 3).astype(np.uint32)
    where[::7] = 0x80000000  # how Triton masks lanes off
    where[1] = 1000 - 4  # partly outside for wide loads
    where[2] = 1000 - size
    where[3] = 1000
    records = 1000 + 20
    n = max(size // 4, 1)
    dst = "v2" if n == 1 else f"v[2:{1 + n}]"
    text = f"buffer_load_{kind} {dst}, v1, s[4:7], s8 offen offset:16\ns_waitcnt vmcnt(0)"
    s = descriptor(memory, records) | {8: 4}
    v = {1: where, **{2 + i: ints(3) for i in range(4)}}
    wave = run(text, v=v, s=s, arrays=[memory], exec_=PARTIAL, lazy=lazy)
    for lane in range(64):
        for i in range(n):
            at, width = int(where[lane]) + 16 + 4 * i, min(size, 4)
            x = word(memory, at + 4, width) if at + width <= records - 4 else 0
            if kind[0] == "s":
                x = signed(x, 8 * size) & M32
            want = x if PARTIAL >> lane & 1 else int(ints(3)[lane])
            assert int(wave.rows[2 + i][lane]) == want, (lane, i)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("byte", 1), ("short", 2), ("dword", 4), ("dwordx2", 8), ("dwordx4", 16), ("short_d16_hi", 2)],
)
def test_buffer_store(kind, size):
    memory = LDS[:2048].copy()
    where = (LANES * 16).astype(np.uint32)
    where[5] = 0x80000000
    where[9] = 1000
    records, n = 1008, max(size // 4, 1)
    data = {2 + i: ints(i) for i in range(n)}
    src = "v2" if n == 1 else f"v[2:{1 + n}]"
    run(
        f"buffer_store_{kind} {src}, v1, s[4:7], 0 offen",
        v={1: where, **data},
        s=descriptor(memory, records),
        arrays=[memory],
        exec_=PARTIAL,
    )
    want = LDS[:2048].copy()
    for lane in range(64):
        for i in range(n):
            at, width = int(where[lane]) + 4 * i, min(size, 4)
            if PARTIAL >> lane & 1 and at + width <= records:
                x = int(data[2 + i][lane]) >> (16 if "hi" in kind else 0)
                want[at : at + width] = list((x & (1 << 8 * width) - 1).to_bytes(width, "little"))
    assert np.array_equal(memory, want)


@pytest.mark.parametrize("lazy", [False, True])
def test_loads_to_lds(lazy):
    memory = LDS[:4096].copy()
    where = addresses(4)
    where[3] = 0x80000000
    zeros = np.zeros(4096, np.uint8)
    for size, kind in ((4, "dword"), (16, "dwordx4")):
        text = f"buffer_load_{kind} v1, s[4:7], 0 offen offset:8 lds\ns_waitcnt vmcnt(0)"
        wave = run(
            text, v={1: where}, s=descriptor(memory), m0=64, arrays=[memory], lds=zeros, lazy=lazy
        )
        for lane in range(64):
            for i in range(size // 4):
                at = int(where[lane]) + 8 + 4 * i
                want = word(memory, at) if at < 4096 else 0
                assert word(wave.lds.data.bytes, 64 + 8 + lane * size + 4 * i) == want
        address = where.astype(np.uint64) % np.uint64(1024) + np.uint64(memory.ctypes.data)
        v = {2: address & np.uint64(M32), 3: address >> np.uint64(32)}
        wave = run(
            f"global_load_lds_{kind} v[2:3], off\ns_waitcnt vmcnt(0)",
            v=v,
            m0=0,
            arrays=[memory],
            lds=zeros,
            lazy=lazy,
        )
        assert word(wave.lds.data.bytes, 5 * size) == word(memory, int(where[5]) % 1024)


def test_discarded_load_to_lds():
    """M0 = 0x7fffffff drops the data; any other address beyond LDS is an error."""
    memory, zeros = LDS[:1024].copy(), np.zeros(512, np.uint8)
    text = "buffer_load_dword v1, s[4:7], 0 offen lds"
    v, s = {1: LANES * 4}, descriptor(memory)
    wave = run(text, v=v, s=s, m0=0x7FFFFFFF, arrays=[memory], lds=zeros)
    assert not wave.lds.data.bytes[:512].any()
    with pytest.raises(EmuError, match="LDS access"):
        run(text, v=v, s=s, m0=512, arrays=[memory], lds=zeros)


def test_global():
    memory = LDS[:4096].copy()
    offsets = addresses(16)
    address = (
        offsets.astype(np.uint64) % np.uint64(4000 - 16 - 200) // np.uint64(16) * np.uint64(16)
    )
    absolute = address + np.uint64(memory.ctypes.data)
    v = {2: absolute & np.uint64(M32), 3: absolute >> np.uint64(32), 1: address.astype(np.uint32)}
    base = memory.ctypes.data
    s = {0: base & M32, 1: base >> 32}
    for kind, n in (("dword", 1), ("dwordx2", 2), ("dwordx3", 3), ("dwordx4", 4)):
        dst = "v10" if n == 1 else f"v[10:{9 + n}]"
        for where in ("v[2:3], off offset:64", "v1, s[0:1] offset:64"):
            wave = run(f"global_load_{kind} {dst}, {where}", v=v, s=s, arrays=[memory])
            for lane in range(64):
                for i in range(n):
                    assert int(wave.rows[10 + i][lane]) == word(
                        memory, int(address[lane]) + 64 + 4 * i
                    )
        target = np.zeros(4096, np.uint8)
        spread = (LANES * 16).astype(np.uint64) + np.uint64(target.ctypes.data)
        data = {10 + i: ints(i) for i in range(n)}
        where = {2: spread & np.uint64(M32), 3: spread >> np.uint64(32)}
        run(
            f"global_store_{kind} v[2:3], {dst}, off offset:4",
            v=where | data,
            arrays=[target],
            exec_=PARTIAL,
        )
        words = np.zeros(1024, np.uint32)
        for lane in range(64):
            for i in range(n):
                if PARTIAL >> lane & 1:
                    words[lane * 4 + 1 + i] = data[10 + i][lane]
        assert np.array_equal(target.view(np.uint32), words)
    wave = run("global_load_ushort v10, v[2:3], off offset:1", v=v, arrays=[memory])
    assert int(wave.rows[10][7]) == word(memory, int(address[7]) + 1, 2)
    wave = run("global_load_short_d16_hi v10, v[2:3], off", v=v | {10: ints(1)}, arrays=[memory])
    assert (
        int(wave.rows[10][7]) == word(memory, int(address[7]), 2) << 16 | int(ints(1)[7]) & 0xFFFF
    )


def test_global_atomics():
    table = {
        "add": lambda o, x: o + x,
        "sub": lambda o, x: o - x,
        "smin": lambda o, x: min(signed(o), signed(x)),
        "smax": lambda o, x: max(signed(o), signed(x)),
        "umin": min,
        "umax": max,
        "and": lambda o, x: o & x,
        "or": lambda o, x: o | x,
        "xor": lambda o, x: o ^ x,
        "swap": lambda o, x: x,
        "add_f32": lambda o, x: int(
            (np.uint32(o).view(np.float32) + np.uint32(x).view(np.float32)).view(np.uint32)
        ),
        "pk_add_f16": lambda o, x: b16(f16(o) + f16(x)) | b16(f16(o >> 16) + f16(x >> 16)) << 16,
    }
    for name, fn in table.items():
        data = ints(4) & np.uint32(0x3BFF3BFF) if "f" in name else ints(4)
        initial = ints(7)[:8] & np.uint32(0x3BFF3BFF) if "f" in name else ints(7)[:8]
        for mode in ("global", "buffer"):
            memory = initial.copy()
            address = (LANES % 5 * 4).astype(np.uint64) + np.uint64(memory.ctypes.data)
            v = {
                1: LANES % 5 * 4,
                2: address & np.uint64(M32),
                3: address >> np.uint64(32),
                4: data,
            }
            if mode == "global":
                text = f"global_atomic_{name} v5, v[2:3], v4, off sc0"
                result = 5
            else:
                text, result = f"buffer_atomic_{name} v4, v1, s[4:7], 0 offen sc0", 4
            wave = run(text, v=v, s=descriptor(memory), arrays=[memory], exec_=PARTIAL)
            want = lanes(initial)
            for lane in range(64):
                if PARTIAL >> lane & 1:
                    assert int(wave.rows[result][lane]) == want[lane % 5], (name, lane)
                    want[lane % 5] = fn(want[lane % 5], int(data[lane])) & M32
            assert lanes(memory) == want, name
    memory = np.arange(64, dtype=np.uint32)
    address = (LANES * 4).astype(np.uint64) + np.uint64(memory.ctypes.data)
    v = {
        2: address & np.uint64(M32),
        3: address >> np.uint64(32),
        4: LANES + 100,
        5: LANES // 2 * 2,
    }
    wave = run("global_atomic_cmpswap v6, v[2:3], v[4:5], off sc0", v=v, arrays=[memory])
    assert lanes(wave.rows[6]) == list(range(64))
    assert lanes(memory) == [i + 100 if i % 2 == 0 else i for i in range(64)]
    wide = np.zeros(2, np.uint64)
    at = wide.ctypes.data
    run(
        "global_atomic_add_x2 v[2:3], v[4:5], off",
        v={2: at & M32, 3: at >> 32, 4: M32, 5: 0},
        arrays=[wide],
    )
    assert int(wide[0]) == 64 * M32


@pytest.mark.parametrize("lazy", [False, True])
def test_scratch_and_scalar_loads(lazy):
    data = {4 + i: ints(i) for i in range(4)}
    for kind, n in (("dword", 1), ("dwordx2", 2), ("dwordx4", 4)):
        src = "v4" if n == 1 else f"v[4:{3 + n}]"
        dst = src.replace("v4", "v14").replace("v[4:", "v[14:").replace(f":{3 + n}]", f":{13 + n}]")
        text = f"scratch_store_{kind} off, {src}, off offset:16\ns_waitcnt vmcnt(0)\n"
        text += f"scratch_load_{kind} {dst}, off, off offset:16\ns_waitcnt vmcnt(0)"
        wave = run(text, v=data, scratch=64, lazy=lazy)
        for i in range(n):
            assert lanes(wave.rows[14 + i]) == lanes(data[4 + i])
    memory = ints(1)
    base = memory.ctypes.data
    for width in (1, 2, 4, 8, 16):
        name = "s_load_dword" + (f"x{width}" if width > 1 else "")
        text = f"{name} s[16:{15 + width}], s[0:1], 0x10\ns_waitcnt lgkmcnt(0)"
        wave = run(
            text.replace("s[16:16]", "s16"),
            s={0: base & M32, 1: base >> 32},
            arrays=[memory],
            lazy=lazy,
        )
        assert wave.sgprs[16 : 16 + width] == lanes(memory[4 : 4 + width])


@pytest.mark.parametrize(("allowed", "unready"), [(0, None), (1, 3), (2, 2)])
def test_reading_a_register_before_its_load_was_waited_for(allowed, unready):
    text = (
        f"ds_read_b32 v2, v1\nds_read_b32 v3, v1 offset:4\ns_waitcnt lgkmcnt({allowed})\n"
        "v_mov_b32_e32 v4, v2\nv_mov_b32_e32 v5, v3"
    )
    arguments = {"v": {1: (LANES * 4).astype(np.uint32)}, "lds": LDS, "lazy": True}
    if unready is None:
        wave = run(text, **arguments)
        assert int(wave.rows[4][3]) == word(LDS, 12)
        assert int(wave.rows[5][3]) == word(LDS, 16)
        return
    with pytest.raises(EmuError, match=rf"line {2 + unready}: .*reads v{unready} without waiting"):
        run(text, **arguments)


@pytest.mark.parametrize("allowed", [0, 1])
def test_scalar_loads_return_out_of_order(allowed):
    """A wait for a non-zero count guarantees nothing while scalar loads are outstanding."""
    memory = ints(1)
    base = memory.ctypes.data
    text = (
        "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\n"
        f"s_waitcnt lgkmcnt({allowed})\ns_mov_b32 s6, s4"
    )
    arguments = {"s": {0: base & M32, 1: base >> 32}, "arrays": [memory], "lazy": True}
    if allowed:
        with pytest.raises(EmuError, match="reads s4 without waiting for line 1: s_load_dword"):
            run(text, **arguments)
    else:
        assert run(text, **arguments).sgprs[6] == int(memory[0])


def test_bounds_and_unknown_instructions():
    memory = np.zeros(64, np.uint32)
    address = memory.ctypes.data + 256 - 2
    with pytest.raises(EmuError, match="out-of-bounds global access"):
        run(
            "global_load_dword v0, v[2:3], off",
            v={2: address & M32, 3: address >> 32},
            arrays=[memory],
        )
    with pytest.raises(EmuError, match=r"line 2: buffer_store_dword.*out-of-bounds"):
        run(
            "s_nop 0\nbuffer_store_dword v0, v1, s[4:7], 0 offen",
            v={1: 256},
            s=descriptor(memory, 4096),
            arrays=[memory],
        )
    with pytest.raises(EmuError, match="LDS access"):
        run("ds_read_b64 v[0:1], v2", v={2: 252}, lds=np.zeros(256, np.uint8))
    with pytest.raises(EmuError, match="LDS access"):
        run("ds_write_b32 v2, v0", v={2: 256}, lds=np.zeros(256, np.uint8))
    with pytest.raises(EmuError, match="scratch access"):
        run("scratch_load_dword v0, off, off offset:64", scratch=64)
    for text in (
        "v_unknown_f32 v0, v1",
        "s_wqm_b64 s[0:1], s[2:3]",
        "ds_append v0",
        "buffer_gl0_inv",
        "global_load_dwordx7 v0, v[0:1], off",
        "v_smfmac_f32_16x16x32_f16 v[0:3], v[4:5], v[6:9], v10",
        "image_load v0, v1",
        "v_mov_b32_dpp v0, v1 row_shr:1 fi:1",
        "buffer_load_dword v0, v1, s[0:3], 0 tfe",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
    ):
        with pytest.raises(EmuError, match=f"line 2: {text.split()[0]}"):
            run("s_nop 0\n" + text)


def test_f32_helper():
    assert f32(0x3F800000) == 1.0
