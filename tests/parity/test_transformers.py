"""Our model on its reference ops against transformers, on generated configurations."""

from __future__ import annotations

import tempfile

import pytest
import torch

from inkling_rocm.checkpoint.loader import load_weights
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.config import load_config
from tests.parity.conftest import build
from tests.parity.oracle import generated_config, oracle_model
from tests.support.plain_host import PlainHost, Row, run_chunks

SEEDS = range(44)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def host_for(config, dtype=torch.float32) -> PlainHost:
    return PlainHost(config, num_requests=1, max_len=80, dtype=dtype)


@torch.no_grad()
def greedy(model, host, prompt: list[int], steps: int) -> list[int]:
    logits = run_chunks(model, host, prompt, [len(prompt)])
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < steps:
        host.prepare([Row(1, len(prompt) + len(tokens) - 1, 1)], kind="decode")
        hidden = model.forward(torch.tensor(tokens[-1:]), host)
        tokens.append(int(model.logits(hidden, host)[0].argmax()))
    return tokens


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_fp32_logits_and_greedy_tokens(oracle_pair, seed):
    pair = oracle_pair(seed)
    model = build(pair.config, pair.weights)
    split = 1 + seed % 40
    for chunks in ([45], [split, 45 - split], [1] * 45):
        got = run_chunks(model, host_for(pair.config), pair.prompt, chunks)
        assert got.shape == pair.logits.shape
        assert relative_error(got, pair.logits) < 1e-5, chunks
    assert greedy(model, host_for(pair.config), pair.prompt, len(pair.tokens)) == pair.tokens


def test_generated_configurations_cover_what_they_should():
    drawn = [generated_config(seed) for seed in SEEDS]
    assert len({str(config) for config in drawn}) >= 40
    assert any(c["rel_extent"] > 45 for c in drawn)  # larger than the prompt
    assert any(c["rel_extent"] > c["sliding_window_size"] for c in drawn)
    assert any(c["rel_extent"] < c["sliding_window_size"] for c in drawn)
    assert any((c["log_scaling_n_floor"] or 99) < 45 for c in drawn)  # floor below the prompt
    assert {c["n_shared_experts"] for c in drawn} == {1, 2, 3}
    assert any(c["unpadded_vocab_size"] < c["vocab_size"] for c in drawn)
    assert len({c["conv_kernel_size"] for c in drawn}) >= 4
    for kind in ("dense", "sparse"):
        assert any(set(c["mlp_layer_types"]) == {kind} for c in drawn)


@torch.no_grad()
def test_bf16_error_within_twice_the_eager_error():
    """Both against the fp64 model of the same bf16 weights; routing flips hit both alike, so the
    budget is on the sum over configurations."""
    ours_total = theirs_total = 0.0
    for seed in range(16):
        arguments = generated_config(seed)
        theirs_model = oracle_model(arguments, seed, dtype=torch.bfloat16)
        ours, theirs, reference = _bf16_case(arguments, theirs_model)
        ours_total += relative_error(ours, reference) ** 2
        theirs_total += relative_error(theirs, reference) ** 2
    assert ours_total**0.5 <= 2 * theirs_total**0.5
    assert theirs_total > 0


def _bf16_case(arguments, theirs_model):
    prompt = torch.randint(0, arguments["unpadded_vocab_size"], (1, 45))
    with tempfile.TemporaryDirectory() as path:
        theirs_model.save_pretrained(path)
        config = load_config(path)
        weights = allocate(config, dtype=torch.bfloat16, device="cpu")
        load_weights(path, config, weights, progress=False)
    exact = {name: tensor.double() for name, tensor in weights.items()}
    results = []
    for tensors, dtype in ((weights, torch.bfloat16), (exact, torch.float64)):
        host = host_for(config, dtype)
        results.append(run_chunks(build(config, tensors, dtype), host, prompt[0].tolist(), [45]))
    return results[0], theirs_model(prompt).logits[0], results[1]
