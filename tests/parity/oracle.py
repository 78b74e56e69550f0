"""transformers as the oracle: generated configurations, checkpoints of its save_pretrained."""

from __future__ import annotations

import random

import torch

VOCAB = 160


def generated_config(seed: int | str) -> dict:
    """Keyword arguments of transformers' InklingTextConfig: what changes the mathematics, drawn.

    Seed "faults" has every feature in play at once, for the tests that plant a fault.
    """
    if seed == "faults":
        return {
            **generated_config(0),
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window_size": 7,
            "rel_extent": 16,
            "d_rel": 4,
            "log_scaling_n_floor": 5,
            "conv_kernel_size": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
        }
    rng = random.Random(seed)
    head_dim = rng.choice((8, 16, 24))
    swa_head_dim = rng.choice((8, 16))
    kv_heads, swa_kv_heads = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    layers = rng.choice((2, 3, 4))
    window = rng.choice((1, 2, 3, 7, 16, 40))
    experts = rng.choice((1, 3, 4, 8, 13))
    return {
        "vocab_size": VOCAB,
        "unpadded_vocab_size": rng.choice((VOCAB, VOCAB - 1, VOCAB - 37)),
        "hidden_size": rng.choice((32, 48, 64)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * rng.choice((1, 2, 3, 8)),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "swa_num_attention_heads": swa_kv_heads * rng.choice((1, 2, 5)),
        "swa_num_key_value_heads": swa_kv_heads,
        "swa_head_dim": swa_head_dim,
        "sliding_window_size": window,
        "d_rel": rng.choice((1, 4, 16)),
        "rel_extent": rng.choice((1, 2, 5, window, window + 9, 33, 64)),
        "log_scaling_n_floor": rng.choice((None, 1, 5, 11, 20, 1000)),
        "log_scaling_alpha": rng.choice((0.1, 0.7)),
        "layer_types": [rng.choice(("hybrid_sliding", "hybrid")) for _ in range(layers)],
        "mlp_layer_types": [rng.choice(("dense", "sparse")) for _ in range(layers)],
        "conv_kernel_size": rng.choice((1, 2, 3, 4, 5, 6)),
        "intermediate_size": rng.choice((24, 40)),
        "moe_intermediate_size": rng.choice((8, 24, 32)),
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 6)),
        "n_shared_experts": rng.choice((1, 2, 3)),
        "route_scale": rng.choice((1.0, 2.5, 8.0)),
        "logits_mup_width_multiplier": rng.choice((1.0, 2.0, 24.0)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "max_position_embeddings": 512,
        "pad_token_id": None,
    }


def oracle_model(text_config: dict, seed: int | str = 0, dtype=torch.float32):
    """A transformers model whose random weights make every part of the model matter."""
    from transformers import InklingConfig, InklingForConditionalGeneration

    hidden = text_config["hidden_size"]
    torch.manual_seed(random.Random(seed).getrandbits(32))
    config = InklingConfig(
        text_config={"model_type": "inkling_text", **text_config},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 4, "text_hidden_size": hidden},
        vision_config={
            "text_hidden_size": hidden,
            "patch_size": 4,
            "temporal_patch_size": 2,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    )
    model = InklingForConditionalGeneration._from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "language_model" not in name and "lm_head" not in name:
                continue
            if "norm" in name or "global_scale" in name:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif "sconv" in name:
                tensor.copy_(0.4 * torch.randn_like(tensor))
            elif "correction_bias" in name:
                tensor.copy_(0.1 * torch.randn_like(tensor))
            elif "rel_logits_proj" in name:
                tensor.copy_(torch.randn_like(tensor))
            else:
                tensor.copy_(torch.randn_like(tensor) * tensor.shape[-1] ** -0.5)
    return model.to(dtype)
