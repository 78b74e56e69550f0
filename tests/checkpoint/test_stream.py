"""load_stream fills what load_weights fills, from tensors a host hands over."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from inkling_rocm.checkpoint import CheckpointError, load_weights
from inkling_rocm.checkpoint.stream import load_stream
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import load_config
from tests.sglang_plugin.checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("stream") / "tiny")
    tensors = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    return folder, load_config(folder), tensors


def empty(config, rank=0, size=1):
    weights = allocate(config, dtype=torch.float32, device="cpu", tp_rank=rank, tp_size=size)
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    return weights


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_every_rank_gets_what_the_files_loader_gives(checkpoint, rank, size):
    folder, config, tensors = checkpoint
    found, wanted = empty(config, rank, size), empty(config, rank, size)
    used = load_stream(tensors.items(), config, found, tp_rank=rank, tp_size=size)
    load_weights(folder, config, wanted, tp_rank=rank, tp_size=size, progress=False)
    assert used == len(tensors)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_an_update_touches_what_it_names(checkpoint):
    _, config, tensors = checkpoint
    weights = empty(config)
    load_stream(tensors.items(), config, weights)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    load_stream([("model.llm.norm.weight", tensors["model.llm.norm.weight"] + 1)], config, weights,
                complete=False)  # fmt: skip
    changed = {name for name in weights if not torch.equal(weights[name], before[name])}
    assert changed == {"final_norm"}


def test_what_is_wrong_is_named(checkpoint):
    _, config, tensors = checkpoint
    name = "model.llm.norm.weight"
    without = {k: t for k, t in tensors.items() if k != name}
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, among them {name}"):
        load_stream(without.items(), config, empty(config))
    with pytest.raises(CheckpointError, match=r"tensor model\.llm\.other is not one"):
        load_stream([("model.llm.other", tensors[name])], config, empty(config))
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
        load_stream([(name, tensors[name][1:])], config, empty(config))
    kept = empty(config)
    del kept["layers.1.moe.w13"]
    with pytest.raises(CheckpointError, match="w13 in another layout only"):
        load_stream(tensors.items(), config, kept, complete=False)


def test_other_parts_are_skipped(checkpoint):
    _, config, tensors = checkpoint
    stream = [*tensors.items(), ("model.visual.final_norm.weight", torch.ones(1))]
    assert load_stream(stream, config, empty(config)) == len(tensors)
