"""The attention backend SGLang builds for Inkling: it lays steps out for our model, eager ones and
decode graphs.

The model's ops read pages and rings through the host (host.py), so nothing is computed here.
"""

from __future__ import annotations

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from inkling_rocm.sglang_plugin.host import SGLangHost
from inkling_rocm.sglang_plugin.models.inkling import InklingForConditionalGeneration


class InklingAttentionBackend(AttentionBackend):
    """Built once a model runner; `host` is the layout of the current step.

    Raises: RuntimeError: the model that SGLang loaded is not ours.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner):
        super().__init__()
        if not isinstance(runner.model, InklingForConditionalGeneration):
            kind = type(runner.model)
            raise RuntimeError(
                f"SGLang loaded {kind.__module__}.{kind.__name__} instead of inkling-rocm's model; "
                "the server stops rather than serve another implementation. Run `inkling-rocm "
                "doctor --engine sglang`"
            )
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.page_size = runner.page_size
        self.host = SGLangHost(runner)
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch):
        """Lay out an eager step."""
        self.host.prepare(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        self.host.allocate(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        """Before a capture; a replay derives all it needs in the graph."""
        if in_capture:
            self.host.bind(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch):
        """Inside a decode graph, first."""
        self.host.derive(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
