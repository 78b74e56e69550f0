"""The dense MLP's down product by the library: where it is taken, and that it is the same sum."""

import pytest
import torch

from kernel_base.arch import arch_named
from moe_aiter import dense_mlp
from moe_aiter.dense import LIBRARY_FROM, by_library
from moe_aiter.reference import dense_mlp_reference

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_it_is_taken_where_it_was_measured():
    def taken(arch="sm90", tokens=LIBRARY_FROM, dtype=torch.bfloat16, device=CUDA):
        return by_library(arch_named(arch), tokens, dtype, device)

    assert taken()
    assert not taken(tokens=LIBRARY_FROM - 1)
    assert not taken(dtype=torch.float32)
    assert not taken(arch="gfx942")
    assert not taken(device=CPU)  # the emulator's tensors


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [LIBRARY_FROM - 1, LIBRARY_FROM, 1500])
def test_it_errs_like_bf16(tokens):
    torch.manual_seed(tokens)
    hidden, width = 320, 192
    x = torch.randn(tokens, hidden).bfloat16()
    gate_up = (torch.randn(2 * width, hidden) / hidden**0.5).bfloat16()
    down = (torch.randn(hidden, width) / width**0.5).bfloat16()
    scale = torch.tensor([1.75])
    wide = torch.full((tokens, 2 * hidden), float("nan"), dtype=torch.bfloat16, device=CUDA)
    out = wide[:, :hidden]  # rows apart
    dense_mlp(x.to(CUDA), gate_up.to(CUDA), down.to(CUDA), scale.to(CUDA), out=out)
    want = dense_mlp_reference(x, gate_up, down, scale)
    eager = dense_mlp_reference(x, gate_up, down, scale, dtype=torch.bfloat16)
    budget = 2 * (eager.double() - want).norm()
    assert (out.cpu().double() - want).norm() <= budget
    assert wide[:, hidden:].isnan().all()
    unscaled = dense_mlp_reference(x, gate_up, down, torch.ones(1))
    assert (out.cpu().double() - unscaled).norm() > budget
