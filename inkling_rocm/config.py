"""Reading a checkpoint's config.json into frozen dataclasses.

Two dialects end in the same dataclasses: the released one (`local_layer_ids`,
`dense_intermediate_size`, ...) and the one transformers writes (`layer_types`,
`moe_intermediate_size`, ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inkling_rocm.config_keys import AUDIO, MTP, TEXT, TOP, VISION, Section
from inkling_rocm.config_override import override_config
from inkling_rocm.config_types import (
    AttentionConfig,
    AudioConfig,
    InklingConfig,
    MoEConfig,
    MTPConfig,
    TextConfig,
    VisionConfig,
)

__all__ = [
    "DTYPES",
    "AttentionConfig",
    "AudioConfig",
    "InklingConfig",
    "MTPConfig",
    "MoEConfig",
    "TextConfig",
    "VisionConfig",
    "load_config",
    "parse_config",
    "read_json",
]

DTYPES = ("bfloat16", "float16", "float32")
_MTP_KEYS_IN_TEXT = {
    "num_nextn_predict_layers": "num_mtp_layers",
    "local_layer_ids": "mtp_local_layer_ids",
    "chain_hidden_post_norm": "chain_hidden_post_norm",
}


def load_config(path: str | Path, override: Mapping[str, Any] | None = None) -> InklingConfig:
    """Read a checkpoint folder's config.json (and generation_config.json, if there).

    Args:    path: the folder, or the config.json itself. override: see override_config.
    Raises:  FileNotFoundError: no config.json. ValueError: a key or value that is not supported,
             or a quantised checkpoint.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; wanted a checkpoint folder's config.json")
    folder = file.parent
    if (folder / "hf_quant_config.json").exists():
        raise ValueError(
            f"{folder / 'hf_quant_config.json'} marks a quantised checkpoint; only bf16, fp16 and "
            f"fp32 weights load so far. Point to the unquantised checkpoint."
        )
    config_json = read_json(file)
    if override:
        config_json = override_config(config_json, override)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else None
    try:
        return parse_config(config_json, generation)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def parse_config(
    config_json: Mapping[str, Any], generation_json: Mapping[str, Any] | None = None
) -> InklingConfig:
    """Turn a parsed config.json of either dialect into an InklingConfig.

    Args:
        generation_json: the parsed generation_config.json; only its eos_token_id is used, and not
            when transformers derived the file from config.json (`_from_model_config`): the id is
            then its default of 2, an ordinary token of this vocabulary.
    Raises:
        ValueError: names the key, its value and what was wanted.
    """
    top = Section(config_json, "", TOP)
    if top.pick("model_type")[1] is None:
        raise ValueError("config.json: model_type is missing, wanted 'inkling_mm_model'")
    text_section = Section(top.required("text_config")[1], "text_config", TEXT)
    text = _parse_text(text_section)
    return InklingConfig(
        text=text,
        mtp=_parse_mtp(top, text_section, text),
        audio=_parse_audio(top, text.hidden_size),
        vision=_parse_vision(top, text.hidden_size),
        dtype=_parse_dtype(top, text_section),
        eos_token_ids=_parse_eos(top, generation_json or {}),
    )


