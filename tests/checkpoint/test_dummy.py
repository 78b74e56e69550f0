"""Dummy weights: the same on every device, rank and run; of a size that keeps activations sane."""

import hashlib

import pytest
import torch

from inkling_rocm.checkpoint import allocate, fill_dummy
from tests.checkpoint import oracle, tiny

PARTS = ("text", "mtp")


def dummy(config, *, seed=0, dtype=torch.float32, rank=0, size=1, parts=PARTS):
    weights = allocate(config, dtype=dtype, device="cpu", tp_rank=rank, tp_size=size, parts=parts)
    for weight in weights.values():
        weight.fill_(float("nan"))
    fill_dummy(config, weights, seed, tp_rank=rank, tp_size=size)
    return weights


def test_same_seed_same_values(config):
    first, second, other = dummy(config), dummy(config), dummy(config, seed=1)
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert not torch.equal(weight, other[name]), name


def test_values_are_fixed_for_all_machines(config):
    """Exactly rounded arithmetic only: a changed digest means changed weights (raise the demo's
    version) or a machine that computes differently."""
    digest = hashlib.sha256()
    for name, weight in sorted(dummy(config).items()):
        in_file_order = weight.t() if name.endswith("_conv") else weight
        digest.update(name.encode() + in_file_order.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "440b76e8d9910848"


def test_values_depend_on_the_name_and_place_only(config):
    weights = dummy(config)
    assert not torch.equal(weights["layers.0.attn_norm"], weights["layers.0.mlp_norm"])
    assert not torch.equal(weights["layers.0.attn_norm"], weights["layers.1.attn_norm"])
    alone = {"layers.1.moe.w2": torch.empty_like(weights["layers.1.moe.w2"])}
    fill_dummy(config, alone)
    assert torch.equal(alone["layers.1.moe.w2"], weights["layers.1.moe.w2"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_the_rounded_fp32_values(config, dtype):
    wide = dummy(config)
    for name, weight in dummy(config, dtype=dtype).items():
        assert torch.equal(weight, wide[name].to(weight.dtype)), name


@pytest.mark.parametrize("size", [2, 8])
def test_a_rank_gets_its_shard_of_the_whole(config, size):
    whole = dummy(config)
    ranks = [dummy(config, rank=rank, size=size) for rank in range(size)]
    for name, weight in whole.items():
        assert torch.equal(oracle.reassemble(name, [r[name] for r in ranks]), weight), name


def test_distributions(config):
    weights = dummy(config, parts=("text", "mtp", "audio", "vision"))
    for name, std in {
        "embed": 1.0,
        "lm_head": 3.0 * 2.0 * tiny.H**-0.5,
        "layers.0.attn.qkvr": tiny.H**-0.5,
        "layers.0.attn.o_proj": (tiny.HEADS * tiny.D) ** -0.5,
        "layers.1.moe.w2": tiny.I**-0.5,
        "layers.0.attn.rel_proj": tiny.R**-0.5,
    }.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.15), name
        assert abs(weights[name].mean().item()) < 0.2 * std, name
    assert weights["embed_norm"].mean().item() == pytest.approx(1.0, abs=0.05)
    for weight in weights.values():
        assert weight.isfinite().all()


def test_no_repeats_or_correlation_between_neighbours(config):
    """A weak mix would show as equal or correlated rows."""
    embed = dummy(config)["embed"]
    assert embed.unique().numel() > 0.99 * embed.numel()
    correlation = torch.corrcoef(embed)
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max() < 0.65  # 64 samples a row: 5 sigma
    assert correlation.mean().abs() < 0.01


def test_refusals(config):
    shard = allocate(config, dtype=torch.float32, device="cpu", tp_size=2)
    with pytest.raises(ValueError, match=r"embed is \(64, 64\), wanted \(128, 64\)"):
        fill_dummy(config, shard)
    with pytest.raises(ValueError, match="extra"):
        fill_dummy(config, {"extra": torch.empty(1)})


@pytest.mark.gpu
def test_a_gpu_makes_the_same_values(config):
    on_gpu = allocate(config, dtype=torch.bfloat16, device="cuda", parts=PARTS)
    fill_dummy(config, on_gpu)
    for name, weight in dummy(config, dtype=torch.bfloat16).items():
        assert torch.equal(on_gpu[name].cpu(), weight), name
