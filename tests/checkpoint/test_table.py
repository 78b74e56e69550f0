"""The weight table against what is published: names, shapes, bytes."""

import json
import math
import struct
from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.table import allocate, released_names, weight_entries
from inkling_rocm.checkpoint.vision_plan import hmlp_dims
from inkling_rocm.config import VisionConfig, load_config
from tests.checkpoint import tiny


def _published_bytes(config):
    """bf16, but fp32 for what the gate reads besides its matrix."""
    return sum(
        (4 if entry.kind in ("gate_bias", "gate_scale") else 2) * math.prod(piece.shape)
        for entry in weight_entries(config)
        for piece in entry.pieces
    )


def test_small_has_exactly_the_published_names_and_bytes(small_config_path):
    config = load_config(small_config_path)
    index = json.loads(
        small_config_path.with_name("inkling_small.safetensors.index.json").read_text()
    )
    assert set(released_names(config)) == set(index["weight_map"])
    assert len(released_names(config)) == 1048
    assert _published_bytes(config) == index["metadata"]["total_size"]


def test_small_has_the_shapes_of_a_published_header(small_config_path):
    names = released_names(load_config(small_config_path))
    data = small_config_path.with_name("inkling_small.shard09.header.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    for name, fields in header.items():
        entry, index = names[name]
        assert list(entry.pieces[index].shape) == fields["shape"], name
        assert (fields["dtype"] == "F32") == (entry.kind in ("gate_bias", "gate_scale")), name


def test_inkling_sums_to_its_published_size(small_config_path):
    config = load_config(small_config_path.with_name("inkling.json"))
    assert _published_bytes(config) == pytest.approx(1905e9, rel=1e-3)


def test_tiny_names_and_shapes(config, tensors):
    found = {name: entry.pieces[i].shape for name, (entry, i) in released_names(config).items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_parameter_shapes_and_dtypes(config):
    weights = allocate(config, dtype=torch.bfloat16, device="cpu", parts=("text", "mtp"))
    expected = {
        "embed": (tiny.V, tiny.H),
        "lm_head": (tiny.V, tiny.H),
        "layers.0.attn.qkvr": (16 * 8 + 2 * 4 * 8 + 16 * 4, tiny.H),
        "layers.2.attn.qkvr": (16 * 8 + 2 * 2 * 8 + 16 * 4, tiny.H),
        "layers.0.attn.k_conv": (4, 4 * 8),
        "layers.0.attn_conv": (4, tiny.H),
        "layers.0.attn.rel_proj": (4, 16),
        "layers.2.attn.rel_proj": (4, 24),
        "layers.0.attn.o_proj": (tiny.H, 16 * 8),
        "layers.0.mlp.gate_up": (64, tiny.H),
        "layers.0.mlp.global_scale": (1,),
        "layers.1.moe.gate_weight": (6, tiny.H),
        "layers.1.moe.w13": (4, 32, tiny.H),
        "layers.1.moe.shared_w2": (2, tiny.H, 16),
        "mtp.0.input_proj": (tiny.H, 2 * tiny.H),
        "mtp.0.block.attn.rel_proj": (4, 16),
        "mtp.1.block.attn.rel_proj": (4, 24),
        "mtp.1.block.mlp.gate_up": (64, tiny.H),
    }
    assert {name: tuple(weights[name].shape) for name in expected} == expected
    fp32 = {name for name, w in weights.items() if w.dtype == torch.float32}
    assert fp32 == {
        n for n in weights if n.endswith(("_conv", "gate_bias", "global_scale"))
    }  # fmt: skip
    assert not any(n.startswith(("audio", "visual")) for n in weights)


def test_chain_norm_is_there_when_the_config_says_so(config):
    assert "model.mtp.chain_norm.weight" not in released_names(config)
    chained = replace(config, mtp=replace(config.mtp, chain_hidden_post_norm=True))
    entry, _ = released_names(chained)["model.mtp.chain_norm.weight"]
    assert (entry.name, entry.part) == ("mtp.chain_norm", "mtp")


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (2, 2)])
def test_a_rank_outside_its_group_is_refused(config, rank, size):
    with pytest.raises(ValueError, match=f"tp_rank is {rank}"):
        allocate(config, dtype=torch.float32, device="cpu", tp_rank=rank, tp_size=size)


def test_a_part_the_checkpoint_lacks_is_refused(config):
    with pytest.raises(ValueError, match="mtp"):
        allocate(
            replace(config, mtp=None), dtype=torch.float32, device="cpu", parts=("text", "mtp")
        )


@pytest.mark.parametrize(
    ("patch", "frames", "channels", "layers"),
    [(4, 2, 3, 4), (4, 2, 3, 7), (6, 2, 3, 5), (9, 3, 1, 5), (14, 2, 3, 6), (40, 2, 3, 6)],
)
def test_vision_widths_match_transformers(patch, frames, channels, layers):
    """Towers with at least as many layers as candidate grids (transformers needs scipy else)."""
    from transformers.models.inkling import modeling_inkling
    from transformers.models.inkling.configuration_inkling import InklingVisionConfig

    with torch.device("meta"):
        tower = modeling_inkling.InklingVisionModel(
            InklingVisionConfig(
                patch_size=patch,
                temporal_patch_size=frames,
                num_channels=channels,
                num_hidden_layers=layers,
                text_hidden_size=96,
            )
        )
    wanted = [
        (layer.projection.in_features, layer.projection.out_features)
        for layer in tower.encoder_layers
    ]
    vision = VisionConfig(
        patch_size=patch, temporal_patch_size=frames, num_channels=channels, num_layers=layers
    )
    assert hmlp_dims(vision, 96) == wanted


def test_vision_widths_of_the_released_tower():
    vision = VisionConfig(patch_size=40, temporal_patch_size=2, num_channels=3, num_layers=4)
    assert hmlp_dims(vision, 4096) == [(75, 128), (512, 320), (5120, 4800), (9600, 4096)]
