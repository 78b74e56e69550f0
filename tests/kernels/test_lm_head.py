"""lm_head in Triton: emulated against float64, and on a GPU at the real size."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.host import SingleRank
from inkling_rocm.kernels.lm_head import MAX_TOKENS, local_logits
from inkling_rocm.ops.lm_head import lm_head as lm_head_reference
from kernel_base.arch import arch_of_device


def problem(tokens, vocabulary, hidden, dtype, device="cpu"):
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    w = (torch.randn(vocabulary, hidden, device=device) * hidden**-0.5).to(dtype)
    return x, w


def run(x, w, vocabulary, arch, *, mup=6.0):
    out = torch.full((len(x), vocabulary), float("nan"), device=x.device)
    return local_logits(
        x, w, mup_multiplier=mup, vocabulary=vocabulary, dtype=torch.float32, arch=arch, out=out
    )


def within_budget(got, x, w, mup):
    # In pieces: float64 weights of a whole vocabulary are 10 GB.
    exact = torch.cat([(x.double() / mup) @ part.double().t() for part in w.split(1 << 14)], 1)
    eager = torch.nn.functional.linear(x / mup, w).double()
    error, allowed = (got.double() - exact).norm(), 2 * (eager - exact).norm()
    # One chain of additions where a library may add a tree.
    chain = torch.finfo(torch.float32).eps * x.shape[1] ** 0.5
    return bool(error <= allowed + max(torch.finfo(x.dtype).eps, chain) * exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("arch", "tokens"), [("gfx942", 1), ("gfx942", 17), ("gfx950", 0), ("gfx950", 63)]
)
def test_against_float64(arch, tokens, dtype):
    x, w = problem(tokens, 150, 72, dtype)
    with emulate(arch):
        got = run(x, w, 137, arch)
    assert within_budget(got, x, w[:137], 6.0)
    assert not torch.isnan(got).any()


def test_rounds_to_the_model_dtype():
    x, w = problem(3, 40, 64, torch.bfloat16)
    with emulate("gfx942"):
        got = run(x, w, 40, "gfx942", mup=1.0)
    assert torch.equal(got, got.bfloat16().float())


def test_the_budget_sees_a_missing_division():
    x, w = problem(3, 40, 64, torch.bfloat16)
    with emulate("gfx942"):
        assert not within_budget(run(x, w, 40, "gfx942", mup=1.0), x, w, 6.0)


def test_wrong_arguments_are_named():
    x, w = problem(2, 40, 64, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        run(x, w[:, :32], 40, "gfx942")
    with pytest.raises(ValueError, match="at most"):
        run(torch.zeros(MAX_TOKENS + 1, 64), w, 40, "gfx942")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 64])
def test_real_vocabulary(tokens, dtype):
    device = torch.device("cuda")
    vocabulary = 200058 if dtype == torch.bfloat16 else 5001
    x, w = problem(tokens, vocabulary + 6, 6144, dtype, device)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        got = run(x, w, vocabulary, arch_of_device(device).name, mup=24.0)
        assert within_budget(got, x, w[:vocabulary], 24.0)
        eager = lm_head_reference(
            x, w, mup_multiplier=24.0, vocab_size=vocabulary, comm=SingleRank()
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert got.shape == eager.shape
    assert (got.argmax(-1) == eager.argmax(-1)).float().mean() > 0.9
