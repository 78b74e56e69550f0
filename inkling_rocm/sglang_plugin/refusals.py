"""Flags of SGLang that this plugin does not serve, each refused with its reason.

A field that SGLang no longer has is an AttributeError: a refusal must not lapse by a renaming.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# flag -> (is it asked for?, reason)
Refusal = tuple[str, Callable[[Any], bool], str]


def _set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name) or 1) > 1


REFUSALS: tuple[Refusal, ...] = (
    ("--speculative-algorithm", _set("speculative_algorithm"), "MTP is not wired up yet"),
    ("--enable-lora", _set("enable_lora"), "LoRA adapters are not applied"),
    ("--lora-paths", _set("lora_paths"), "LoRA adapters are not applied"),
    ("--dp-size", _above_one("attn_dp_size"), "attention data parallelism is not supported"),
    ("--dcp-size", _above_one("dcp_size"), "decode context parallelism is not supported"),
    ("--attn-cp-size", _above_one("attn_cp_size"), "context parallelism is not supported"),
    ("--pp-size", _above_one("pp_size"), "pipeline stages are not supported yet"),
    (
        "--ep-size",
        lambda args: args.ep_size not in (1, args.tp_size),
        "ranks hold a slice of every expert (1) or whole experts (the --tp size)",
    ),
    (
        "--moe-a2a-backend",
        lambda args: args.moe_a2a_backend != "none",
        "every rank sees all tokens; experts' results are summed by an all-reduce",
    ),
    ("--enable-eplb", _set("enable_eplb"), "experts are not redistributed"),
    ("--enable-unified-memory", _set("enable_unified_memory"), "page tables would be virtual"),
    ("--quantization", _set("quantization"), "only bf16, fp16 and fp32 checkpoints load"),
    (
        "--enable-int8-mamba-checkpoint",
        _set("enable_int8_mamba_checkpoint"),
        "convolution state must be kept as the taps see it",
    ),
    ("--enable-multimodal", _set("enable_multimodal"), "the image and audio towers do not run yet"),
    (
        "--kv-cache-dtype",
        lambda args: args.kv_cache_dtype not in ("auto", "bfloat16", "bf16"),
        "keys and values are kept in the model's dtype",
    ),
    (
        "--disaggregation-mode",
        lambda args: args.disaggregation_mode not in (None, "null"),
        "prefill-decode disaggregation is not tested",
    ),
    (
        "--enable-torch-compile",
        _set("enable_torch_compile"),
        "the model is built from kernels, torch.compile has nothing to fuse",
    ),
)


def refuse_unsupported(server_args) -> None:
    """Raises: RuntimeError: names every flag that is not supported, and why."""
    found = [f"{flag}: {reason}" for flag, asked, reason in REFUSALS if asked(server_args)]
    if found:
        raise RuntimeError(
            f"inkling-rocm's SGLang plugin does not support {'; '.join(found)}. Start the server "
            "without."
        )


def refuse_graphs(config) -> None:
    """Decode runs from graphs, prompts do not.

    Args:   config: SGLang's published cuda_graph_config; None = it captures nothing.
    Raises: RuntimeError: a graph that is not supported.
    """
    if config is None:
        return
    if config.prefill.backend != "disabled":
        raise RuntimeError(
            f"inkling-rocm's SGLang plugin runs prompts eagerly, but SGLang would capture them "
            f"({config.prefill.backend}, its default for Inkling). Add --disable-prefill-cuda-graph"
        )
    if config.decode.backend not in ("full", "disabled"):
        raise RuntimeError(
            f"--cuda-graph-backend-decode {config.decode.backend}: inkling-rocm's SGLang plugin "
            "supports full and disabled"
        )
