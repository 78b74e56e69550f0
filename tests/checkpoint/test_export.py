"""Export is the loader reversed, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from inkling_rocm.checkpoint import allocate, export_checkpoint, fill_dummy, load_weights
from inkling_rocm.config import load_config, parse_config
from tests.checkpoint import tiny

ALL_PARTS = ("text", "mtp", "audio", "vision")


def load(folder, config, dtype=torch.bfloat16, parts=ALL_PARTS):
    weights = allocate(config, dtype=dtype, device="cpu", parts=parts)
    load_weights(folder, config, weights, progress=False)
    return weights


def read_files(folder):
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def assert_same_tensors(got, wanted):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_released_file_comes_back_bit_for_bit(checkpoint, config, tensors, tmp_path):
    export_checkpoint(config, load(checkpoint, config), tmp_path)
    assert_same_tensors(read_files(tmp_path), tensors)
    assert load_config(tmp_path) == config


def test_one_wrong_bit_is_noticed(checkpoint, config, tensors, tmp_path):
    weights = load(checkpoint, config)
    weights["layers.1.moe.w13"][0, 0, 0] += 1
    export_checkpoint(config, weights, tmp_path)
    with pytest.raises(AssertionError, match="w13_weight"):
        assert_same_tensors(read_files(tmp_path), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_load_export_load(config, tmp_path, dtype):
    """Also for values that the model's dtype cannot hold, in what is kept in fp32."""
    weights = allocate(config, dtype=dtype, device="cpu", parts=ALL_PARTS)
    fill_dummy(config, weights)
    export_checkpoint(config, weights, tmp_path / "first")
    again = load(tmp_path / "first", config, dtype)
    assert_same_tensors(again, weights)
    assert load_config(tmp_path / "first").dtype == str(dtype).removeprefix("torch.")


def test_text_alone(checkpoint, config, tensors, tmp_path):
    export_checkpoint(config, load(checkpoint, config, parts=("text",)), tmp_path)
    text = {name: t for name, t in tensors.items() if name.startswith("model.llm.")}
    assert_same_tensors(read_files(tmp_path), text)


def test_shards(checkpoint, config, tensors, tmp_path):
    export_checkpoint(config, load(checkpoint, config), tmp_path, max_shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for file in files:
        held = load_file(file)
        assert sum(t.nbytes for t in held.values()) <= 100_000 or len(held) <= 4
    assert_same_tensors(read_files(tmp_path), tensors)


def test_refusals(checkpoint, config, tmp_path):
    weights = load(checkpoint, config)
    with pytest.raises(FileExistsError, match="choose an empty folder"):
        export_checkpoint(config, weights, checkpoint)
    with pytest.raises(ValueError, match=r"mtp\.0\.embed_norm is missing"):
        export_checkpoint(
            config, {n: w for n, w in weights.items() if n != "mtp.0.embed_norm"}, tmp_path
        )
    with pytest.raises(ValueError, match=r"\['extra'\] are not in"):
        export_checkpoint(config, weights | {"extra": torch.ones(1)}, tmp_path)
    shard = allocate(config, dtype=torch.bfloat16, device="cpu", tp_size=2, parts=ALL_PARTS)
    with pytest.raises(ValueError, match=r"embed is \(64, 64\), wanted \(128, 64\); gather"):
        export_checkpoint(config, shard, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_config_that_the_file_cannot_say_is_refused(config, tmp_path):
    local = replace(config.text.local_attention, d_rel=8)
    odd = replace(config, text=replace(config.text, local_attention=local))
    weights = allocate(odd, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(ValueError, match="cannot be written"):
        export_checkpoint(odd, weights, tmp_path)
    assert not list(tmp_path.iterdir())


def test_exported_config_of_another_mixture(tmp_path):
    """Dense and MoE layers in any order: only transformers' key can say it."""
    config_json = tiny.config_json()
    del config_json["text_config"]["dense_mlp_idx"]
    config_json["text_config"]["mlp_layer_types"] = ["sparse", "dense", "sparse"]
    config = parse_config(config_json)
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    fill_dummy(config, weights)
    export_checkpoint(config, weights, tmp_path)
    assert load_config(tmp_path) == config
