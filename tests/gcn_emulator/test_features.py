"""What `emulate` carries besides plain launches: autotune, spills, atomics, descriptors, Gluon."""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from gcn_emulator import EmuError
from gcn_emulator.triton_driver import emulate

ARCHS = ["gfx942", "gfx950"]
pytestmark = pytest.mark.parametrize("arch", ARCHS)


def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * 2, mask=offs < n)


def test_autotune_runs_every_configuration(arch):
    configs = [
        triton.Config({"BLOCK": 64}, num_warps=1),
        triton.Config({"BLOCK": 256}, num_warps=4),
    ]
    kernel = triton.autotune(configs=configs, key=["n"])(triton.jit(double))
    x = torch.randn(1000)
    y = torch.full_like(x, float("nan"))
    with emulate(arch) as driver:
        kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
    assert torch.equal(y, 2 * x)
    assert [r.grid[0] for r in driver.records[:2]] == [16, 4]
    assert len(driver.records) == 3  # one trial each, then the launch itself
    assert kernel.best_config in configs


@triton.jit
def sum_of_tiles(x_ptr, y_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Everything is live until the end: more registers than eight waves per SIMD leave."""
    m, n = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    a = tl.load(x_ptr + m * COLS + n)
    b = tl.sum(a, 1)
    c = tl.sum(a, 0)
    tl.store(y_ptr + m * COLS + n, a * b[:, None] - c[None, :])


def test_register_spills_use_scratch(arch):
    x = torch.randint(-4, 5, (64, 128)).float()
    y = torch.full_like(x, float("nan"))
    with emulate(arch, counters=True) as driver:
        sum_of_tiles[(1,)](x, y, ROWS=64, COLS=128, num_warps=1, waves_per_eu=8)
    record = driver.records[-1]
    assert record.static.scratch > 0
    assert record.static.vgpr_spills > 0
    assert record.counters.total("scratch_load") > 0
    assert torch.equal(y, x * x.sum(1, keepdim=True) - x.sum(0))


@triton.jit
def atomics(ticket_ptr, slot_ptr, sum_ptr, max_ptr, lock_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ticket = tl.atomic_add(ticket_ptr + tl.zeros_like(offs), 1)
    tl.store(slot_ptr + ticket, offs)
    x = tl.load(x_ptr + offs)
    tl.atomic_add(sum_ptr + offs % 4, x)
    tl.atomic_max(max_ptr + offs % 8, offs.to(tl.uint32))
    tl.atomic_cas(lock_ptr + offs % 2, tl.zeros_like(offs), offs + 1)


def test_atomics(arch):
    x = torch.randint(-8, 9, (512,)).float()
    ticket, slots = torch.zeros(1, dtype=torch.int32), torch.full((512,), -1, dtype=torch.int32)
    total, most = torch.zeros(4), torch.zeros(8, dtype=torch.uint32)
    lock = torch.zeros(2, dtype=torch.int32)
    with emulate(arch):
        atomics[(4,)](ticket, slots, total, most, lock, x, BLOCK=128, num_warps=2)
    assert ticket.item() == 512
    assert sorted(slots.tolist()) == list(range(512))  # every lane drew a ticket of its own
    assert torch.equal(total, x.reshape(-1, 4).sum(0))
    assert most.tolist() == [504 + i for i in range(8)]
    assert lock[0].item() % 2 == 1  # won once, by an even offset, and then kept
    assert lock[1].item() % 2 == 0


@triton.jit
def last_block_reduces(
    x_ptr, partial_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr, GRID: tl.constexpr
):
    """Split reduction in one launch: the workgroup that arrives last adds the partial sums."""
    pid = tl.program_id(0)
    tl.store(partial_ptr + pid, tl.sum(tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK)), 0))
    if tl.atomic_add(count_ptr, 1) == GRID - 1:
        tl.store(out_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, GRID)), 0))


def test_last_workgroup_reduces(arch):
    x = torch.randint(-8, 9, (1024,)).float()
    partial, out = torch.full((8,), float("nan")), torch.full((1,), float("nan"))
    with emulate(arch):
        last_block_reduces[(8,)](
            x, partial, torch.zeros(1, dtype=torch.int32), out, BLOCK=128, GRID=8
        )
    assert out.item() == x.sum().item()


@triton.jit
def row_sums(x_ptr, sums_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    tl.store(sums_ptr + row, tl.sum(tl.load(x_ptr + row * N + tl.arange(0, N)), 0))


@triton.jit
def divide_rows(x_ptr, sums_ptr, N: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, N)
    tl.store(x_ptr + row * N + n, tl.load(x_ptr + row * N + n) / tl.load(sums_ptr + row))


def test_launches_see_each_others_results(arch):
    x = torch.rand(5, 64) + 0.5
    want, sums = x / x.sum(1, keepdim=True), torch.full((5,), float("nan"))
    with emulate(arch) as driver:
        row_sums[(5,)](x, sums, N=64, num_warps=1)
        divide_rows[(5,)](x, sums, N=64, num_warps=1)
    assert [r.name for r in driver.records] == ["row_sums", "divide_rows"]
    torch.testing.assert_close(x, want)


@triton.jit
def device_descriptor(x_ptr, y_ptr, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, cols], [cols, 1], [BLOCK_M, BLOCK_N])
    y = tl.make_tensor_descriptor(y_ptr, [rows, cols], [cols, 1], [BLOCK_M, BLOCK_N])
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    y.store(at, x.load(at) + 1)


@triton.jit
def host_descriptor(x, y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    y.store(at, x.load(at) + 1)


@pytest.mark.parametrize("where", ["device", "host"])
def test_tensor_descriptors_with_ragged_tiles(arch, where):
    x = torch.randn(50, 40)
    y = torch.full_like(x, float("nan"))
    with emulate(arch):
        if where == "device":
            device_descriptor[(2, 2)](x, y, 50, 40, BLOCK_M=32, BLOCK_N=32)
        else:
            tiles = [TensorDescriptor.from_tensor(t, [32, 32]) for t in (x, y)]
            host_descriptor[(2, 2)](*tiles, BLOCK_M=32, BLOCK_N=32)
    assert torch.equal(y, x + 1)


@gluon.jit
def gluon_transpose(
    x_ptr, y_ptr, N: gl.constexpr, READ: gl.constexpr, WRITE: gl.constexpr, SHARED: gl.constexpr
):
    """Through LDS: rows are read in one layout and columns written in another."""
    m = gl.arange(0, N, layout=gl.SliceLayout(1, READ))[:, None]
    n = gl.arange(0, N, layout=gl.SliceLayout(0, READ))[None, :]
    tile = gl.allocate_shared_memory(gl.float32, [N, N], SHARED, gl.load(x_ptr + m * N + n))
    i = gl.arange(0, N, layout=gl.SliceLayout(1, WRITE))[:, None]
    j = gl.arange(0, N, layout=gl.SliceLayout(0, WRITE))[None, :]
    gl.store(y_ptr + i * N + j, tile.permute((1, 0)).load(WRITE))


def test_gluon_through_lds(arch):
    x = torch.randn(64, 64)
    y = torch.full_like(x, float("nan"))
    read = gl.BlockedLayout([1, 4], [4, 16], [4, 1], [1, 0])
    write = gl.BlockedLayout([1, 4], [8, 8], [4, 1], [1, 0])
    shared = gl.SwizzledSharedLayout(4, 1, 16, [1, 0])
    with emulate(arch) as driver:
        gluon_transpose[(1,)](x, y, N=64, READ=read, WRITE=write, SHARED=shared, num_warps=4)
    assert torch.equal(y, x.T)
    assert driver.records[-1].static.lds == 64 * 64 * 4


@gluon.jit
def gluon_mfma(
    a_ptr,
    b_ptr,
    c_ptr,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    MFMA: gl.constexpr,
    K_WIDTH: gl.constexpr,
):
    A: gl.constexpr = gl.DotOperandLayout(0, MFMA, K_WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, MFMA, K_WIDTH)
    am = gl.arange(0, M, layout=gl.SliceLayout(1, A))[:, None]
    ak = gl.arange(0, K, layout=gl.SliceLayout(0, A))[None, :]
    bk = gl.arange(0, K, layout=gl.SliceLayout(1, B))[:, None]
    bn = gl.arange(0, N, layout=gl.SliceLayout(0, B))[None, :]
    a, b = gl.load(a_ptr + am * K + ak), gl.load(b_ptr + bk * N + bn)
    c = gl.amd.cdna3.mfma(a, b, gl.zeros([M, N], gl.float32, MFMA))
    cm = gl.arange(0, M, layout=gl.SliceLayout(1, MFMA))[:, None]
    cn = gl.arange(0, N, layout=gl.SliceLayout(0, MFMA))[None, :]
    gl.store(c_ptr + cm * N + cn, c)


@pytest.mark.parametrize("shape", [(16, 16, 16), (32, 32, 8)])
@pytest.mark.parametrize("transposed", [False, True])
def test_gluon_matrix_instruction(arch, shape, transposed):
    layout = gl.amd.AMDMFMALayout(
        version=3, instr_shape=list(shape), transposed=transposed, warps_per_cta=[2, 2]
    )
    a, b = torch.randn(64, 32).half(), torch.randn(32, 128).half()
    c = torch.full((64, 128), float("nan"))
    with emulate(arch, counters=True) as driver:
        gluon_mfma[(1,)](a, b, c, M=64, N=128, K=32, MFMA=layout, K_WIDTH=4, num_warps=4)
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-4, rtol=1e-4)
    name = f"v_mfma_f32_{shape[0]}x{shape[1]}x{shape[2]}_f16"
    assert driver.records[-1].counters.total(name) > 0


def test_lds_overflow_is_reported_before_the_launch(arch):
    n = 256
    x = torch.zeros(n, n)
    layout = gl.BlockedLayout([1, 4], [4, 16], [4, 1], [1, 0])
    shared = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    too_large = (EmuError, triton.runtime.errors.OutOfResources)
    with emulate(arch), pytest.raises(too_large, match="262144"):
        gluon_transpose[(1,)](x, x, N=n, READ=layout, WRITE=layout, SHARED=shared, num_warps=4)
