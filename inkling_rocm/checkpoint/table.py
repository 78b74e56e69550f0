"""THE weight table: which released tensors make up which parameter, and how ranks share them.

Loading, sharding, dummy weights and export read nothing else. Parameter names and shapes are those
`InklingModel` takes; released names are those of the published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from inkling_rocm.checkpoint.entry import Kind, Layout, Part, Piece, Split, WeightEntry
from inkling_rocm.checkpoint.vision_plan import hmlp_dims
from inkling_rocm.config import AttentionConfig, InklingConfig, MoEConfig, TextConfig


@lru_cache(maxsize=16)
def weight_entries(config: InklingConfig, expert_parallel: bool = False) -> tuple[WeightEntry, ...]:
    """Every parameter of the checkpoint: text, then MTP, audio and vision if configured.

    Args: expert_parallel: a rank holds whole routed experts instead of a slice of each one's width.
    """
    return (
        *_text_entries(config.text, expert_parallel),
        *_mtp_entries(config),
        *_audio_entries(config),
        *_vision_entries(config),
    )


@lru_cache(maxsize=16)
def released_names(config: InklingConfig) -> dict[str, tuple[WeightEntry, int]]:
    """Released tensor name -> (entry, index of its piece). Do not modify the result."""
    return {
        piece.name: (entry, index)
        for entry in weight_entries(config)
        for index, piece in enumerate(entry.pieces)
    }


def allocate(
    config: InklingConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_parallel: bool = False,
    parts: Sequence[Part] = ("text",),
) -> dict[str, Tensor]:
    """Uninitialised parameters of one tensor-parallel rank.

    Args:    dtype: of the model; convolutions, gate bias and scales are fp32 whatever it is.
             expert_parallel: see weight_entries. parts: which of "text", "mtp", "audio", "vision".
    Raises:  ValueError: a rank outside 0..tp_size-1, a shape that tp_size does not divide, a part
             that the config does not have.
    """
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tp_rank is {tp_rank}, wanted 0..{tp_size - 1} for tp_size {tp_size}")
    entries = [entry for entry in weight_entries(config, expert_parallel) if entry.part in parts]
    absent = [part for part in parts if all(entry.part != part for entry in entries)]
    if absent:
        raise ValueError(f"parts {absent} are not in this checkpoint's config.json")
    # Shapes first: a refusal must not come after gigabytes were allocated.
    shapes = [entry.shape(tp_rank, tp_size) for entry in entries]
    return {
        entry.name: torch.empty(shape, dtype=entry.kept_dtype(dtype), device=device)
        for entry, shape in zip(entries, shapes, strict=True)
    }


def weight_bytes(
    config: InklingConfig,
    dtype: torch.dtype,
    tp_size: int = 1,
    expert_parallel: bool = False,
    parts: Sequence[Part] = ("text",),
) -> int:
    """Memory of the parameters of `parts` on one rank. Raises: ValueError: as `allocate`."""
    return sum(
        math.prod(entry.shape(0, tp_size)) * entry.kept_dtype(dtype).itemsize
        for entry in weight_entries(config, expert_parallel)
        if entry.part in parts
    )


def _entry(
    part: Part,
    kind: Kind,
    name: str,
    released: str,
    shape: tuple[int, ...],
    layout: Layout = "plain",
    split: Split | None = None,
) -> WeightEntry:
    piece = Piece(name=released, shape=shape, layout=layout, split=split)
    return WeightEntry(name=name, part=part, kind=kind, pieces=(piece,))


def _text_entries(text: TextConfig, expert_parallel: bool) -> Iterator[WeightEntry]:
    V, H = text.vocab_size, text.hidden_size
    rows = Split(dim=0, units=V, what="vocabulary rows")
    llm = "model.llm."
    yield _entry("text", "embedding", "embed", llm + "embed.weight", (V, H), split=rows)
    yield _entry("text", "norm", "embed_norm", llm + "embed_norm.weight", (H,))
    for i in range(text.num_layers):
        moe = text.moe if text.layer_is_moe[i] else None
        yield from _layer_entries(
            "text",
            f"layers.{i}.",
            f"{llm}layers.{i}.",
            text,
            text.attention(i),
            moe,
            expert_parallel,
        )
    yield _entry("text", "norm", "final_norm", llm + "norm.weight", (H,))
    yield _entry("text", "head", "lm_head", llm + "unembed.weight", (V, H), split=rows)


def _layer_entries(
    part: Part,
    name: str,
    released: str,
    text: TextConfig,
    attention: AttentionConfig,
    moe: MoEConfig | None,
    expert_parallel: bool = False,
) -> Iterator[WeightEntry]:
    """A layer of the stack, or the block of an MTP depth; moe=None means a dense MLP."""
    H, W = text.hidden_size, text.conv_taps
    yield _entry(part, "norm", name + "attn_norm", released + "attn_norm.weight", (H,))
    yield _entry(part, "norm", name + "mlp_norm", released + "mlp_norm.weight", (H,))
    for conv in ("attn", "mlp"):
        yield _entry(
            part, "conv", f"{name}{conv}_conv", f"{released}{conv}_sconv.weight", (H, 1, W), "conv"
        )
    yield from _attention_entries(part, name + "attn.", released + "attn.", text, attention)
    if moe is None:
        yield from _dense_entries(part, name + "mlp.", released + "mlp.", text)
    else:
        yield from _moe_entries(part, name + "moe.", released + "mlp.", H, moe, expert_parallel)


def _attention_entries(
    part: Part, name: str, released: str, text: TextConfig, attention: AttentionConfig
) -> Iterator[WeightEntry]:
    H, W = text.hidden_size, text.conv_taps
    h, g = attention.num_heads, attention.num_kv_heads
    D, R = attention.head_dim, attention.d_rel
    heads = Split(dim=0, units=h, what="query heads")
    kv_heads = Split(dim=0, units=g, what="kv heads", replicate=True)
    qkvr = (
        Piece(name=released + "wq_du.weight", shape=(h * D, H), split=heads),
        Piece(name=released + "wk_dv.weight", shape=(g * D, H), split=kv_heads),
        Piece(name=released + "wv_dv.weight", shape=(g * D, H), split=kv_heads),
        Piece(name=released + "wr_du.weight", shape=(h * R, H), split=heads),
    )
    yield WeightEntry(name=name + "qkvr", part=part, kind="matrix", pieces=qkvr)
    for kv in "kv":
        yield _entry(
            part,
            "conv",
            f"{name}{kv}_conv",
            f"{released}{kv}_sconv.weight",
            (g * D, 1, W),
            "conv",
            kv_heads,
        )
    yield _entry(part, "norm", name + "q_norm", released + "q_norm.weight", (D,))
    yield _entry(part, "norm", name + "k_norm", released + "k_norm.weight", (D,))
    yield _entry(
        part,
        "rel_proj",
        name + "rel_proj",
        released + "rel_logits_proj.proj",
        (R, attention.extent),
    )
    columns = Split(dim=1, units=h, what="query heads")
    yield _entry(
        part, "matrix", name + "o_proj", released + "wo_ud.weight", (H, h * D), split=columns
    )


def _dense_entries(part: Part, name: str, released: str, text: TextConfig) -> Iterator[WeightEntry]:
    H, I = text.hidden_size, text.dense_intermediate_size
    pairs = Split(dim=0, units=I, what="MLP columns")
    columns = Split(dim=1, units=I, what="MLP columns")
    yield _entry(
        part,
        "matrix",
        name + "gate_up",
        released + "w13_dn.weight",
        (2 * I, H),
        "interleaved",
        pairs,
    )
    yield _entry(part, "matrix", name + "down", released + "w2_md.weight", (H, I), split=columns)
    yield _entry(part, "mlp_scale", name + "global_scale", released + "global_scale", (1,))


def _moe_entries(
    part: Part, name: str, released: str, H: int, moe: MoEConfig, expert_parallel: bool
) -> Iterator[WeightEntry]:
    X, S, I = moe.num_experts, moe.num_shared_experts, moe.intermediate_size
    yield _entry(part, "matrix", name + "gate_weight", released + "gate.weight", (X + S, H))
    yield _entry(part, "gate_bias", name + "gate_bias", released + "gate.bias", (X,))
    yield _entry(part, "gate_scale", name + "global_scale", released + "gate.global_scale", (1,))
    pairs = Split(dim=1, units=I, what="expert columns")
    columns = Split(dim=2, units=I, what="expert columns")
    whole = Split(dim=0, units=X, what="routed experts")
    for prefix, folder, count in (("", "experts.", X), ("shared_", "shared_experts.shared_", S)):
        by_expert = expert_parallel and not prefix
        w13, w2 = f"{folder}w13_weight", f"{folder}w2_weight"
        yield _entry(
            part,
            "matrix",
            f"{name}{prefix}w13",
            released + w13,
            (count, 2 * I, H),
            "interleaved",
            whole if by_expert else pairs,
        )
        yield _entry(
            part,
            "matrix",
            f"{name}{prefix}w2",
            released + w2,
            (count, H, I),
            split=whole if by_expert else columns,
        )


def _mtp_entries(config: InklingConfig) -> Iterator[WeightEntry]:
    if config.mtp is None:
        return
    text, H = config.text, config.text.hidden_size
    for m, is_local in enumerate(config.mtp.block_is_local):
        name, released = f"mtp.{m}.", f"model.mtp.layers.{m}."
        yield _entry("mtp", "norm", name + "embed_norm", released + "embed_norm.weight", (H,))
        yield _entry("mtp", "norm", name + "hidden_norm", released + "hidden_norm.weight", (H,))
        yield _entry(
            "mtp", "matrix", name + "input_proj", released + "input_proj.weight", (H, 2 * H)
        )
        attention = text.local_attention if is_local else text.global_attention
        yield from _layer_entries(
            "mtp", name + "block.", released + "transformer_block.", text, attention, None
        )
    if config.mtp.chain_hidden_post_norm:
        yield _entry("mtp", "norm", "mtp.chain_norm", "model.mtp.chain_norm.weight", (H,))


def _audio_entries(config: InklingConfig) -> Iterator[WeightEntry]:
    if config.audio is None:
        return
    H, rows = config.text.hidden_size, config.audio.num_mel_bins * config.audio.num_levels
    yield _entry("audio", "embedding", "audio.encoder", "model.audio.encoder.weight", (rows, H))
    yield _entry("audio", "norm", "audio.final_norm", "model.audio.final_norm.weight", (H,))


def _vision_entries(config: InklingConfig) -> Iterator[WeightEntry]:
    if config.vision is None:
        return
    dims = hmlp_dims(config.vision, config.text.hidden_size)
    for i, (dim_in, dim_out) in enumerate(dims):
        released = f"model.visual.layers.linear_{i}.weight"
        yield _entry("vision", "matrix", f"visual.linear_{i}", released, (dim_out, dim_in))
        if i < len(dims) - 1:
            released = f"model.visual.layers.norm_{i}.weight"
            yield _entry("vision", "norm", f"visual.norm_{i}", released, (dim_out,))
    H = config.text.hidden_size
    yield _entry("vision", "norm", "visual.final_norm", "model.visual.final_norm.weight", (H,))
