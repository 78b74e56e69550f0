"""Refusals and the guard, without SGLang."""

from __future__ import annotations

import sys
import types

import pytest

from inkling_rocm.sglang_plugin.entry import ARCHITECTURES, register
from inkling_rocm.sglang_plugin.refusals import REFUSALS, refuse_graphs, refuse_unsupported

ACCEPTED = {
    "speculative_algorithm": None, "enable_lora": None, "lora_paths": None, "attn_dp_size": 1,
    "dcp_size": 1, "attn_cp_size": 1, "pp_size": 1, "ep_size": 1, "tp_size": 8,
    "moe_a2a_backend": "none", "enable_eplb": False,
    "enable_unified_memory": False, "quantization": None, "enable_int8_mamba_checkpoint": False,
    "enable_multimodal": None, "kv_cache_dtype": "auto", "disaggregation_mode": "null",
    "enable_torch_compile": False,
}  # fmt: skip
REFUSED = {
    "speculative_algorithm": "EAGLE", "enable_lora": True, "lora_paths": ["a"], "attn_dp_size": 2,
    "dcp_size": 2, "attn_cp_size": 2, "pp_size": 2, "ep_size": 2, "enable_eplb": True,
    "moe_a2a_backend": "deepep",
    "enable_unified_memory": True, "quantization": "fp8", "enable_int8_mamba_checkpoint": True,
    "enable_multimodal": True, "kv_cache_dtype": "fp8_e4m3", "disaggregation_mode": "prefill",
    "enable_torch_compile": True,
}  # fmt: skip


def test_plain_arguments_pass():
    refuse_unsupported(types.SimpleNamespace(**ACCEPTED))


def test_every_refusal_is_tried():
    assert len(REFUSALS) == len(REFUSED) == len(ACCEPTED) - 1  # tp_size goes with ep_size


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_flag_is_named(name):
    arguments = types.SimpleNamespace(**{**ACCEPTED, name: REFUSED[name]})
    flag = next(flag for flag, asked, _ in REFUSALS if asked(arguments))
    with pytest.raises(RuntimeError, match=flag):
        refuse_unsupported(arguments)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_renamed_flag_does_not_lift_its_refusal(name):
    arguments = types.SimpleNamespace(**ACCEPTED)
    delattr(arguments, name)
    with pytest.raises(AttributeError, match=name):
        refuse_unsupported(arguments)


def graphs(decode, prefill):
    phases = {"decode": decode, "prefill": prefill}
    return types.SimpleNamespace(
        **{phase: types.SimpleNamespace(backend=backend) for phase, backend in phases.items()}
    )


def test_ranks_may_hold_whole_experts():
    refuse_unsupported(types.SimpleNamespace(**{**ACCEPTED, "ep_size": 8}))


def test_graphs_of_decode_only():
    for config in (None, graphs("full", "disabled"), graphs("disabled", "disabled")):
        refuse_graphs(config)
    with pytest.raises(RuntimeError, match="Add --disable-prefill-cuda-graph"):
        refuse_graphs(graphs("full", "full"))
    with pytest.raises(RuntimeError, match="--cuda-graph-backend-decode breakable"):
        refuse_graphs(graphs("breakable", "disabled"))


def test_a_failed_installation_leaves_classes_that_refuse(monkeypatch):
    registry = types.SimpleNamespace(models={name: object for name in ARCHITECTURES})
    for name in ("sglang", "sglang.srt", "sglang.srt.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("sglang.srt.models.registry")
    module.ModelRegistry = registry
    monkeypatch.setitem(sys.modules, "sglang.srt.models.registry", module)
    broken = types.ModuleType("inkling_rocm.sglang_plugin.install")

    def install():
        raise ValueError("a symbol is gone")

    broken.install = install
    monkeypatch.setitem(sys.modules, "inkling_rocm.sglang_plugin.install", broken)
    with pytest.raises(ValueError, match="a symbol is gone"):
        register()
    for name in ARCHITECTURES:
        with pytest.raises(RuntimeError, match="a symbol is gone"):
            registry.models[name]()
