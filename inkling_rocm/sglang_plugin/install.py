"""Puts our classes where SGLang looks: model names, the "triton" attention backend, conv state."""

from __future__ import annotations

import dataclasses

from inkling_rocm.sglang_plugin.symbols import check_symbols

_installed = False


def install() -> None:
    """Replace what symbols.py lists; a second call does nothing.

    Raises: RuntimeError: this SGLang is not a tested one, or has changed.
    """
    global _installed
    if _installed:
        return
    check_symbols()
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from inkling_rocm.sglang_plugin.models.inkling import EntryClass

    for model_class in EntryClass:
        ModelRegistry.models[model_class.__name__] = model_class
    backends = attention_registry.ATTENTION_BACKENDS
    backends["triton"] = _backend_factory(backends["triton"])
    wrapper = _backend_wrapper(attention_registry.attn_backend_wrapper)
    attention_registry.attn_backend_wrapper = wrapper
    attention_backend_setup.attn_backend_wrapper = wrapper
    DraftBackendFactory._create_triton_prefill_backend = _draft_backend(
        DraftBackendFactory._create_triton_prefill_backend
    )
    _conv_state_in_model_dtype()
    _installed = True


def is_inkling(runner) -> bool:
    """Whether a model runner serves Inkling."""
    from sglang.srt.configs.inkling import InklingMMConfig, InklingModelConfig

    return isinstance(runner.model_config.hf_config, (InklingMMConfig, InklingModelConfig))


def _backend_factory(original):
    def create(runner):
        if not is_inkling(runner):
            return original(runner)
        from inkling_rocm.sglang_plugin.backend import InklingAttentionBackend

        return InklingAttentionBackend(runner)

    return create


def _backend_wrapper(original):
    def wrap(runner, full_attn_backend):
        if not is_inkling(runner):
            return original(runner, full_attn_backend)
        from inkling_rocm.sglang_plugin.backend import InklingAttentionBackend

        if isinstance(full_attn_backend, InklingAttentionBackend):
            return full_attn_backend  # it owns the convolution state too
        raise RuntimeError(
            f"Inkling's attention backend is {type(full_attn_backend).__name__}; this plugin "
            "serves it with --attention-backend triton, for prefill and decode alike"
        )

    return wrap


def _draft_backend(original):
    def create(self):
        if not is_inkling(self.draft_model_runner):
            return original(self)
        raise RuntimeError("speculative decoding of Inkling is not supported by this plugin yet")

    return create


def _conv_state_in_model_dtype() -> None:
    """SGLang keeps Inkling's convolution inputs in bf16 whatever the model is; the ring must hold
    them as the taps see them."""
    import torch
    from sglang.srt.configs.inkling import InklingModelConfig, InklingStateDType
    from sglang.srt.runtime_context import get_server_args

    original = InklingModelConfig.mamba2_cache_params

    def mamba2_cache_params(self):
        parameters = original.fget(self)
        name = get_server_args().dtype
        name = {"auto": "bfloat16", "half": "float16", "float": "float32"}.get(name, name)
        dtype = getattr(torch, name)
        return dataclasses.replace(parameters, dtype=InklingStateDType(conv=dtype, temporal=dtype))

    InklingModelConfig.mamba2_cache_params = property(mamba2_cache_params)
