"""A real model small enough to run thousands of steps, behind an engine or alone."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import (
    AttentionConfig,
    InklingConfig,
    MoEConfig,
    MTPConfig,
    TextConfig,
)
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.model import DraftBlocks, InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named
from tests.support.plain_host import PlainHost, run_chunks

WINDOW = 7
VOCAB = 150


def tiny_config(*, layer_is_local=(True, True, False), conv_taps=4) -> InklingConfig:
    local = AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_rel=4,
        extent=WINDOW,
        window=WINDOW,
        log_floor=None,
        log_alpha=0.1,
    )
    glob = AttentionConfig(
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        d_rel=4,
        extent=12,
        window=0,
        log_floor=20,
        log_alpha=0.3,
    )
    layers = len(layer_is_local)
    text = TextConfig(
        hidden_size=32,
        num_layers=layers,
        vocab_size=VOCAB + 10,
        unpadded_vocab_size=VOCAB,
        context_length=512,
        rms_norm_eps=1e-6,
        conv_taps=conv_taps,
        dense_intermediate_size=48,
        mup_multiplier=2.0,
        local_attention=local,
        global_attention=glob,
        layer_is_local=layer_is_local,
        layer_is_moe=(False,) + (True,) * (layers - 1),
        moe=MoEConfig(
            num_experts=6, top_k=2, num_shared_experts=2, intermediate_size=16, route_scale=2.0
        ),
    )
    return InklingConfig(
        text=text, mtp=None, audio=None, vision=None, dtype="float32", eos_token_ids=(2,)
    )


def tiny_mtp_config() -> InklingConfig:
    """With eight draft blocks of both kinds."""
    local = (True, False, True, False, True, True, True, True)
    mtp = MTPConfig(num_blocks=8, block_is_local=local, chain_hidden_post_norm=False)
    return replace(tiny_config(), mtp=mtp)


@lru_cache(maxsize=8)
def tiny_model(config: InklingConfig) -> InklingModel:
    parts = ("text",) if config.mtp is None else ("text", "mtp")
    weights = allocate(config, dtype=torch.float32, device="cpu", parts=parts)
    fill_dummy(config, weights, seed=3)
    return InklingModel(config, weights, resolve_ops(config, arch_named("cpu"), dtype="float32"))


@lru_cache(maxsize=16)
def tiny_blocks(config: InklingConfig, depths: int) -> DraftBlocks:
    model = tiny_model(config)
    return DraftBlocks(model, model.weights, depths)


def tiny_engine(config: InklingConfig | None = None, **args) -> Engine:
    """An engine over the tiny model; with speculative_num_steps its draft blocks run too."""
    config = config or tiny_config()
    depths = args.get("speculative_num_steps")
    if depths:
        args["speculative_algorithm"] = "EAGLE"
    parts = EngineParts(
        config=config,
        model=tiny_model(config),
        tokenizer=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        drafts=tiny_blocks(config, depths) if depths else None,
    )
    settings = {"page_size": 16, "max_running_requests": 8, "check_invariants": True, **args}
    return Engine(EngineArgs(model_path="tiny", skip_tokenizer_init=True, **settings), parts=parts)


def core_of(engine: Engine) -> EngineCore:
    """The core of an engine, for a test to step: the engine's own thread, which would step it at
    the same time if it came to run late, is ended."""
    engine.shutdown()
    return engine._core


@torch.inference_mode()
def whole_logits(tokens, config: InklingConfig | None = None) -> torch.Tensor:
    """Logits of every position from one forward over a plain host, fp32 [tokens, VOCAB]."""
    config = config or tiny_config()
    host = PlainHost(config, num_requests=1, max_len=len(tokens))
    return run_chunks(tiny_model(config), host, list(tokens), [len(tokens)])


def greedy_tokens(prompt, count, config: InklingConfig | None = None) -> list[int]:
    """Greedy continuation by recomputing everything for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole_logits(tokens, config)[-1].argmax()))
    return tokens[len(prompt) :]
