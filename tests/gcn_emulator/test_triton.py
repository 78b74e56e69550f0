"""Whole kernels through the Triton driver: the sliding-window regression, counters, races."""

import pytest
import torch
import triton
import triton.language as tl

from gcn_emulator import EmuError
from gcn_emulator.triton_driver import _KERNELS, EmulatorDriver, emulate

ARCHS = ["gfx942", "gfx950"]


@triton.jit
def window_attention(Q, K, V, O, T, W: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """Three consecutive loops; the first compiles dist < W into ~dist > -W - 1 (s_movk_i32)."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * B
    m, n, d = m0 + tl.arange(0, B), tl.arange(0, B), tl.arange(0, D)
    q = tl.load(Q + m[:, None] * D + d[None, :], mask=m[:, None] < T, other=0.0)
    acc = tl.zeros([B, D], tl.float32)
    l = tl.zeros([B], tl.float32)
    mx = tl.full([B], -1e30, tl.float32)
    lo = tl.maximum(m0 - (W - 1), 0) // B * B
    full = tl.minimum(tl.maximum(m0 + B - 1 - W + B, 0) // B * B, m0)
    for part in tl.static_range(3):
        if part == 0:
            first, last = lo, full
        elif part == 1:
            first, last = full, m0
        else:
            first, last = m0, tl.minimum(m0 + B, T)
        for j in range(first, last, B):
            k = tl.load(K + (j + n)[None, :] * D + d[:, None], mask=(j + n)[None, :] < T, other=0.0)
            s = tl.dot(q, k) * 0.0884
            if part != 1:
                dist = m[:, None] - (j + n)[None, :]
                s = tl.where((dist >= 0) & (dist < W), s, -1e30)
            new = tl.maximum(mx, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            a = tl.exp2(mx - new)
            l = l * a + tl.sum(p, 1)
            v = tl.load(V + (j + n)[:, None] * D + d[None, :], mask=(j + n)[:, None] < T, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * a[:, None])
            mx = new
    tl.store(
        O + m[:, None] * D + d[None, :],
        (acc / l[:, None]).to(O.dtype.element_ty),
        mask=m[:, None] < T,
    )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("window", [64, 128, 192, 512])
@pytest.mark.parametrize("lazy", [False, True])
def test_sliding_window_attention(arch, window, lazy):
    torch.manual_seed(0)
    t, d = 320, 128
    q, k, v = (torch.randn(t, d).to(torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, 7.0)
    with emulate(arch, lazy=lazy):
        window_attention[(5,)](
            q, k, v, out, t, W=window, B=64, D=d, num_warps=4, matrix_instr_nonkdim=16
        )
    dist = torch.arange(t)[:, None] - torch.arange(t)[None]
    s = (q.float() @ k.float().T) * 0.0884 / 1.4426950408889634
    s = s.masked_fill((dist < 0) | (dist >= window), float("-inf"))
    want = s.softmax(-1) @ v.float()
    assert ((out.float() - want).norm() / want.norm()) < 3e-3


@triton.jit
def gemm(A, B, C, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(0, K, BK):
        a = tl.load(A + m[:, None] * K + (i + k)[None, :])
        acc = tl.dot(a, tl.load(B + (i + k)[:, None] * N + n[None, :]), acc)
    tl.store(C + m[:, None] * N + n[None, :], acc)


def run_gemm(arch, edit=None, dtype=torch.float16, **driver):
    torch.manual_seed(0)
    a, b = torch.randn(64, 128).to(dtype), torch.randn(128, 64).to(dtype)
    c = torch.empty(64, 64)
    with emulate(arch, **driver) as active:
        if edit:
            compiled = gemm.warmup(a, b, c, 128, M=64, N=64, BK=64, grid=(1,))
            kernel = type(next(iter(_KERNELS.values())))(edit(compiled.asm["amdgcn"]), arch)
            values = [x.data_ptr() for x in (a, b, c)] + [128]
            regions = [
                x.numpy().reshape(-1).view("uint8")
                if x.dtype != torch.bfloat16
                else x.view(torch.int16).numpy()
                for x in (a, b, c)
            ]
            kernel.run((1,), values, compiled.metadata.shared, 4, regions=regions)
            return (c - a.float() @ b.float()).abs().max().item(), kernel.races
        gemm[(1,)](a, b, c, 128, M=64, N=64, BK=64)
    assert (c - a.float() @ b.float()).abs().max() < 1e-3
    return active.records[-1]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counters_and_static_information(arch, dtype):
    record = run_gemm(arch, dtype=dtype, counters=True)
    counters, static = record.counters, record.static
    assert counters.mfma_flops == 2 * 64 * 64 * 128
    assert counters.waves == 4
    assert counters.valu > 0
    assert counters.traffic.load_bytes == 2 * 64 * 128 * 2
    assert counters.traffic.store_bytes == 64 * 64 * 4
    assert counters.traffic.store_lines >= 64 * 64 * 4 // 128
    assert counters.traffic.lds_cycles >= counters.traffic.lds_ideal_cycles > 0
    assert static.lds >= 64 * 64 * 2
    assert static.scratch == 0
    assert static.vgpr_spills == 0
    assert 1 <= static.occupancy <= 8
    assert static.vgprs > 16
    assert static.fits


@pytest.mark.parametrize("arch", ARCHS)
def test_removed_barriers_and_waits_are_noticed(arch):
    error, races = run_gemm(arch, lambda asm: asm)
    assert error < 1e-3
    assert not races
    _, races = run_gemm(arch, lambda asm: asm.replace("\ts_barrier", "\ts_nop 0 ;"))
    assert races
    with pytest.raises(EmuError, match="without waiting for line"):
        run_gemm(arch, lambda asm: asm.replace("\ts_waitcnt", "\ts_nop 0 ;"))


@triton.jit
def out_of_bounds(X, Y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(Y + o, tl.load(X + o))


@pytest.mark.parametrize("arch", ARCHS)
def test_out_of_bounds_names_the_line(arch):
    with (
        emulate(arch),
        pytest.raises(
            EmuError, match=r"out_of_bounds: line \d+ \(test_triton.py:\d+\): .*out-of-bounds"
        ),
    ):
        out_of_bounds[(1,)](torch.zeros(100), torch.zeros(256), N=256)


def test_context_restores_the_driver():
    config = triton.runtime.driver
    before = config._active
    with emulate("gfx942") as outer:
        with emulate("gfx950"):
            assert config.active.arch == "gfx950"
        assert config.active is outer
    assert config._active is before
    with pytest.raises(EmuError, match="unsupported architecture"):
        EmulatorDriver("gfx1100")
