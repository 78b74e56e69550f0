"""Every symbol of SGLang that the plugin replaces or calls, with the parameters it relies on.

SGLang changes between releases. `check_symbols` compares this table with the installed one before
anything is replaced; a test does the same, and a test proves that a drift is found.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

SUPPORTED_VERSIONS = ("0.5.23",)
SRT = "sglang.srt."


@dataclass(frozen=True, kw_only=True)
class Symbol:
    """One dependency.

    Attributes:
        path: "module:attribute.attribute" below sglang.srt.
        parameters: names it must take, in this order, after self; None = it need only exist.
        replaced: the plugin puts something of its own in its place.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    replaced: bool = False


SYMBOLS = (
    Symbol(path="models.registry:ModelRegistry.models", replaced=True),
    Symbol(
        path="layers.attention.attention_registry:ATTENTION_BACKENDS",
        replaced=True,
    ),
    Symbol(
        path="layers.attention.attention_registry:create_triton_backend",
        parameters=("runner",),
    ),
    Symbol(
        path="layers.attention.attention_registry:attn_backend_wrapper",
        parameters=("runner", "full_attn_backend"),
        replaced=True,
    ),
    Symbol(
        path="model_executor.model_runner_components.attention_backend_setup:attn_backend_wrapper",
        parameters=("runner", "full_attn_backend"),
        replaced=True,
    ),
    Symbol(
        path="speculative.draft_utils:DraftBackendFactory._create_triton_prefill_backend",
        parameters=(),
        replaced=True,
    ),
    Symbol(path="configs.inkling:InklingModelConfig.mamba2_cache_params", replaced=True),
    Symbol(path="configs.inkling:InklingMMConfig"),
    Symbol(path="configs.inkling:InklingStateDType"),
    Symbol(
        path="layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata",
        parameters=("forward_batch",),
    ),
    Symbol(
        path="layers.logits_processor:LogitsProcessor._compute_lm_head",
        parameters=("hidden_states", "lm_head", "embedding_bias", "out"),
    ),
    Symbol(
        path="layers.logits_processor:LogitsProcessor.forward",
        parameters=("input_ids", "hidden_states", "lm_head", "logits_metadata"),
    ),
    Symbol(
        path="layers.radix_attention:RadixAttention.__init__",
        parameters=("num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id"),
    ),
    Symbol(
        path="mem_cache.swa_memory_pool:SWAKVPool.get_kv_buffer",
        parameters=("layer_id",),
    ),
    Symbol(
        path="mem_cache.swa_memory_pool:SWAKVPool.translate_loc_from_full_to_swa",
        parameters=("kv_indices",),
    ),
    Symbol(
        path="mem_cache.memory_pool:HybridReqToTokenPool.get_mamba_indices",
        parameters=("req_indices",),
    ),
    Symbol(
        path="mem_cache.memory_pool:HybridReqToTokenPool.mamba2_layer_index",
        parameters=("layer_id",),
    ),
    Symbol(
        path="layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata_out_graph",
        parameters=("forward_batch", "in_capture"),
    ),
    Symbol(
        path="layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata_in_graph",
        parameters=("forward_batch",),
    ),
    Symbol(
        path="layers.attention.base_attn_backend:AttentionBackend.init_cuda_graph_state",
        parameters=("max_bs", "max_num_tokens"),
    ),
    Symbol(path="runtime_context:get_server_args", parameters=()),
    Symbol(path="runtime_context:get_exec", parameters=()),
    Symbol(path="runtime_context:mamba_cache_chunk_size"),
    Symbol(path="model_executor.forward_context:get_attn_backend", parameters=()),
    Symbol(path="distributed:get_tp_group", parameters=()),
    Symbol(path="distributed.parallel_state:GroupCoordinator.all_reduce", parameters=("input_",)),
    Symbol(
        path="distributed.parallel_state:GroupCoordinator.all_gather",
        parameters=("input_", "dim"),
    ),
)


def resolve(symbol: Symbol):
    """The object behind a symbol. Raises: ImportError, AttributeError."""
    module, attributes = symbol.path.split(":")
    found = import_module(SRT + module)
    for attribute in attributes.split("."):
        found = (
            inspect.getattr_static(found, attribute)
            if inspect.isclass(found)
            else getattr(found, attribute)
        )
    return found


def drift_of(symbol: Symbol) -> str | None:
    """What is different in the installed SGLang, or None."""
    try:
        found = resolve(symbol)
    except (ImportError, AttributeError) as error:
        return f"{symbol.path}: {error}"
    if symbol.parameters is None:
        return None
    has = tuple(name for name in inspect.signature(found).parameters if name != "self")
    if has[: len(symbol.parameters)] != symbol.parameters:
        return f"{symbol.path} takes ({', '.join(has)}), wanted ({', '.join(symbol.parameters)})"
    return None


def check_symbols(symbols: tuple[Symbol, ...] = SYMBOLS) -> None:
    """Raises: RuntimeError: the installed SGLang is not a tested one, or a symbol has changed."""
    installed = version("sglang")
    if installed not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"sglang {installed} has not been tested with this plugin; install "
            f"sglang=={SUPPORTED_VERSIONS[-1]}"
        )
    drifts = [drift for symbol in symbols if (drift := drift_of(symbol))]
    if drifts:
        raise RuntimeError(
            f"sglang {installed} differs from what the plugin was made for: {'; '.join(drifts)}"
        )
