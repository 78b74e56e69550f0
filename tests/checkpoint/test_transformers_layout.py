"""What transformers saves loads unchanged, and what we export loads in transformers."""

import json

import pytest
import torch
from transformers import InklingConfig as TransformersConfig
from transformers import InklingForConditionalGeneration

from inkling_rocm.checkpoint import allocate, export_checkpoint, fill_dummy, load_weights
from inkling_rocm.config import load_config
from tests.checkpoint import tiny

PARTS = ("text", "audio", "vision")


@pytest.fixture(scope="module")
def model():
    config_json = tiny.config_json()
    config_json["vision_config"]["num_channels"] = config_json["vision_config"].pop("n_channels")
    torch.manual_seed(0)
    config = TransformersConfig(
        **{k: v for k, v in config_json.items() if k not in ("architectures", "model_type")}
    )
    model = InklingForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():  # its initialisation leaves many at 0 or 1
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_()
    return model


def from_state_dict(state):
    """Our parameters from transformers' own names and layouts."""
    lm = "model.language_model."
    out = {
        "embed": state[lm + "embed_tokens.weight"],
        "embed_norm": state[lm + "embed_tokens.embed_norm.weight"],
        "final_norm": state[lm + "norm.weight"],
        "lm_head": state["lm_head.weight"],
        "audio.encoder": state["model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight"],
        "audio.final_norm": state["model.audio_tower.norm.weight"],
        "visual.final_norm": state["model.vision_tower.final_norm.weight"],
    }
    for i in range(4):
        tower = f"model.vision_tower.encoder_layers.{i}."
        out[f"visual.linear_{i}"] = state[tower + "projection.weight"]
        if i < 3:
            out[f"visual.norm_{i}"] = state[tower + "layer_norm.weight"]
    for i in range(tiny.L):
        s, p = f"{lm}layers.{i}.", f"layers.{i}."
        a = s + "self_attn."
        out |= {
            p + "attn_norm": state[s + "input_layernorm.weight"],
            p + "mlp_norm": state[s + "post_attention_layernorm.weight"],
            p + "attn_conv": state[s + "attn_sconv.conv1d.weight"].squeeze(1).t(),
            p + "mlp_conv": state[s + "mlp_sconv.conv1d.weight"].squeeze(1).t(),
            p + "attn.qkvr": torch.cat([state[f"{a}{x}_proj.weight"] for x in "qkvr"]),
            p + "attn.k_conv": state[a + "k_sconv.conv1d.weight"].squeeze(1).t(),
            p + "attn.v_conv": state[a + "v_sconv.conv1d.weight"].squeeze(1).t(),
            p + "attn.q_norm": state[a + "q_norm.weight"],
            p + "attn.k_norm": state[a + "k_norm.weight"],
            p + "attn.rel_proj": state[a + "rel_logits_proj.proj"],
            p + "attn.o_proj": state[a + "o_proj.weight"],
        }
        m = s + "mlp."
        if i < tiny.NUM_DENSE:
            out |= {
                p + "mlp.gate_up": torch.cat(
                    [state[m + "gate_proj.weight"], state[m + "up_proj.weight"]]
                ),
                p + "mlp.down": state[m + "down_proj.weight"],
                p + "mlp.global_scale": state[m + "global_scale"],
            }
        else:
            shared = m + "shared_experts."
            out |= {
                p + "moe.gate_weight": state[m + "gate.weight"],
                p + "moe.gate_bias": state[m + "gate.e_score_correction_bias"],
                p + "moe.global_scale": state[m + "gate.global_scale"],
                p + "moe.w13": state[m + "experts.gate_up_proj"],
                p + "moe.w2": state[m + "experts.down_proj"],
                p + "moe.shared_w13": torch.cat(
                    [state[shared + "gate_proj"], state[shared + "up_proj"]], dim=1
                ),
                p + "moe.shared_w2": state[shared + "down_proj"],
            }
    return out


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "300KB"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_pretrained_loads(model, tmp_path, save, dtype):
    model.to(dtype).save_pretrained(tmp_path, **save)
    wanted = from_state_dict(model.state_dict())
    model.to(torch.float32)
    assert (tmp_path / "model.safetensors.index.json").exists() == bool(save)
    config = load_config(tmp_path)
    assert config.dtype == str(dtype).removeprefix("torch.")
    weights = allocate(config, dtype=dtype, device="cpu", parts=PARTS)
    report = load_weights(tmp_path, config, weights, progress=False)
    assert not report.unused  # its saves hold no MTP block
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor.to(weights[name].dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_an_export(config, tmp_path, dtype):
    weights = allocate(config, dtype=dtype, device="cpu", parts=(*PARTS, "mtp"))
    fill_dummy(config, weights)
    export_checkpoint(config, weights, tmp_path)
    loaded, info = InklingForConditionalGeneration.from_pretrained(
        tmp_path, dtype=dtype, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "mismatched_keys", "error_msgs"))
    wanted = from_state_dict(loaded.state_dict())
    for name, tensor in wanted.items():
        assert torch.equal(weights[name].to(tensor.dtype), tensor), name
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "inkling_mm_model"
