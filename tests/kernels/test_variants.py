"""Which variants are chosen, what they prepare, and what an engine of its own owns."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from inkling_rocm.config import load_config
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import registry, resolve_ops
from inkling_rocm.ops.rel_attention_triton import RelAttention
from kernel_base.arch import arch_named
from tests.engine.tiny import tiny_config, tiny_model
from triton_attn import RelativeProfile

OPS = ("embed", "attention_prologue", "rel_attention", "residual_conv_norm", "rms_norm")


@pytest.fixture
def config(small_config_path):
    return load_config(small_config_path)


def chosen(config, arch, **backends):
    ops = resolve_ops(config, arch_named(arch), **backends)
    return {choice.op: choice for choice in ops.choices}


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm80", "sm90", "sm100"])
def test_auto_takes_the_kernels_on_a_gpu(config, arch):
    found = chosen(config, arch)
    assert {found[op].variant for op in OPS} == {"triton"}
    assert chosen(config, arch, attention_backend="triton")["rel_attention"].variant == "triton"


def test_refusals_say_why(config):
    found = chosen(config, "cpu")
    assert {found[op].refused["triton"] for op in OPS} == {"Triton kernels need a GPU"}
    with pytest.raises(ValueError, match=r"--attention-backend triton cannot run .*need a GPU"):
        chosen(config, "cpu", attention_backend="triton")
    odd = replace(config.text.global_attention, head_dim=100)
    odd_config = replace(config, text=replace(config.text, global_attention=odd))
    found = chosen(odd_config, "gfx942")["rel_attention"]
    assert found.variant == "torch"
    assert "head_dim 100: wanted a multiple of 8" in found.refused["triton"]


def test_profiles_are_prepared_with_the_model_and_again_on_request():
    config = tiny_config()
    weights = {name: w.clone() for name, w in tiny_model(config).weights.items()}
    model = InklingModel(config, weights, resolve_ops(config, arch_named("gfx942")))
    layer, name = model.layers[0], "layers.0.attn.rel_proj"
    assert torch.equal(layer.rel_attention.keywords["prepared"].projection, weights[name])
    with torch.no_grad():
        weights[name].mul_(2)
    model.prepare()
    fresh = RelativeProfile.prepare(weights[name])
    assert torch.equal(layer.rel_attention.keywords["prepared"].table, fresh.table)


def test_weights_that_a_variant_takes_over_are_forgotten(monkeypatch):
    config = tiny_config()
    taken = []

    def prepare(weights, context):
        taken.append(weights.pop("moe.w13").shape)
        return "shuffled"

    def experts(x, ids, weights, *, w13, w2, prepared, **shared):
        assert w13 is None
        assert prepared == "shuffled"
        return x

    monkeypatch.setattr("tests.kernels.test_variants.hooks", [prepare, experts], raising=False)
    variant = registry.Variant(
        name="fake", function="tests.kernels.test_variants:fake_experts",
        prepare="tests.kernels.test_variants:fake_prepare",
    )  # fmt: skip
    monkeypatch.setattr("inkling_rocm.ops.experts.VARIANTS", (variant,))
    weights = dict(tiny_model(config).weights)
    before = sum(name.endswith("moe.w13") for name in weights)
    model = InklingModel(config, weights, resolve_ops(config, arch_named("cpu"), dtype="float32"))
    assert len(taken) == before > 0
    assert not any(name.endswith("moe.w13") for name in model.weights)
    layer = next(layer for layer in model.layers if layer.is_moe)
    host = type("Host", (), {"capture_routing": lambda *_: None})()
    x = torch.ones(2, config.text.hidden_size)
    assert torch.equal(layer.mlp(x, host), x)


hooks: list = []


def fake_prepare(weights, context):
    return hooks[0](weights, context)


def fake_experts(*args, **kwargs):
    return hooks[1](*args, **kwargs)


def test_large_ragged_batches_go_as_prefills(small_config_path):
    """They would want gigabytes of split-KV memory; uniform ones (rounds) are worth theirs."""
    attention = load_config(small_config_path).text.global_attention
    op = RelAttention(SimpleNamespace(arch=arch_named("sm90")))
    meta = SimpleNamespace(num_rows=128, q_uniform=0)
    assert op._too_ragged(meta, 16, attention)
    assert not op._too_ragged(SimpleNamespace(num_rows=128, q_uniform=16), 16, attention)
    assert not op._too_ragged(SimpleNamespace(num_rows=8, q_uniform=0), 16, attention)


def test_split_kv_memory_belongs_to_an_engine_and_is_kept_when_outgrown():
    config = tiny_config()
    one, other = (
        resolve_ops(config, arch_named("gfx942"), dtype="float32").rel_attention for _ in range(2)
    )
    assert isinstance(one, RelAttention)
    assert one is not other
    attention, device = config.text.global_attention, torch.device("cpu")
    small = one._workspace(device, 2, 1, attention)
    assert one._workspace(device, 1, 1, attention) is small
    large = one._workspace(device, 9, 4, attention)
    assert large.partial.numel() > small.partial.numel()
    assert one._workspace(device, 2, 1, attention) is large
    assert one.workspaces == [small, large]
    assert not other.workspaces
    assert (large.tickets == 0).all()
