"""SGLang's model classes of Inkling, over our stack.

Weights live in one flat module of parameters by the weight table's names; SGLang's loaders fill
them through `load_weights`. RadixAttention objects are kept because SGLang finds layers by them;
they are never called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_exec, get_server_args
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor, nn

from inkling_rocm.checkpoint.stream import load_stream
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import load_config
from inkling_rocm.host import Host
from inkling_rocm.model import InklingModel
from inkling_rocm.model.layer import rank_attention
from inkling_rocm.ops import resolve_ops
from inkling_rocm.sglang_plugin.comm import SGLangComm
from inkling_rocm.sglang_plugin.refusals import refuse_graphs, refuse_unsupported
from kernel_base.arch import arch_of_device

logger = logging.getLogger(__name__)


class _Layer(nn.Module):
    """What SGLang looks for in a layer: `attn.attn`."""

    def __init__(self, radix: RadixAttention):
        super().__init__()
        self.attn = nn.Module()
        self.attn.attn = radix


class _Stack(nn.Module):
    """SGLang's `model`: layers to be found, weights to be filled."""

    def __init__(self, layers: list[_Layer], weights: dict[str, Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.weights = nn.Module()
        for name, tensor in weights.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            self.weights.register_parameter(name.replace(".", "/"), parameter)

    def by_name(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): p for name, p in self.weights.named_parameters()}


class _Head(nn.Module):
    """SGLang hands this to the logits processor; ours calls the model's head instead."""


class _LogitsProcessor(LogitsProcessor):
    """Selects rows and computes log probabilities as SGLang does; the head is our op, which
    gathers the vocabulary itself."""

    def __init__(self, config, logits):
        super().__init__(config, skip_all_gather=True)
        self._logits = logits

    def _compute_lm_head(self, hidden_states, lm_head, embedding_bias=None, *, out=None):
        logits = self._logits(hidden_states)
        return logits if out is None else out.copy_(logits)


class InklingForConditionalGeneration(nn.Module):
    """Inkling's language model in SGLang.

    Raises: RuntimeError: a flag that is not supported. ValueError: the checkpoint or a backend.
    """

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__()
        from inkling_rocm.sglang_plugin.install import install

        install()
        arguments = get_server_args()
        refuse_unsupported(arguments)
        refuse_graphs(get_exec().graph.cuda_graph_config)
        if quant_config is not None:
            raise RuntimeError("quantised checkpoints are not supported by this plugin yet")
        self.config = config
        self.inkling = load_config(_checkpoint_folder(arguments.model_path))
        text = self.inkling.text
        self.comm = SGLangComm(get_tp_group())
        device = torch.get_default_device()
        dtype = torch.get_default_dtype()
        self.ops = resolve_ops(
            self.inkling,
            arch_of_device(device),
            dtype=str(dtype).removeprefix("torch."),
            attention_backend="auto" if device.type == "cpu" else arguments.attention_backend,
            moe_runner_backend=arguments.moe_runner_backend,
            tp_size=self.comm.tp_size,
            ep_size=arguments.ep_size,
        )
        self._shard: dict[str, Any] = {
            "tp_rank": self.comm.tp_rank,
            "tp_size": self.comm.tp_size,
            "expert_parallel": arguments.ep_size > 1,
        }
        weights = allocate(self.inkling, dtype=dtype, device=device, **self._shard)
        layers = []
        for layer in range(text.num_layers):
            attention = rank_attention(text.attention(layer), self.comm.tp_size)
            radix = RadixAttention(
                attention.num_heads,
                attention.head_dim,
                attention.softmax_scale,
                attention.num_kv_heads,
                layer,
                sliding_window_size=attention.window - 1 if text.layer_is_local[layer] else -1,
            )
            layers.append(_Layer(radix))
        self.model = _Stack(layers, weights)
        self.lm_head = _Head()
        self.logits_processor = _LogitsProcessor(config.text_config, self._logits)
        self._stack: InklingModel | None = None
        chosen = ", ".join(f"{c.op}={c.variant}" for c in self.ops.choices)
        logger.warning("inkling-rocm serves this model: %s", chosen)

    def get_attention_sliding_window_size(self) -> int:
        """SGLang's windows do not count the current token."""
        return self.inkling.text.local_attention.window - 1

    def get_num_kv_cache_layers(self) -> int:
        return self.inkling.text.num_layers

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from (released name, whole tensor) pairs, or update some of them.

        Raises: CheckpointError: an unknown name, a wrong shape, or (at the first load) one missing.
        """
        load_stream(
            weights,
            self.inkling,
            self.model.by_name() if self._stack is None else self._stack.weights,
            complete=self._stack is None,
            **self._shard,
        )
        if self._stack is not None:
            self._stack.prepare()

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch, **kwargs):
        """One step; the layout was made by the attention backend's metadata."""
        stack, host = self._attach()
        hidden_TH = stack.forward(input_ids.long(), host)
        return self.logits_processor(
            input_ids,
            hidden_TH,
            self.lm_head,
            forward_batch,
            hidden_states_before_norm=hidden_TH,
        )

    def capture_routing(self, layer: int, topk_ids: Tensor) -> None:
        """Hand routed expert ids to SGLang's capturer (--enable-return-routed-experts), if on."""
        capturer = get_global_experts_capturer()
        if capturer is not None:
            capturer.capture(layer, topk_ids)

    def _logits(self, hidden_nH: Tensor) -> Tensor:
        stack, host = self._attach()
        return stack.logits(hidden_nH, host)

    def _attach(self) -> tuple[InklingModel, Host]:
        """Build the stack over the loaded weights, and make sure that our host feeds it."""
        from inkling_rocm.sglang_plugin.backend import InklingAttentionBackend

        backend = get_attn_backend()
        if not isinstance(backend, InklingAttentionBackend):
            raise RuntimeError(
                f"Inkling runs on inkling-rocm's attention backend, but SGLang built "
                f"{type(backend).__name__}; start it with --attention-backend triton"
            )
        if self._stack is None:
            first_expert = None
            if self._shard["expert_parallel"]:
                moe = self.inkling.text.moe
                assert moe is not None, "a model without experts has none to share out"
                first_expert = self.comm.tp_rank * (moe.num_experts // self.comm.tp_size)
            self._stack = InklingModel(
                self.inkling, self.model.by_name(), self.ops, self.comm.tp_size, first_expert
            )
        return self._stack, backend.host


class InklingForConditionalGenerationMTP(nn.Module):
    """Refused: SGLang builds it for speculative decoding."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        raise RuntimeError(
            "speculative decoding of Inkling is not supported by this plugin yet; start SGLang "
            "without --speculative-algorithm"
        )


def _checkpoint_folder(model_path: str) -> Path:
    """The folder with config.json, from SGLang's --model-path."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model_path, "config.json")).parent


EntryClass = [InklingForConditionalGeneration, InklingForConditionalGenerationMTP]
