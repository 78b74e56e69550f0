"""Attention kernels with a bias inside, both architectures, lazy and eager waits."""

import pytest
import torch
from score_mods import MODS, inputs, reference, row_for, score_mod_attention
from strided_bias import reference as strided_reference
from strided_bias import strided_bias

from gcn_emulator.triton_driver import emulate

ARCHS = ["gfx942", "gfx950"]


def assert_within_budget(out, exact, eager):
    """At most twice the error of the same arithmetic in plain torch."""
    budget = 2 * (eager.double() - exact).abs().max() + torch.finfo(out.dtype).eps
    assert (out.double() - exact).abs().max() <= budget


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_score_mod(arch, lazy, mod, dtype):
    tensors = inputs(70, dtype=dtype)
    with emulate(arch, lazy=lazy):
        out = score_mod_attention(*tensors, mod, row_for(arch))
    exact = reference(*tensors, mod, torch.float64)
    assert_within_budget(out, exact, reference(*tensors, mod, dtype))
    assert (
        reference(*tensors, "softcap" if mod != "softcap" else "alibi", torch.float64) - exact
    ).abs().max() > 0.1


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("window", "extent", "tokens"), [(64, 64, 150), (0, 128, 130)])
def test_strided_bias(arch, lazy, window, extent, tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, h, 64).to(torch.bfloat16) for h in (2, 1, 1))
    rel = torch.randn(tokens, 2, extent).to(torch.bfloat16)
    with emulate(arch, lazy=lazy):
        out = strided_bias(q, k, v, rel, window=window)
    exact = strided_reference(q, k, v, rel, window)
    assert_within_budget(out, exact, strided_reference(q, k, v, rel, window, torch.bfloat16))
    without = strided_reference(q, k, v, torch.zeros_like(rel), window)
    assert (without - exact).abs().max() > 0.1  # a bias that is dropped would be noticed
