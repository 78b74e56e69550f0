"""Every way a checkpoint can be wrong ends in an error that says where, what, and what to do."""

import json
import re

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from inkling_rocm.checkpoint import CheckpointError, allocate, load_weights, loader
from tests.checkpoint import tiny

WQ = "model.llm.layers.1.attn.wq_du.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path, tensors):
    return tiny.write_checkpoint(tmp_path, tensors)


def refusal(folder, config, *patterns, parts=("text",)):
    """Loading is refused with all patterns in the message, before anything is written."""
    weights = allocate(config, dtype=torch.bfloat16, device="cpu", parts=parts)
    for weight in weights.values():
        weight.fill_(float("nan"))
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, config, weights, progress=False)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), (pattern, str(caught.value))
    assert all(weight.isnan().all() for weight in weights.values())


def rewrite(folder, tensors, changes):
    """Single-file checkpoint with some tensors replaced (None removes one)."""
    for file in folder.glob("model*"):
        file.unlink()
    merged = {n: t for n, t in (tensors | changes).items() if t is not None}
    tiny.write_checkpoint(folder, merged, num_shards=1)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shard_of(folder, name):
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def test_a_good_one_loads(folder, config):
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    load_weights(folder, config, weights, progress=False)
    assert not any(weight.isnan().any() for weight in weights.values())


def test_missing(folder, config, tensors):
    rewrite(folder, tensors, {WQ: None, "model.llm.norm.weight": None})
    refusal(folder, config, "missing tensor", WQ, "model.llm.norm.weight", r"config\.json")


def test_many_missing_are_counted(folder, config, tensors):
    rewrite(folder, tensors, {n: None for n in tensors if ".layers.1." in n})
    refusal(folder, config, r"missing tensor .* and \d+ more")


def test_missing_mtp_says_that_transformers_drops_it(folder, config, tensors):
    rewrite(folder, tensors, {n: None for n in tensors if n.startswith("model.mtp.")})
    refusal(folder, config, "missing tensor", "transformers", parts=("text", "mtp"))


@pytest.mark.parametrize("name", [WQ, "model.llm.layers.0.attn_sconv.weight"])
def test_shape(folder, config, tensors, name):
    rewrite(folder, tensors, {name: tensors[name][1:].clone()})
    got, wanted = list(tensors[name][1:].shape), list(tensors[name].shape)
    refusal(
        folder,
        config,
        r"model\.safetensors",
        name,
        re.escape(f"shape {got}, wanted {wanted}"),
        r"config\.json",
    )


def test_transposed_square_is_not_the_business_of_shapes_but_conv_rank_is(folder, config, tensors):
    name = "model.llm.layers.0.attn.k_sconv.weight"
    rewrite(folder, tensors, {name: tensors[name].squeeze(1).contiguous()})
    refusal(folder, config, name, r"shape \[32, 4\], wanted \[32, 1, 4\]")


@pytest.mark.parametrize(
    ("name", "dtype", "wanted"),
    [
        (WQ, torch.float64, "F64, wanted one of BF16, F16, F32"),
        (WQ, torch.int64, "I64, wanted one of BF16, F16, F32"),
        ("model.llm.layers.1.mlp.gate.bias", torch.float16, "F16, wanted one of F32, BF16"),
        ("model.llm.layers.1.mlp.gate.global_scale", torch.float16, "F16, wanted one of F32, BF16"),
        ("model.llm.layers.0.mlp.global_scale", torch.float64, "F64, wanted one of F32, BF16"),
    ],
)
def test_dtype(folder, config, tensors, name, dtype, wanted):
    rewrite(folder, tensors, {name: tensors[name].to(dtype)})
    refusal(folder, config, r"model\.safetensors", name, wanted, "convert")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantised_dtype(folder, config, tensors, dtype):
    rewrite(folder, tensors, {WQ: tensors[WQ].to(dtype)})
    refusal(folder, config, WQ, "quantised")


@pytest.mark.parametrize(
    "suffix",
    ["weight.scale", "weight.scale2", "weight.input_amax", "weight.original_shape",
     "weight_scale", "weight_scale_inv", "weight_blocks", "weight_scales", "weight_packed"],
)  # fmt: skip
def test_quantised_names(folder, config, tensors, suffix):
    name = f"model.llm.layers.1.mlp.experts.w13_{suffix}"
    rewrite(folder, tensors, {name: torch.ones(2)})
    refusal(folder, config, name, "quantised")


@pytest.mark.parametrize(
    "name",
    [
        "model.llm.layers.3.attn_norm.weight",  # a layer more than config.json says
        "model.llm.layers.0.attn.wq_du.bias",
        "model.language_model.norm.weight",
        "lm_head.weight",
    ],
)
def test_unknown(folder, config, tensors, name):
    rewrite(folder, tensors, {name: torch.ones(2)})
    refusal(folder, config, r"model\.safetensors", "unknown tensor", name, r"config\.json")


def test_unknown_mtp_tensor_when_mtp_is_loaded(folder, config, tensors):
    name = "model.mtp.layers.0.extra.weight"
    rewrite(folder, tensors, {name: torch.ones(2)})
    refusal(folder, config, "unknown tensor", name, parts=("text", "mtp"))
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    report = load_weights(folder, config, weights, progress=False)
    assert report.unused["mtp: not in config.json"] == (name,)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(folder, config, keep):
    file = folder / shard_of(folder, WQ)
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    refusal(folder, config, re.escape(file.name), "cut short", r"\d+ bytes", "download it again")


