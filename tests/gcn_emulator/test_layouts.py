"""The emulator's register layouts against an independent form of them, and against Triton's.

Triton's own layouts are the second witness: it places operands in registers and reads results back
by layouts of its own, which run on the hardware. Kernels below give other results when a layout is
wrong; that they do is shown by breaking each layout in turn.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from harness import run
from layouts import result_place, source_place, transposed_source

from gcn_emulator import lds_instructions, mfma, triton_driver
from gcn_emulator.formats import FP4, FP8
from gcn_emulator.triton_driver import emulate

# mnemonic, M = N, K, blocks, operand bits
DENSE = [
    ("v_mfma_f32_32x32x2_f32", 32, 2, 1, 32),
    ("v_mfma_f32_16x16x4_f32", 16, 4, 1, 32),
    ("v_mfma_f32_32x32x8_f16", 32, 8, 1, 16),
    ("v_mfma_f32_16x16x16_f16", 16, 16, 1, 16),
    ("v_mfma_f32_32x32x16_f16", 32, 16, 1, 16),
    ("v_mfma_f32_16x16x32_f16", 16, 32, 1, 16),
    ("v_mfma_f32_4x4x4_16b_f16", 4, 4, 16, 16),
    ("v_mfma_f32_16x16x4_4b_f16", 16, 4, 4, 16),
    ("v_mfma_f32_32x32x4_2b_f16", 32, 4, 2, 16),
    ("v_mfma_i32_32x32x16_i8", 32, 16, 1, 8),
    ("v_mfma_i32_16x16x32_i8", 16, 32, 1, 8),
    ("v_mfma_i32_32x32x32_i8", 32, 32, 1, 8),
    ("v_mfma_i32_16x16x64_i8", 16, 64, 1, 8),
]
ONE = {32: 0x3F800000, 16: 0x3C00, 8: 1}


def register_text(first, count):
    return f"v{first}" if count == 1 else f"v[{first}:{first + count - 1}]"


def one_hot(registers, lane, item, bits, code):
    """Set one element of an operand held in uint32[registers, 64]."""
    registers[item * bits // 32, lane] |= np.uint32(code << (item * bits % 32))


@pytest.mark.parametrize(("name", "m", "k", "blocks", "bits"), DENSE)
def test_dense_layouts_follow_the_closed_form(name, m, k, blocks, bits):
    """One-hot operands: A[i][k] = B[k][j] = 1 must set exactly D[i][j], for sampled i, j, k."""
    rng = np.random.default_rng(7)
    count = k * m * blocks * bits // (32 * 64)
    results = m * m * blocks // 64
    corners = [(0, 0, 0, 0), (m - 1, 0, k - 1, blocks - 1), (0, m - 1, k - 1, 0)]
    samples = corners + [tuple(int(rng.integers(x)) for x in (m, m, k, blocks)) for _ in range(20)]
    for i, j, kk, b in samples:
        place = {"m": m, "depth": k, "blocks": blocks, "pass_items": None}
        a, bb = np.zeros((count, 64), np.uint32), np.zeros((count, 64), np.uint32)
        one_hot(a, *source_place(i, kk, b, **place), bits, ONE[bits])
        one_hot(bb, *source_place(j, kk, b, **place), bits, ONE[bits])
        v = {10 + r: row for r, row in enumerate(a)} | {30 + r: row for r, row in enumerate(bb)}
        operands = [register_text(60, results), register_text(10, count), register_text(30, count)]
        text = f"{name} {', '.join(operands)}, 0"
        out = run(text, v=v).vgprs[60 : 60 + results]
        lane, item = result_place(i, j, b, m=m, n=m)
        want = np.zeros((results, 64), np.uint32)
        want[item, lane] = 1 if "_i32_" in name else ONE[32]
        assert np.array_equal(out, want), (i, j, kk, b)


def test_f64_layout_follows_the_closed_form():
    bits = int(np.float64(1).view(np.uint64))
    for i, j, k in [(0, 0, 0), (5, 3, 1), (15, 2, 3), (4, 15, 2), (10, 9, 0)]:
        v = {r: np.zeros(64, np.uint32) for r in (10, 11, 12, 13)}
        for base, row in ((10, i), (12, j)):
            lane, _ = source_place(row, k, 0, m=16, depth=4, blocks=1, pass_items=None)
            v[base][lane], v[base + 1][lane] = bits & 0xFFFFFFFF, bits >> 32
        wave = run("v_mfma_f64_16x16x4_f64 v[20:27], v[10:11], v[12:13], 0", v=v)
        lane, item = result_place(i, j, 0, m=16, n=16, h=1)
        want = np.zeros((8, 64), np.uint32)
        want[2 * item + 1, lane] = bits >> 32
        assert np.array_equal(wave.vgprs[20:28], want)


SMALL = {0: (8, FP8["e4m3"]), 1: (8, FP8["e5m2"]), 4: (4, FP4)}


@pytest.mark.parametrize("fa", SMALL)
@pytest.mark.parametrize("fb", SMALL)
@pytest.mark.parametrize(("m", "k"), [(32, 64), (16, 128)])
def test_f8f6f4_layouts_follow_the_closed_form(fa, fb, m, k):
    """Block scales tell the k values apart: element k carries the scale of block k // 32."""
    rng = np.random.default_rng(11)
    scales = rng.integers(1, 120, (2, 64)).astype(np.uint32)
    for _ in range(12):
        i, j, kk = (int(rng.integers(x)) for x in (m, m, k))
        operands = []
        for code, row in ((fa, i), (fb, j)):
            bits, table = SMALL[code]
            registers = np.zeros((k * m * bits // (32 * 64), 64), np.uint32)
            place = source_place(row, kk, 0, m=m, depth=k, blocks=1, pass_items=128 // bits)
            one_hot(registers, *place, bits, int(np.nonzero(table == 1)[0][0]))
            operands.append(registers)
        (a, b), (na, nb), results = operands, map(len, operands), m * m // 64
        v = {10 + r: x for r, x in enumerate(a)} | {30 + r: x for r, x in enumerate(b)}
        text = (
            f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4 {register_text(60, results)}, "
            f"{register_text(10, na)}, {register_text(30, nb)}, 0, v8, v9 cbsz:{fa} blgp:{fb}"
        )
        out = (
            run(text, v=v | {8: scales[0], 9: scales[1]}).vgprs[60 : 60 + results].view(np.float32)
        )
        lane, item = result_place(i, j, 0, m=m, n=m)
        # the scale of (row, block) sits in lane row + M * block, byte 0
        exponents = (int(scales[s, row + m * (kk // 32)]) - 127 for s, row in ((0, i), (1, j)))
        want = np.zeros((results, 64), np.float32)
        want[item, lane] = 2.0 ** sum(exponents)
        assert np.array_equal(out, want), (i, j, kk)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transposing_reads_follow_the_closed_form(bits):
    data = np.random.default_rng(3).integers(0, 256, 512).astype(np.uint8)
    where = (np.random.default_rng(4).permutation(64) * 8).astype(np.uint32)
    wave = run(f"ds_read_b64_tr_b{bits} v[2:3], v1", v={1: where}, lds=data)

    def element(lane, item):
        word = int.from_bytes(data[int(where[lane]) :][:8].tobytes(), "little")
        return word >> (bits * item) & (1 << bits) - 1

    for lane in range(64):
        got = int(wave.rows[2][lane]) | int(wave.rows[3][lane]) << 32
        for item in range(64 // bits):
            want = element(*transposed_source(lane, item, bits))
            assert got >> (bits * item) & (1 << bits) - 1 == want, (lane, item)


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))


@triton.jit
def _chained(a_ptr, b_ptr, v_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The first result stays in registers as the second product's operand: D's rows are A's k."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    p = tl.dot(a, b).to(v_ptr.dtype.element_ty)
    v = tl.load(v_ptr + n[:, None] * K + k[None, :])
    tl.store(c_ptr + m[:, None] * K + k[None, :], tl.dot(p, v))


@triton.jit
def _scaled(
    a_ptr,
    sa_ptr,
    b_ptr,
    sb_ptr,
    c_ptr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KA: tl.constexpr,
    KB: tl.constexpr,
):
    m, n, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * KA + tl.arange(0, KA)[None, :])
    b = tl.load(b_ptr + n[None, :] * KB + tl.arange(0, KB)[:, None])
    sa = tl.load(sa_ptr + m[:, None] * (K // 32) + s[None, :])
    sb = tl.load(sb_ptr + n[:, None] * (K // 32) + s[None, :])
    c = tl.dot_scaled(a, sa, A_FORMAT, b, sb, B_FORMAT)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


def run_dot(arch, nonkdim, dtype=torch.float16):
    torch.manual_seed(0)
    a, b = torch.randint(-4, 5, (64, 64)).to(dtype), torch.randint(-4, 5, (64, 32)).to(dtype)
    c = torch.full((64, 32), float("nan"))
    with emulate(arch, counters=True) as driver:
        _dot[(1,)](a, b, c, M=64, N=32, K=64, num_warps=4, matrix_instr_nonkdim=nonkdim)
    return c, a.float() @ b.float(), driver.records[-1].counters


def run_chained(arch, nonkdim):
    torch.manual_seed(1)
    a, b = torch.randint(-2, 3, (64, 64)).half(), torch.randint(-2, 3, (64, 32)).half()
    v, c = torch.randint(-2, 3, (32, 64)).half(), torch.full((64, 64), float("nan"))
    with emulate(arch, counters=True) as driver:
        _chained[(1,)](a, b, v, c, M=64, N=32, K=64, num_warps=4, matrix_instr_nonkdim=nonkdim)
    return c, (a.float() @ b.float()) @ v.float(), driver.records[-1].counters


def _operand(kind, rows, k):
    """Codes as the kernel loads them, and their float32 values."""
    generator = np.random.default_rng(rows + k)
    if kind == "e2m1":
        codes = generator.integers(0, 16, (rows, k)).astype(np.uint8)
        return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), torch.from_numpy(FP4[codes])
    table = FP8[kind]
    usable = np.nonzero(np.isfinite(table) & (np.abs(table) <= 4))[0]
    codes = generator.choice(usable, (rows, k)).astype(np.uint8)
    torch_type = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    return torch.from_numpy(codes).view(torch_type), torch.from_numpy(table[codes])


def run_scaled(kind_a, kind_b, nonkdim):
    m, n, k = 32, 64, 128
    (a, fa), (b, fb) = _operand(kind_a, m, k), _operand(kind_b, n, k)
    generator = np.random.default_rng(5)
    sa, sb = (
        torch.from_numpy(generator.integers(120, 135, (x, k // 32)).astype(np.uint8))
        for x in (m, n)
    )
    c = torch.full((m, n), float("nan"))
    with emulate("gfx950", counters=True) as driver:
        _scaled[(1,)](
            a,
            sa,
            b,
            sb,
            c,
            A_FORMAT=kind_a,
            B_FORMAT=kind_b,
            M=m,
            N=n,
            K=k,
            KA=a.shape[1],
            KB=b.shape[1],
            num_warps=4,
            matrix_instr_nonkdim=nonkdim,
        )

    def scaled(x, s):
        return x.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1)

    a64, b64 = scaled(fa, sa), scaled(fb, sb)
    rounding = 1e-6 * (a64.abs() @ b64.abs().T)  # of float32 accumulation, whatever its order
    return (c.double() - a64 @ b64.T).abs() / rounding, driver.records[-1].counters


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("nonkdim", [16, 32])
@pytest.mark.parametrize("case", [run_dot, run_chained])
def test_triton_agrees_about_result_and_operand_layouts(arch, nonkdim, case):
    got, want, counters = case(arch, nonkdim)
    assert torch.equal(got, want)
    assert counters.total(f"v_mfma_f32_{nonkdim}x{nonkdim}") > 0


@pytest.mark.parametrize("nonkdim", [16, 32])
@pytest.mark.parametrize(
    ("kind_a", "kind_b"), [("e4m3", "e4m3"), ("e2m1", "e4m3"), ("e5m2", "e2m1"), ("e2m1", "e2m1")]
)
def test_triton_agrees_about_block_scaled_layouts(nonkdim, kind_a, kind_b):
    error, counters = run_scaled(kind_a, kind_b, nonkdim)
    assert error.max() < 1
    assert counters.total(f"v_mfma_scale_f32_{nonkdim}x{nonkdim}") > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_triton_agrees_about_transposing_reads(dtype):
    got, want, counters = run_dot("gfx950", 16, dtype)
    assert torch.equal(got, want)
    assert counters.total(f"ds_read_b64_tr_b{16 if dtype == torch.float16 else 8}") > 0


def _rows_exchanged(original):
    def broken(product):
        out = original(product).copy()
        out[[1, 2]] = out[[2, 1]]
        return out

    return broken


def _columns_exchanged(original):
    def broken(product):
        return np.ascontiguousarray(
            original(product).reshape(-1, 64)[:, np.arange(64) ^ 16]
        ).reshape(-1, product.shape[0] * 64)

    return broken


def _rotated_elements(original):
    def broken(data, bits):
        return np.roll(original(data, bits), 16, axis=1)

    return broken


BREAKS = {
    "rows of the result": (mfma, "_to_registers", _rows_exchanged, lambda: run_dot("gfx942", 16)),
    "lanes of the result": (
        mfma,
        "_to_registers",
        _columns_exchanged,
        lambda: run_dot("gfx950", 32),
    ),
    "rows, result as operand": (
        mfma,
        "_to_registers",
        _rows_exchanged,
        lambda: run_chained("gfx942", 16),
    ),
    "transposing reads": (
        lds_instructions,
        "transpose_read",
        _rotated_elements,
        lambda: run_dot("gfx950", 16),
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_layout_is_noticed(monkeypatch, what):
    module, name, breaks, case = BREAKS[what]
    monkeypatch.setattr(module, name, breaks(getattr(module, name)))
    monkeypatch.setattr(triton_driver, "_KERNELS", {})  # decode again
    got, want, _ = case()
    assert not torch.equal(got, want)


def test_broken_block_scale_layout_is_noticed(monkeypatch):
    original = mfma._scale_reader

    def broken(op, byte, groups, m):
        read = original(op, byte, groups, m)
        return lambda w: read(w)[:, :, :, ::-1]  # the scales of the k groups in the wrong order

    monkeypatch.setattr(mfma, "_scale_reader", broken)
    monkeypatch.setattr(triton_driver, "_KERNELS", {})
    error, _ = run_scaled("e4m3", "e4m3", 16)
    assert error.max() > 1000
