"""The parity check can fail: each planted fault moves the logits far beyond its tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity.conftest import build
from tests.parity.test_transformers import host_for, relative_error
from tests.support.plain_host import run_chunks


def _edit(weights, suffix, change):
    """Copies of the weights with `change` applied to those whose name ends in suffix."""
    hit = {name: change(w.clone()) for name, w in weights.items() if name.endswith(suffix)}
    assert hit, f"no parameter ends in {suffix}"
    return {**weights, **hit}


def _zero(index):
    def change(w):
        w[index] = 0
        return w

    return change


def bias_zeroed(config, weights):
    return config, _edit(weights, "attn.rel_proj", _zero(slice(None)))


def bias_displaced(config, weights):
    return config, _edit(weights, "attn.rel_proj", lambda w: w.roll(1, dims=1))


def window_short(config, weights):
    text = config.text
    local = replace(text.local_attention, window=text.local_attention.window - 1)
    return replace(config, text=replace(text, local_attention=local)), weights


def window_long(config, weights):
    text = config.text
    local = replace(text.local_attention, window=text.local_attention.window + 1)
    return replace(config, text=replace(text, local_attention=local)), weights


def tap_dropped(config, weights):
    return config, _edit(weights, "attn.k_conv", _zero(0))


def residual_tap_dropped(config, weights):
    return config, _edit(weights, "mlp_conv", _zero(0))


def shared_expert_left_out(config, weights):
    return config, _edit(weights, "moe.shared_w2", _zero(-1))


def two_experts_swapped(config, weights):
    return config, _edit(weights, "moe.w2", lambda w: w[[1, 0, *range(2, len(w))]])


def selection_bias_ignored(config, weights):
    return config, _edit(weights, "moe.gate_bias", _zero(slice(None)))


def gate_and_up_exchanged(config, weights):
    return config, _edit(weights, "mlp.gate_up", lambda w: w.roll(len(w) // 2, 0))


def tau_ignored(config, weights):
    text = config.text
    attention = replace(text.global_attention, log_floor=None)
    return replace(config, text=replace(text, global_attention=attention)), weights


def extent_short(config, weights):
    return config, _edit(weights, "attn.rel_proj", _zero((slice(None), -1)))


FAULTS = [
    bias_zeroed,
    bias_displaced,
    window_short,
    window_long,
    tap_dropped,
    residual_tap_dropped,
    shared_expert_left_out,
    two_experts_swapped,
    selection_bias_ignored,
    gate_and_up_exchanged,
    tau_ignored,
    extent_short,
]


@pytest.fixture(scope="module")
def pair(oracle_pair):
    return oracle_pair("faults")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@torch.no_grad()
def test_fault_is_seen(pair, fault):
    config, weights = fault(pair.config, pair.weights)
    got = run_chunks(build(config, weights), host_for(config), pair.prompt, [45])
    assert relative_error(got, pair.logits) > 1e-3


@torch.no_grad()
def test_no_fault_is_not_seen(pair):
    got = run_chunks(build(pair.config, pair.weights), host_for(pair.config), pair.prompt, [45])
    assert relative_error(got, pair.logits) < 1e-5