def test_trailing_bytes(folder, config):
    file = folder / shard_of(folder, WQ)
    file.write_bytes(file.read_bytes() + b"\0")
    refusal(folder, config, re.escape(file.name), "too long")


def test_damaged_header(folder, config):
    file = folder / shard_of(folder, WQ)
    data = bytearray(file.read_bytes())
    data[8] = 0
    file.write_bytes(data)
    refusal(folder, config, re.escape(file.name), "header is damaged")


def test_header_whose_sizes_contradict(folder, config):
    file = folder / shard_of(folder, WQ)
    data = file.read_bytes()
    changed = data.replace(b'"shape":[128,64]', b'"shape":[128,65]', 1)
    assert changed != data
    file.write_bytes(changed)
    refusal(folder, config, re.escape(file.name), "bytes for BF16", "wanted")


def test_name_twice_in_one_header(folder, config):
    file = folder / shard_of(folder, WQ)
    data = file.read_bytes()
    other = WQ.replace("wq_du", "wX_du")
    assert len(other) == len(WQ)
    names = [n for n in load_file(file) if len(n) == len(WQ) and n != WQ]
    file.write_bytes(data.replace(names[0].encode(), WQ.encode(), 1))
    refusal(folder, config, re.escape(file.name), WQ, "twice")


def test_missing_shard(folder, config):
    file = folder / shard_of(folder, WQ)
    file.unlink()
    refusal(folder, config, re.escape(INDEX), re.escape(file.name), "does not exist", "download")


def test_index_names_a_tensor_its_shard_lacks(folder, config):
    edit_index(folder, lambda weight_map: weight_map.update({"model.x": weight_map[WQ]}))
    refusal(folder, config, re.escape(INDEX), r"model\.x", "header does not have it")


def test_index_names_the_wrong_shard(folder, config):
    right = shard_of(folder, WQ)
    edit_index(
        folder,
        lambda weight_map: weight_map.update(
            {WQ: next(s for s in weight_map.values() if s != right)}
        ),
    )
    refusal(folder, config, re.escape(INDEX), WQ, re.escape(right))


def test_index_lacks_a_tensor(folder, config):
    file = shard_of(folder, WQ)
    edit_index(folder, lambda weight_map: weight_map.pop(WQ))
    refusal(folder, config, re.escape(file), WQ, re.escape(f"not in {INDEX}"))


def test_tensor_in_two_shards(folder, config, tensors):
    mine = shard_of(folder, WQ)
    other = next(f for f in sorted(folder.glob("*.safetensors")) if f.name != mine)
    save_file(load_file(other) | {WQ: tensors[WQ]}, other)
    refusal(folder, config, WQ, "two files", re.escape(mine), re.escape(other.name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "download it again"),
        ("[]", "weight_map is None"),
        ('{"weight_map": {}}', "weight_map is {}"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "same folder"),
        ('{"weight_map": {"a": ".."}}', "same folder"),
        ('{"weight_map": {"a": ""}}', "same folder"),
        ('{"weight_map": {"a": 3}}', "same folder"),
        ('{"weight_map": ' + "[" * 50_000, "download it again"),
        ('{"weight_map": {"a": "x", "a": "x"}}', "a is there twice"),
    ],
)
def test_bad_index(folder, config, text, message):
    (folder / INDEX).write_text(text)
    refusal(folder, config, re.escape(INDEX), message)


def test_a_folder_in_a_shards_place(folder, config):
    file = folder / shard_of(folder, WQ)
    file.unlink()
    file.mkdir()
    refusal(folder, config, re.escape(file.name), "does not exist as a file")


def test_a_file_that_cannot_be_opened(folder, config, monkeypatch):
    opened = type(folder).open

    def refuse(file, *args, **kwargs):
        if file.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(type(folder), "open", refuse)
    refusal(folder, config, r"\.safetensors", "cannot be read: Permission denied")


def test_a_header_nested_without_end(folder, config):
    file = folder / shard_of(folder, WQ)
    text = b"[" * 50_000
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    refusal(folder, config, re.escape(file.name), "header is damaged")


def test_left_over_single_file(folder, config, tensors):
    save_file({WQ: tensors[WQ]}, folder / "model.safetensors")
    refusal(folder, config, r"model\.safetensors is there but", "remove")


def test_no_files(tmp_path, config):
    refusal(tmp_path, config, "neither")
    refusal(tmp_path / "nowhere", config, "no such folder")


def test_git_lfs_pointer(folder, config):
    file = folder / shard_of(folder, WQ)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refusal(folder, config, re.escape(file.name), "git lfs pull")


def test_file_that_fails_while_reading(folder, config, monkeypatch):
    def fail(*args, **kwargs):
        raise SafetensorError("I/O error")

    monkeypatch.setattr(loader, "safe_open", fail)
    refusal(folder, config, r"\.safetensors", "cannot read tensor", "I/O error", "download")


def test_weights_of_another_rank(folder, config):
    weights = allocate(config, dtype=torch.bfloat16, device="cpu", tp_size=2)
    with pytest.raises(CheckpointError, match=r"embed is allocated as \(64, 64\), wanted \(128, 6"):
        load_weights(folder, config, weights, progress=False)


def test_parameter_the_table_does_not_have(folder, config):
    weights = {"layers.9.attn_norm": torch.empty(tiny.H)}
    with pytest.raises(CheckpointError, match=r"layers\.9\.attn_norm"):
        load_weights(folder, config, weights, progress=False)