def _parse_text(section: Section) -> TextConfig:
    num_layers = section.integer("num_hidden_layers")
    vocab_size = section.integer("vocab_size")
    unpadded = section.optional_integer("unpadded_vocab_size") or vocab_size
    if unpadded > vocab_size:
        raise ValueError(
            f"{section.label('unpadded_vocab_size')} is {unpadded}, more than vocab_size "
            f"{vocab_size}"
        )
    layer_is_moe = _layer_is_moe(section, num_layers)
    # With dense_intermediate_size (the released dialect) intermediate_size is the EXPERT width;
    # without it (transformers' dialect) it is the dense MLP's. Files mix other keys of the two.
    if section.pick("dense_intermediate_size")[1] is not None:
        dense_key, expert_key = "dense_intermediate_size", "intermediate_size"
    else:
        dense_key, expert_key = "intermediate_size", "moe_intermediate_size"
    return TextConfig(
        hidden_size=section.integer("hidden_size"),
        num_layers=num_layers,
        vocab_size=vocab_size,
        unpadded_vocab_size=unpadded,
        context_length=section.integer("model_max_length", "max_position_embeddings"),
        rms_norm_eps=section.number("rms_norm_eps", minimum=0.0, exclusive=True),
        conv_taps=section.integer("sconv_kernel_size", "conv_kernel_size"),
        dense_intermediate_size=section.integer(dense_key),
        mup_multiplier=section.number("logits_mup_width_multiplier", minimum=0.0, exclusive=True),
        local_attention=_parse_attention(section, local=True),
        global_attention=_parse_attention(section, local=False),
        layer_is_local=_layer_is_local(section, num_layers),
        layer_is_moe=layer_is_moe,
        moe=_parse_moe(section, expert_key) if any(layer_is_moe) else None,
    )


def _parse_attention(section: Section, *, local: bool) -> AttentionConfig:
    prefix = "swa_" if local else ""
    heads = section.integer(f"{prefix}num_attention_heads")
    kv_heads = section.integer(f"{prefix}num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"{section.label(prefix + 'num_attention_heads')} is {heads}, not a multiple of "
            f"{prefix}num_key_value_heads {kv_heads}"
        )
    window = section.integer("sliding_window_size") if local else 0
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=section.integer(f"{prefix}head_dim"),
        d_rel=section.integer("d_rel"),
        # A local layer's bias reaches exactly as far as its window.
        extent=window if local else section.integer("rel_extent"),
        window=window,
        log_floor=None if local else section.optional_integer("log_scaling_n_floor"),
        log_alpha=section.number("log_scaling_alpha", minimum=0.0),
    )


def _layer_is_local(section: Section, num_layers: int) -> tuple[bool, ...]:
    ids, types = section.pick("local_layer_ids")[1], section.pick("layer_types")[1]
    if types is None:
        return section.index_flags("local_layer_ids", num_layers)
    by_type = section.name_flags("layer_types", num_layers, "hybrid_sliding", "hybrid")
    if ids is not None and section.index_flags("local_layer_ids", num_layers) != by_type:
        raise ValueError(f"{section.label('local_layer_ids')} and layer_types disagree")
    return by_type


def _layer_is_moe(section: Section, num_layers: int) -> tuple[bool, ...]:
    num_dense = section.optional_integer("dense_mlp_idx", minimum=0)
    by_index = None
    if num_dense is not None:
        if num_dense > num_layers:
            raise ValueError(
                f"{section.label('dense_mlp_idx')} is {num_dense}, wanted at most "
                f"num_hidden_layers {num_layers}"
            )
        by_index = tuple(i >= num_dense for i in range(num_layers))
    if section.pick("mlp_layer_types")[1] is None:
        if by_index is None:
            raise ValueError(f"{section.label('dense_mlp_idx / mlp_layer_types')} is missing")
        return by_index
    by_type = section.name_flags("mlp_layer_types", num_layers, "sparse", "dense")
    if by_index is not None and by_index != by_type:
        raise ValueError(f"{section.label('dense_mlp_idx')} and mlp_layer_types disagree")
    return by_type


def _parse_moe(section: Section, expert_key: str) -> MoEConfig:
    moe = MoEConfig(
        num_experts=section.integer("n_routed_experts"),
        top_k=section.integer("num_experts_per_tok"),
        num_shared_experts=section.integer("n_shared_experts"),
        intermediate_size=section.integer(expert_key),
        route_scale=section.number("route_scale", minimum=0.0, exclusive=True),
    )
    if moe.top_k > moe.num_experts:
        raise ValueError(
            f"{section.label('num_experts_per_tok')} is {moe.top_k}, more than "
            f"n_routed_experts {moe.num_experts}"
        )
    return moe


