"""A tiny checkpoint in the released layout, written tensor by tensor without the weight table."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

H, L, V, VU = 64, 3, 128, 120
HEADS, KV, LOCAL_KV, D, R, EXTENT, WINDOW = 16, 2, 4, 8, 4, 24, 16
X, S, I, DENSE_I, W = 4, 2, 16, 32, 4
LOCAL_IDS, NUM_DENSE, MTP_BLOCKS, MTP_LOCAL_IDS = [0, 1], 1, 2, [0]

CONFIG_JSON = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 6,
    "text_config": {
        "model_max_length": 512,
        "torch_dtype": "bfloat16",
        "hidden_size": H,
        "num_hidden_layers": L,
        "vocab_size": V,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "d_rel": R,
        "rel_extent": EXTENT,
        "q_bias": False,
        "o_bias": False,
        "log_scaling_n_floor": 40,
        "log_scaling_alpha": 0.1,
        "rms_norm_eps": 1e-6,
        "use_embed_norm": True,
        "local_layer_ids": LOCAL_IDS,
        "dense_mlp_idx": NUM_DENSE,
        "use_sconv": True,
        "sconv_kernel_size": W,
        "unpadded_vocab_size": VU,
        "logits_mup_width_multiplier": 2.0,
        "final_logit_softcapping": None,
        "swa_head_dim": D,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": LOCAL_KV,
        "sliding_window_size": WINDOW,
        "n_routed_experts": X,
        "num_experts_per_tok": 2,
        "n_shared_experts": S,
        "shared_expert_sink": True,
        "dense_intermediate_size": DENSE_I,
        "intermediate_size": I,
        "route_scale": 8.0,
        "use_gate_bias": True,
        "gate_activation": "sigmoid",
        "norm_after_topk": True,
        "use_global_scale": True,
    },
    "audio_config": {"decoder_dmodel": H, "n_mel_bins": 8, "mel_vocab_size": 4},
    "vision_config": {
        "decoder_dmodel": H,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "n_channels": 3,
        "n_layers": 4,
    },
    "mtp_config": {
        "num_nextn_predict_layers": MTP_BLOCKS,
        "chain_hidden_post_norm": False,
        "local_layer_ids": MTP_LOCAL_IDS,
    },
}


def config_json() -> dict:
    return copy.deepcopy(CONFIG_JSON)


def released_tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Random tensors under released names, in released dtypes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, *shape: int, as_dtype: torch.dtype = dtype) -> None:
        tensors[name] = torch.randn(*shape, generator=generator).to(as_dtype)

    def block(prefix: str, local: bool, dense: bool) -> None:
        kv, extent = (LOCAL_KV, WINDOW) if local else (KV, EXTENT)
        for norm in ("attn_norm", "mlp_norm"):
            put(f"{prefix}{norm}.weight", H)
        for conv in ("attn_sconv", "mlp_sconv"):
            put(f"{prefix}{conv}.weight", H, 1, W)
        attn = prefix + "attn."
        put(attn + "wq_du.weight", HEADS * D, H)
        put(attn + "wk_dv.weight", kv * D, H)
        put(attn + "wv_dv.weight", kv * D, H)
        put(attn + "wr_du.weight", HEADS * R, H)
        put(attn + "wo_ud.weight", H, HEADS * D)
        put(attn + "q_norm.weight", D)
        put(attn + "k_norm.weight", D)
        put(attn + "k_sconv.weight", kv * D, 1, W)
        put(attn + "v_sconv.weight", kv * D, 1, W)
        put(attn + "rel_logits_proj.proj", R, extent)
        mlp = prefix + "mlp."
        if dense:
            put(mlp + "w13_dn.weight", 2 * DENSE_I, H)
            put(mlp + "w2_md.weight", H, DENSE_I)
            put(mlp + "global_scale", 1)
        else:
            put(mlp + "gate.weight", X + S, H)
            put(mlp + "gate.bias", X, as_dtype=torch.float32)
            put(mlp + "gate.global_scale", 1, as_dtype=torch.float32)
            put(mlp + "experts.w13_weight", X, 2 * I, H)
            put(mlp + "experts.w2_weight", X, H, I)
            put(mlp + "shared_experts.shared_w13_weight", S, 2 * I, H)
            put(mlp + "shared_experts.shared_w2_weight", S, H, I)

    put("model.llm.embed.weight", V, H)
    put("model.llm.embed_norm.weight", H)
    put("model.llm.norm.weight", H)
    put("model.llm.unembed.weight", V, H)
    for i in range(L):
        block(f"model.llm.layers.{i}.", i in LOCAL_IDS, i < NUM_DENSE)
    for m in range(MTP_BLOCKS):
        put(f"model.mtp.layers.{m}.embed_norm.weight", H)
        put(f"model.mtp.layers.{m}.hidden_norm.weight", H)
        put(f"model.mtp.layers.{m}.input_proj.weight", H, 2 * H)
        block(f"model.mtp.layers.{m}.transformer_block.", m in MTP_LOCAL_IDS, True)
    put("model.audio.encoder.weight", 8 * 4, H)
    put("model.audio.final_norm.weight", H)
    for i, (width_in, width_out) in enumerate([(12, 64), (256, 64), (128, 6144), (6144, H)]):
        put(f"model.visual.layers.linear_{i}.weight", width_out, width_in)
        if i < 3:
            put(f"model.visual.layers.norm_{i}.weight", width_out)
    put("model.visual.final_norm.weight", H)
    return tensors


def write_checkpoint(folder: Path, tensors: dict, *, num_shards: int = 3) -> Path:
    """config.json, `num_shards` safetensors files and their index (no index for one)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        mine = names[shard::num_shards]
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
