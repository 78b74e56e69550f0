"""A tiny random checkpoint in the released dialect, which SGLang, transformers and we all read."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.export import export_checkpoint
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import load_config

HIDDEN, WINDOW = 128, 16
TEXT = {
    "model_max_length": 4096, "torch_dtype": "float32", "hidden_size": HIDDEN,
    "num_hidden_layers": 4, "vocab_size": 512, "unpadded_vocab_size": 500,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "d_rel": 16,
    "rel_extent": 64, "q_bias": False, "o_bias": False, "log_scaling_n_floor": 40,
    "log_scaling_alpha": 0.1, "rms_norm_eps": 1e-6, "use_embed_norm": True,
    "local_layer_ids": [0, 1, 3], "dense_mlp_idx": 1, "use_sconv": True, "sconv_kernel_size": 4,
    "logits_mup_width_multiplier": 2.0, "final_logit_softcapping": None, "swa_head_dim": 32,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "sliding_window_size": WINDOW,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2,
    "shared_expert_sink": True, "dense_intermediate_size": 192, "intermediate_size": 64,
    "route_scale": 8.0, "use_gate_bias": True, "gate_activation": "sigmoid",
    "norm_after_topk": True, "use_global_scale": True,
}  # fmt: skip
CONFIG = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 6,
    "torch_dtype": "float32",
    "text_config": TEXT,
    "audio_config": {
        "decoder_dmodel": HIDDEN, "n_mel_bins": 8, "mel_vocab_size": 4, "bias": False,
        "dmel_min_value": -7.0, "dmel_max_value": 2.0, "use_audio_norm": True,
        "audio_mode": "dmel",
    },
    "vision_config": {
        "vision_encoder_type": "hmlp", "decoder_dmodel": HIDDEN, "patch_size": 40,
        "temporal_patch_size": 2, "n_channels": 3, "n_layers": 4, "use_vision_norm": True,
    },
}  # fmt: skip


def write_checkpoint(folder: Path) -> Path:
    """Write config.json and safetensors; random weights, seeded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = load_config(folder)
    weights = allocate(config, dtype=torch.float32, device="cpu")
    fill_dummy(config, weights, seed=1)
    export_checkpoint(config, weights, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def oracle_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy continuation in float32."""
    from transformers import AutoModelForImageTextToText

    model = _models.get(folder)
    if model is None:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        _models[folder] = model
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=count, eos_token_id=None, use_cache=True,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


_models: dict = {}
