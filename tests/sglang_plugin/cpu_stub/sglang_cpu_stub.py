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
    if os.environ.get("SGLANG_STUB_GRAPHS"):
        _decode_as_graphs()
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


def _decode_as_graphs():
    """Decode steps go the way of a graph, recording apart: rows are padded, the layout is made once
    over buffers that stay, and each step fills it by what a graph would launch first."""
    from inkling_rocm.model import InklingModel
    from inkling_rocm.sglang_plugin.backend import InklingAttentionBackend as Backend

    padded_rows = 5
    eager, forward = Backend.init_forward_metadata, InklingModel.forward
    fields = {"seq_lens": 1, "req_pool_indices": 0, "out_cache_loc": 0, "mamba_track_mask": False}
    fields |= {"mamba_track_indices": 0}

    def lay_out(self, batch):
        if not batch.forward_mode.is_decode():
            return eager(self, batch)
        first = not hasattr(self, "replayed")
        if first:
            print("decode steps are laid out as for graphs", flush=True)
            self.init_cuda_graph_state(padded_rows, padded_rows)
            self.replayed = types.SimpleNamespace(
                forward_mode=batch.forward_mode,
                batch_size=padded_rows,
                **{
                    name: getattr(batch, name).new_full((padded_rows,), padding)
                    for name, padding in fields.items()
                },
            )
        for name, padding in fields.items():
            static = getattr(self.replayed, name).fill_(padding)
            static[: batch.batch_size] = getattr(batch, name)[: batch.batch_size]
        self.init_forward_metadata_out_graph(self.replayed, in_capture=first)
        if first:
            self.captured = vars(self.host).copy()
        vars(self.host).update(self.captured)
        return self.init_forward_metadata_in_graph(self.replayed)

    def run(self, input_ids, host):
        rows = len(input_ids)
        padded = torch.nn.functional.pad(input_ids, (0, host.meta.num_tokens - rows))
        return forward(self, padded, host)[:rows]

    Backend.init_forward_metadata = lay_out
    InklingModel.forward = run


def _no_autotuning():
    """The interpreter has no driver to benchmark with: take the first configuration."""
    from triton.runtime import autotuner

    def run(self, *args, **kwargs):
        return self.fn.run(*args, **{**kwargs, **self.configs[0].all_kwargs()})

    autotuner.Autotuner.run = run
