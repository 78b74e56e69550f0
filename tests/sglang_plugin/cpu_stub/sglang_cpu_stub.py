"""A plugin that makes SGLang 0.5.23 start on a machine without a GPU. For tests."""

import os
import types

import torch


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        lambda *args, **kwargs: True,
        HookType.REPLACE,
    )
    properties = types.SimpleNamespace(
        multi_processor_count=8, name="cpu", total_memory=8 << 30, major=0, minor=0, warp_size=64
    )
    torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **kwargs: None
    _no_autotuning()
    fault = os.environ.get("SGLANG_STUB_FAULT")
    if fault == "broken plugin":
        _break_plugin()
    elif fault == "zeroed snapshots":
        _zero_snapshots()
    elif fault == "SGLang's own model":
        import sglang.srt.models.inkling_common.moe as moe

        moe._FP32_GEMM_UPCAST = True  # torch.mm(out_dtype=) has no CPU kernel


def _break_plugin():
    """Our installation fails, as it would with a missing library."""
    import inkling_rocm.sglang_plugin.symbols as symbols

    def check_symbols():
        raise ImportError("broken on purpose")

    symbols.check_symbols = check_symbols


def _zero_snapshots():
    """What the prefix cache keeps of the convolutions is lost."""
    import inkling_rocm.ops.short_conv as short_conv

    def lose(x_TC, meta, ring, taps):
        ring.state[ring.snapshot_slot.long()] = 0

    short_conv._snapshot = lose


def _no_autotuning():
    """The interpreter has no driver to benchmark with: take the first configuration."""
    from triton.runtime import autotuner

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **{**kwargs, **self.configs[0].all_kwargs()})

    autotuner.Autotuner.run = run
