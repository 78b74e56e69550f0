"""An InklingConfig as config.json in the released dialect: the inverse of parse_config."""

from __future__ import annotations

from typing import Any

from inkling_rocm.config import InklingConfig, TextConfig, parse_config


def released_config(config: InklingConfig) -> dict[str, Any]:
    """The config.json of a released checkpoint with this config.

    Raises: ValueError: the config says something config.json has no words for.
    """
    result: dict[str, Any] = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
    }
    if config.eos_token_ids:
        ids = config.eos_token_ids
        result["eos_token_id"] = ids[0] if len(ids) == 1 else list(ids)
    result["text_config"] = _text(config.text, config.dtype)
    width = config.text.hidden_size
    if config.audio is not None:
        result["audio_config"] = {
            "decoder_dmodel": width,
            "n_mel_bins": config.audio.num_mel_bins,
            "mel_vocab_size": config.audio.num_levels,
            "bias": False,
            "dmel_min_value": -7.0,
            "dmel_max_value": 2.0,
            "use_audio_norm": True,
            "audio_mode": "dmel",
        }
    if config.vision is not None:
        result["vision_config"] = {
            "vision_encoder_type": "hmlp",
            "decoder_dmodel": width,
            "patch_size": config.vision.patch_size,
            "temporal_patch_size": config.vision.temporal_patch_size,
            "n_channels": config.vision.num_channels,
            "n_layers": config.vision.num_layers,
            "use_vision_norm": True,
        }
    if config.mtp is not None:
        result["mtp_config"] = {
            "num_nextn_predict_layers": config.mtp.num_blocks,
            "chain_hidden_post_norm": config.mtp.chain_hidden_post_norm,
            "local_layer_ids": _true_ids(config.mtp.block_is_local),
        }
    if parse_config(result) != config:
        raise ValueError(
            f"this config cannot be written as a released config.json: {config} would be read back "
            f"as {parse_config(result)}"
        )
    return result


def _text(text: TextConfig, dtype: str) -> dict[str, Any]:
    local, whole = text.local_attention, text.global_attention
    result = {
        "model_max_length": text.context_length,
        "torch_dtype": dtype,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_layers,
        "vocab_size": text.vocab_size,
        "num_attention_heads": whole.num_heads,
        "num_key_value_heads": whole.num_kv_heads,
        "head_dim": whole.head_dim,
        "d_rel": whole.d_rel,
        "rel_extent": whole.extent,
        "q_bias": False,
        "o_bias": False,
        "log_scaling_n_floor": whole.log_floor,
        "log_scaling_alpha": whole.log_alpha,
        "rms_norm_eps": text.rms_norm_eps,
        "use_embed_norm": True,
        "local_layer_ids": _true_ids(text.layer_is_local),
        "use_sconv": True,
        "sconv_kernel_size": text.conv_taps,
        "unpadded_vocab_size": text.unpadded_vocab_size,
        "logits_mup_width_multiplier": text.mup_multiplier,
        "final_logit_softcapping": None,
        "swa_head_dim": local.head_dim,
        "swa_num_attention_heads": local.num_heads,
        "swa_num_key_value_heads": local.num_kv_heads,
        "sliding_window_size": local.window,
        "dense_intermediate_size": text.dense_intermediate_size,
    }
    num_dense = text.layer_is_moe.count(False)
    if text.layer_is_moe == tuple(i >= num_dense for i in range(text.num_layers)):
        result["dense_mlp_idx"] = num_dense
    else:  # only transformers' dialect can mix dense and MoE layers freely
        result["mlp_layer_types"] = ["sparse" if moe else "dense" for moe in text.layer_is_moe]
    if text.moe is not None:
        result |= {
            "n_routed_experts": text.moe.num_experts,
            "num_experts_per_tok": text.moe.top_k,
            "n_shared_experts": text.moe.num_shared_experts,
            "shared_expert_sink": True,
            "intermediate_size": text.moe.intermediate_size,
            "route_scale": text.moe.route_scale,
            "use_gate_bias": True,
            "gate_activation": "sigmoid",
            "norm_after_topk": True,
            "use_global_scale": True,
        }
    return result


def _true_ids(flags: tuple[bool, ...]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]
