"""A draft's weights come from its files whole and in the right places, or not at all."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rocm.checkpoint.dflash import (
    allocate_dflash,
    dflash_entries,
    fill_dflash_dummy,
    load_dflash_weights,
    random_dflash,
    write_random_dflash,
)
from inkling_rocm.checkpoint.files import CheckpointError
from tests.engine.tiny import tiny_config

CONFIG = random_dflash(tiny_config().text)
FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_random_dflash(tmp_path / "draft", CONFIG, seed=4)


def load(folder):
    weights = allocate_dflash(CONFIG, dtype=torch.float32, device="cpu")
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    report = load_dflash_weights(folder, CONFIG, weights, progress=False)
    return weights, report


def change(folder, edit):
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file({name: x.clone() for name, x in tensors.items()}, folder / FILE)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_every_tensor_has_its_place(folder, prefix):
    tensors = load_file(folder / FILE)
    save_file({prefix + name: x for name, x in tensors.items()}, folder / FILE)
    weights, report = load(folder)
    assert report.num_tensors == len(tensors)
    assert not any(x.isnan().any() for x in weights.values())
    attn = "layers.1.self_attn."
    qkv = torch.cat([tensors[f"{attn}{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(weights["layers.1.qkv"], qkv.float())
    mlp = torch.cat([tensors[f"layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    assert torch.equal(weights["layers.0.gate_up"], mlp.float())
    assert torch.equal(weights["final_norm"], tensors["norm.weight"].float())
    assert torch.equal(
        weights["layers.0.mlp_norm"], tensors["layers.0.post_attention_layernorm.weight"].float()
    )


def test_written_weights_are_the_dummy_ones(folder):
    weights, _ = load(folder)
    dummy = allocate_dflash(CONFIG, dtype=torch.bfloat16, device="cpu")
    fill_dflash_dummy(CONFIG, dummy, 4)
    assert all(torch.equal(weights[name], x.float()) for name, x in dummy.items())
    assert {e.name for e in dflash_entries(CONFIG)} == weights.keys()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing tensor fc.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(3, 2)}), "unknown tensor embed_tok"),
        (lambda t: t.update({"layers.0.attention_conv.base": torch.ones(2)}), "attention_conv"),
        (lambda t: t.update({"prefix_gru.weight_hh_l0": torch.ones(2)}), "prefix_gru"),
        (lambda t: t.update({"fc.weight": torch.ones(3, 2)}), r"fc.weight has shape \[3, 2\]"),
        (lambda t: t.update({"norm.weight": torch.ones(32).double()}), "norm.weight is F64"),
        (lambda t: t.update({"fc.weight_scale": torch.ones(1)}), "quantised checkpoint"),
        (lambda t: t.update({"model.fc.weight": torch.ones(1)}), "with and without 'model.'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(folder, edit, message):
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_folder_that_has_files_is_left_alone(folder):
    with pytest.raises(FileExistsError, match="choose an empty folder"):
        write_random_dflash(folder, CONFIG)