def _parse_mtp(top: Section, text_section: Section, text: TextConfig) -> MTPConfig | None:
    """mtp_config at top level (released), or the same facts inside text_config (transformers);
    a file transformers re-saved has both, which must agree."""
    values = top.pick("mtp_config")[1]
    section = Section({} if values is None else values, "mtp_config", MTP)
    extent = section.optional_integer("local_extent")
    if extent is not None and extent != text.local_attention.extent:
        raise ValueError(
            f"{section.label('local_extent')} is {extent}; only the local layers' "
            f"{text.local_attention.extent} is implemented"
        )
    merged = {}
    for key, text_key in _MTP_KEYS_IN_TEXT.items():
        here, there = section.pick(key)[1], text_section.pick(text_key)[1]
        if here is not None and there is not None and here != there:
            raise ValueError(
                f"{section.label(key)} is {here!r} but text_config.{text_key} is {there!r}; both "
                f"name the same thing, so they must agree"
            )
        merged[key] = there if here is None else here
    both = Section(merged, "mtp_config", MTP)
    chained = both.boolean("chain_hidden_post_norm", default=False)
    if values is None and merged["num_nextn_predict_layers"] is None:
        return None
    num_blocks = both.integer("num_nextn_predict_layers", minimum=0)
    flags = (False,) * num_blocks
    if num_blocks == 0:
        return None
    if merged["local_layer_ids"] is not None:
        flags = both.index_flags("local_layer_ids", num_blocks)
    return MTPConfig(num_blocks=num_blocks, block_is_local=flags, chain_hidden_post_norm=chained)


def _parse_audio(top: Section, hidden_size: int) -> AudioConfig | None:
    if top.pick("audio_config")[1] is None:
        return None
    section = Section(top.values["audio_config"], "audio_config", AUDIO)
    _check_tower_width(section, hidden_size)
    return AudioConfig(
        num_mel_bins=section.integer("n_mel_bins"), num_levels=section.integer("mel_vocab_size")
    )


def _parse_vision(top: Section, hidden_size: int) -> VisionConfig | None:
    if top.pick("vision_config")[1] is None:
        return None
    section = Section(top.values["vision_config"], "vision_config", VISION)
    _check_tower_width(section, hidden_size)
    return VisionConfig(
        patch_size=section.integer("patch_size"),
        temporal_patch_size=section.integer("temporal_patch_size"),
        num_channels=section.integer("n_channels", "num_channels"),
        num_layers=section.integer("n_layers", "num_hidden_layers"),
    )


def _check_tower_width(section: Section, hidden_size: int) -> None:
    width = section.optional_integer("decoder_dmodel", "text_hidden_size")
    if width is not None and width != hidden_size:
        raise ValueError(
            f"{section.label('decoder_dmodel')} is {width}, wanted text_config.hidden_size "
            f"{hidden_size}: the tower's rows enter the language model unprojected"
        )


def _parse_dtype(top: Section, text: Section) -> str:
    """The top-level dtype (what transformers saved) before text_config's; bfloat16 if neither."""
    for section in (top, text):
        name, value = section.pick("dtype", "torch_dtype")
        if value is None:
            continue
        dtype = str(value).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"{section.label(name)} is {value!r}, wanted one of {DTYPES}")
        return dtype
    return "bfloat16"


def _parse_eos(top: Section, generation_json: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids in the order found: config.json's, then those generation_config.json adds."""
    sources = [(top.label("eos_token_id"), top.pick("eos_token_id")[1])]
    if not generation_json.get("_from_model_config"):
        sources.append(
            ("generation_config.json: eos_token_id", generation_json.get("eos_token_id"))
        )
    ids: list[int] = []
    for label, value in sources:
        for token in [] if value is None else value if isinstance(value, list) else [value]:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"{label} is {value!r}, wanted a token id or a list of them")
            if token not in ids:
                ids.append(token)
    return tuple(ids)


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises: ValueError: it holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}, wanted an object")
    return content
