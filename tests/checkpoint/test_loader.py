"""Loading: values, ranks, reports, memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inkling_rocm.checkpoint import allocate, loader
from inkling_rocm.checkpoint.loader import load_weights
from inkling_rocm.config import parse_config
from tests.checkpoint import oracle, tiny

TEXT_MTP = ("text", "mtp")


def load(folder, config, *, dtype=torch.bfloat16, parts=TEXT_MTP, rank=0, size=1):
    weights = allocate(config, dtype=dtype, device="cpu", tp_rank=rank, tp_size=size, parts=parts)
    for weight in weights.values():
        weight.fill_(float("nan"))
    report = load_weights(folder, config, weights, tp_rank=rank, tp_size=size, progress=False)
    return weights, report


def assert_same(got: dict, wanted: dict):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.to(got[name].dtype)), name


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_values(tmp_path, config, tensors, num_shards, dtype):
    tiny.write_checkpoint(tmp_path, tensors, num_shards=num_shards)
    weights, _ = load(tmp_path, config, dtype=dtype)
    assert_same(weights, oracle.parameters(tensors))


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16])
def test_other_float_files(tmp_path, config, file_dtype):
    tensors = tiny.released_tensors(dtype=file_dtype)
    for name in tensors:
        if name.endswith("global_scale"):
            tensors[name] = tensors[name].float()
    tiny.write_checkpoint(tmp_path, tensors)
    weights, _ = load(tmp_path, config)
    assert_same(weights, oracle.parameters(tensors))


def test_the_gates_fp32_tensors_may_be_bf16(tmp_path, config, tensors):
    resaved = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    tiny.write_checkpoint(tmp_path, resaved)
    weights, _ = load(tmp_path, config)
    assert weights["layers.1.moe.gate_bias"].dtype == torch.float32
    assert_same(weights, oracle.parameters(resaved))


def test_the_value_oracle_can_fail(checkpoint, config, tensors):
    """Gate and up rows swapped, two kv rows swapped, taps reversed: each must be noticed."""
    weights, _ = load(checkpoint, config)
    wanted = oracle.parameters(tensors)
    for name, change in {
        "layers.0.mlp.gate_up": lambda w: w.roll(len(w) // 2, 0),
        "layers.1.moe.w13": lambda w: w.flip(0),
        "layers.0.attn.qkvr": lambda w: w.roll(1, 0),
        "layers.0.attn.k_conv": lambda w: w.flip(0),
    }.items():
        with pytest.raises(AssertionError, match=name):
            assert_same(weights | {name: change(weights[name])}, wanted)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_shards_rebuild_the_whole(checkpoint, config, tensors, size):
    ranks = [load(checkpoint, config, rank=rank, size=size)[0] for rank in range(size)]
    for name, whole in oracle.parameters(tensors).items():
        rebuilt = oracle.reassemble(name, [weights[name] for weights in ranks])
        assert torch.equal(rebuilt, whole), name


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (3, "embed: 128 vocabulary rows are not divisible by tensor parallel size 3"),
        (32, "attn.qkvr: 16 query heads are not divisible by tensor parallel size 32"),
    ],
)
def test_a_size_that_does_not_divide_is_refused(config, size, reason):
    with pytest.raises(ValueError, match=reason):
        allocate(config, dtype=torch.float32, device="cpu", tp_size=size)


def test_kv_heads_that_neither_divide_nor_multiply_are_refused():
    config_json = tiny.config_json()
    config_json["text_config"] |= {
        "vocab_size": 144, "num_attention_heads": 24, "num_key_value_heads": 3,
        "swa_num_attention_heads": 24, "swa_num_key_value_heads": 3,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"3 kv heads are not divisible by .* size 2 nor is 2 a"):
        allocate(parse_config(config_json), dtype=torch.float32, device="cpu", tp_size=2)


def test_a_rank_reads_only_its_part(checkpoint, config, monkeypatch):
    read = []
    copy = loader.copy_from_file
    monkeypatch.setattr(
        loader,
        "copy_from_file",
        lambda target, source, layout: (read.append(source.numel()), copy(target, source, layout)),
    )
    weights, report = load(checkpoint, config, rank=1, size=4)
    assert sum(read) == sum(weight.numel() for weight in weights.values())
    _, whole = load(checkpoint, config)
    assert report.bytes_read < 0.35 * whole.bytes_read


def test_report(checkpoint, config, tensors):
    _, report = load(checkpoint, config, parts=("text",))
    text = {n: t for n, t in tensors.items() if n.startswith("model.llm.")}
    assert report.num_tensors == len(text)
    assert report.bytes_read == sum(t.nbytes for t in text.values())
    assert report.seconds > 0
    assert report.bytes_per_second > 0
    assert {reason: len(names) for reason, names in report.unused.items()} == {
        "mtp: not asked for": sum(n.startswith("model.mtp.") for n in tensors),
        "audio: not asked for": 2,
        "vision: not asked for": 8,
    }


def test_report_is_logged(checkpoint, config, caplog):
    with caplog.at_level("INFO", logger="inkling_rocm"):
        _, report = load(checkpoint, config, parts=("text",))
    assert str(report) in caplog.text
    assert "GB/s); not used: 2 of audio: not asked for" in caplog.text


def test_parts_that_the_config_lacks_are_reported(checkpoint, tensors):
    config_json = tiny.config_json()
    for key in ("mtp_config", "audio_config", "vision_config"):
        del config_json[key]
    _, report = load(checkpoint, parse_config(config_json), parts=("text",))
    assert {reason: len(names) for reason, names in report.unused.items()} == {
        "mtp: not in config.json": sum(n.startswith("model.mtp.") for n in tensors),
        "audio: not in config.json": 2,
        "vision: not in config.json": 8,
    }


def test_towers_load(checkpoint, config, tensors):
    weights, report = load(checkpoint, config, parts=("text", "mtp", "audio", "vision"))
    assert not report.unused
    assert torch.equal(weights["audio.encoder"], tensors["model.audio.encoder.weight"])
    assert torch.equal(weights["visual.linear_2"], tensors["model.visual.layers.linear_2.weight"])


def test_chain_norm(tmp_path, config, tensors):
    chain_norm = torch.randn(tiny.H).bfloat16()
    tiny.write_checkpoint(tmp_path, tensors | {"model.mtp.chain_norm.weight": chain_norm})
    _, report = load(tmp_path, config)
    assert report.unused["mtp: chain_hidden_post_norm is false"] == ("model.mtp.chain_norm.weight",)
    config_json = tiny.config_json()
    config_json["mtp_config"]["chain_hidden_post_norm"] = True
    weights, _ = load(tmp_path, parse_config(config_json))
    assert torch.equal(weights["mtp.chain_norm"], chain_norm)


def test_progress_bar_shows_bytes(checkpoint, config, capsys):
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    load_weights(checkpoint, config, weights, progress=True)
    assert "B/s" in capsys.readouterr().err
    load_weights(checkpoint, config, weights, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_the_model_and_one_tensor():
    """A fresh process, so that nothing else moves its resident set; it also measures a loader that
    keeps the file mapped, which the bound must catch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.measure_memory"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    bound = facts["largest_tensor_bytes"] + 4_000_000  # allocator and Python noise
    assert facts["model_bytes"] > 5 * bound
    assert facts["peak_growth_bytes"] <= bound
    assert facts["naive_growth_bytes"] > bound


@pytest.mark.gpu
def test_values_on_a_gpu(checkpoint, config, tensors):
    weights = allocate(config, dtype=torch.bfloat16, device="cuda", parts=TEXT_MTP)
    load_weights(checkpoint, config, weights, progress=False)
    assert_same({n: w.cpu() for n, w in weights.items()}, oracle.parameters(tensors))
