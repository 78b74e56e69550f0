"""The benchmark's own logic on the CPU: its gate can fail, its floors and routings are what they
say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.moe import gate as bench_gate
from bench.moe import problems, tune, tune_gate
from bench.moe.peer_sglang import interleave
from kernel_base.arch import ARCHS


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setitem(problems.MODELS, "tiny", (64, 32))
    monkeypatch.setattr(problems, "EXPERTS", 32)
    weights = problems.make_weights("tiny", device="cpu")
    return problems.make_layer("tiny", 4, weights, shared=0)


def test_gate_passes_the_reference_and_fails_a_fault(layer):
    def right(call):
        return call.reference().bfloat16()

    def swapped(call):
        return call.reference().bfloat16().roll(1, 0)

    assert bench_gate.layer_passes(right, layer)[0]
    assert not bench_gate.layer_passes(swapped, layer)[0]
    assert not bench_gate.layer_passes(lambda call: right(call) * float("nan"), layer)[0]


def test_four_tokens_hit_24_distinct_experts_and_calls_differ(layer):
    assert layer.hit_experts() == 24
    assert not torch.equal(layer.calls[0].ids, layer.calls[1].ids)


def test_floor_is_bytes_or_arithmetic(layer):
    expert_bytes = 3 * 64 * 32 * 2
    assert layer.floor_us(1e9, 1e15) == pytest.approx(24 * expert_bytes / 1e9 * 1e6)
    assert layer.floor_us(1e15, 1e9) == pytest.approx(4 * 6 * 6 * 64 * 32 / 1e9 * 1e6)


def test_interleave():
    w13 = torch.arange(8.0).view(1, 8, 1)
    assert interleave(w13).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("table", tune.CONFIGS)
def test_tuned_configurations_are_complete(table):
    for tokens in tune.TOKENS[table]:
        for rows in tune.CONFIGS[table]("sm90", tokens):
            assert len(rows) == 2
            assert any(row is not None for row in rows)
            assert all(row is None or row.arch in ARCHS for row in rows)
            assert tune.describe(tune.Config(table=table, tokens=tokens, rows=rows))


@pytest.mark.parametrize("tokens", tune_gate.TOKENS)
def test_gate_configurations_are_complete(tokens):
    first, *others = tune_gate.configs("sm90", tokens, 6144)
    assert first == (None, None), "the tables' own rows come first"
    for router, select in others:
        assert router is not None or select is not None
        behind = 0 if router is None else router.constexprs.get("BEHIND", 0)
        assert not behind or router.constexprs["BLOCK_M"] % behind == 0


def test_skewed_routing_crowds_the_same_experts_whatever_the_seed():
    loads = []
    for seed in range(2):
        ids = problems.skewed_routing(2048, seed, "cpu")
        assert all(len(row.unique()) == problems.TOP_K for row in ids)
        loads.append(torch.bincount(ids.flatten().long(), minlength=problems.EXPERTS).float())
    mean = 2048 * problems.TOP_K / problems.EXPERTS
    assert loads[0].max() > 2.5 * mean
    assert loads[0].min() < 0.2 * mean
    assert torch.corrcoef(torch.stack(loads))[0, 1] > 0.9
