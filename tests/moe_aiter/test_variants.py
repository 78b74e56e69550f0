"""The op registry's view of this package: what is chosen where, and the adapters against the
references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import MoEConfig, load_config
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import dense_mlp, experts, gate, moe_triton, moe_vendor
from inkling_rocm.ops.registry import OpContext, choose, resolve_ops
from kernel_base.arch import ARCHS
from moe_aiter import GateWorkspace
from moe_aiter.problems import make_gate_problem, make_problem
from tests.engine.tiny import tiny_config
from tests.moe_aiter.fake_aiter import fake


@pytest.fixture
def config(small_config_path):
    return load_config(small_config_path)


def context(config, arch, tp_size=8):
    return OpContext(config=config, arch=ARCHS[arch], dtype="bfloat16", tp_size=tp_size)


@pytest.mark.parametrize("op", ["gate", "experts", "dense_mlp"])
@pytest.mark.parametrize(
    ("arch", "chosen"), [("gfx942", "triton"), ("sm90", "triton"), ("cpu", "torch")]
)
def test_choice(config, op, arch, chosen):
    variant, _ = choose(op, context(config, arch))
    assert variant.name == chosen
    assert callable(variant.load(context(config, arch)))


@pytest.mark.parametrize("op", ["gate", "experts"])
def test_aiter_is_refused_with_the_reason(config, op):
    with pytest.raises(ValueError, match="AMD GPU"):
        choose(op, context(config, "sm90"), "aiter")
    with pytest.raises(ValueError, match="ROCm"):
        choose(op, context(config, "gfx950"), "aiter")


def test_aiter_is_chosen_where_its_selftest_passes(config, monkeypatch):
    monkeypatch.setattr(moe_vendor, "_aiter", lambda: fake(gate=True))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    asked = []
    monkeypatch.setattr(moe_vendor, "_selftest", lambda **facts: asked.append(facts))
    assert choose("experts", context(config, "gfx950"), "aiter")[0].name == "aiter"
    assert choose("gate", context(config, "gfx950"), "aiter")[0].name == "aiter"
    assert asked[0] == {"experts": 256, "top_k": 6, "shared": 2, "hidden": 4096, "width": 256}
    monkeypatch.setattr(moe_vendor, "_selftest", lambda **facts: "died of signal 6")
    with pytest.raises(ValueError, match="signal 6"):
        choose("experts", context(config, "gfx950"), "aiter")


@pytest.fixture
def emulated(monkeypatch):
    """CPU tensors run on the emulator: the adapters ask the device for its architecture."""
    monkeypatch.setattr("kernel_base.arch.arch_of_device", lambda device: ARCHS["gfx942"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with emulate("gfx942"):
        yield


def test_engines_of_a_process_count_apart(config, emulated, monkeypatch):
    """One may start while another serves, on another stream: on common counters the programs that
    wait could wait for ever."""
    allocate, made = GateWorkspace.allocate, []

    def counted(device):
        made.append(allocate(device))
        return made[-1]

    monkeypatch.setattr(GateWorkspace, "allocate", counted)
    moe = MoEConfig(
        num_experts=8, top_k=3, num_shared_experts=2, intermediate_size=32, route_scale=2.5
    )
    g = make_gate_problem(4, experts=8, hidden=64)
    variant, _ = choose("gate", context(config, "gfx942"))
    engines = [variant.load(context(config, "gfx942")) for _ in range(2)]
    for _ in range(2):  # the workspace of an engine serves all its calls
        for engine in engines:
            engine(g.x, g.weight, g.bias, g.global_scale, moe=moe)
    assert len(made) == 2


def test_triton_adapters_follow_the_references(config, emulated):
    moe = MoEConfig(
        num_experts=8, top_k=3, num_shared_experts=2, intermediate_size=32, route_scale=2.5
    )
    g = make_gate_problem(5, experts=8, hidden=64)
    arguments = (g.x, g.weight, g.bias, g.global_scale)
    ids, gamma = moe_triton.Gate(context(config, "gfx942"))(*arguments, moe=moe)
    want_ids, want = gate.gate(*arguments, moe=moe)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(gamma, want)
    p = make_problem(5, hidden=64, width=32, dtype=torch.float32)
    torch.testing.assert_close(
        moe_triton.experts(p.x, ids, gamma, **p.weights),
        experts.experts(p.x, ids, gamma, **p.weights),
        rtol=1e-4,
        atol=1e-5,
    )
    one = (p.x, p.weights["w13"][0], p.weights["w2"][0], g.global_scale)
    torch.testing.assert_close(
        moe_triton.dense_mlp(*one), dense_mlp.dense_mlp(*one), rtol=1e-4, atol=1e-5
    )


class RoutingOnly:
    """The part of a host that an MoE block asks for."""

    def capture_routing(self, layer: int, ids: torch.Tensor) -> None:
        self.ids = ids


def moe_layer(moe_runner_backend: str):
    """A model of one dense and one MoE layer; the latter."""
    config = tiny_config(layer_is_local=(True, True))
    text = dataclasses.replace(
        config.text,
        hidden_size=128,
        moe=dataclasses.replace(config.text.moe, intermediate_size=128),
    )
    config = dataclasses.replace(config, text=text, dtype="bfloat16")
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    fill_dummy(config, weights, seed=3)
    ops = resolve_ops(config, ARCHS["cpu"], dtype="bfloat16", moe_runner_backend=moe_runner_backend)
    return InklingModel(config, weights, ops)


def test_building_a_model_shuffles_experts_for_aiter_and_frees_the_originals(monkeypatch):
    torch_model = moe_layer("torch")
    monkeypatch.setattr(moe_vendor, "_aiter", lambda: fake(gate=True))
    for op in (experts, gate):
        aiter = next(v for v in op.VARIANTS if v.name == "aiter")
        here = dataclasses.replace(aiter, supports=lambda context: None)
        monkeypatch.setattr(op, "VARIANTS", (here, op.VARIANTS[-1]))
    model = moe_layer("aiter")
    for names in (model.weights, model.layers[1].weights):
        assert not any(name.endswith(("w13", "w2")) for name in names)
    assert any(name.endswith("gate_weight") for name in model.weights)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    host, reference = RoutingOnly(), RoutingOnly()
    out, want = model.layers[1].mlp(x, host), torch_model.layers[1].mlp(x, reference)
    assert torch.equal(host.ids, reference.ids)
    assert (out - want).norm() <= 0.02 * want.norm()
    with pytest.raises(ValueError, match=r"w13.*gone.*load the model again"):
        model.prepare()
