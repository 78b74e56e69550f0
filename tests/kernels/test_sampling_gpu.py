"""The device sampler on a GPU at the real vocabulary: tokens, distribution, graphs."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.sampler import sample
from tests.kernels.sampling_cases import device_tokens, draw_logits, make_row, make_rows

pytestmark = pytest.mark.gpu
VOCABULARY = 200058


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_tokens_of_the_cpu(device, arch, spread, dtype):
    """All but near ties: two perturbed logits within fp32 rounding may swap."""
    rows = make_rows(68, VOCABULARY)
    logits = draw_logits(len(rows), VOCABULARY, spread=spread, dtype=dtype)
    want = sample(logits, rows, keep_logits=True)
    tokens, scores, _ = device_tokens(logits.to(device), rows, device, arch, logprobs=True)
    different = [i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b]
    assert len(different) <= 1, [(i, rows[i].params, tokens[i], want[i]) for i in different]
    exact = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(scores.cpu().double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=40, top_p=0.9),
        SamplingParams(min_p=0.05),
    ],
    ids=str,
)
def test_distribution(device, arch, params):
    """Chi-square of 40000 draws over 3000 tokens."""
    draws, vocabulary = 40000, 3000
    logits = draw_logits(1, vocabulary, spread=2.0)[0]
    rows = [make_row(params, seed=5, position=i, vocabulary=vocabulary) for i in range(draws)]
    sampler = DeviceSampler(vocabulary=vocabulary, slots=1, device=device, arch=arch)
    wide = logits.to(device).expand(draws, -1).contiguous()
    tokens = sampler.sample(wide, rows, [0] * draws)[0].cpu()
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    probs = _reference(logits, params)
    assert counts[probs == 0].sum() == 0
    expected = probs * draws
    common = expected >= 5
    observed = torch.cat((counts[common], counts[~common].sum()[None]))
    wanted = torch.cat((expected[common], expected[~common].sum()[None])).clamp(min=1e-9)
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted)[wanted > 1e-6].sum())
    assert abs(statistic - freedom) / math.sqrt(2 * freedom) < 5


def _reference(logits, params):
    probs = (logits.double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    ranked = probs[order]
    if params.top_k > 0:
        ranked[params.top_k :] = 0
    ranked /= ranked.sum()
    ranked[ranked.cumsum(0) - ranked >= params.top_p] = 0
    ranked[ranked < params.min_p * ranked[0]] = 0
    return torch.zeros_like(probs).scatter(0, order, ranked / ranked.sum())


def test_a_graph_replays_what_eager_calls_draw(device, arch):
    vocabulary = 20000
    rows = make_rows(17, vocabulary, masks=False)
    sampler = DeviceSampler(vocabulary=vocabulary, slots=18, device=device, arch=arch)
    slots = list(range(1, 18))
    logits = draw_logits(17, vocabulary).to(device)
    params = sampler.rows(rows, slots)

    def call():
        from inkling_rocm.kernels.sampling import sample_rows

        return sample_rows(logits, params, arch=arch, logprobs=True)

    for slot, row in zip(slots, rows, strict=True):
        sampler.admit(slot, row.edits)
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, scores = call()
    for step in range(3):
        logits.copy_(draw_logits(17, vocabulary, seed=step + 1))
        params.position.add_(1)
        before = sampler.counts.clone()
        graph.replay()
        found = tokens.clone(), scores.clone(), sampler.counts.clone()
        sampler.counts.copy_(before)
        eager = call()
        assert torch.equal(found[0], eager[0])
        assert torch.equal(found[1], eager[1])
        assert torch.equal(found[2], sampler.counts)


def test_repeated_calls_are_bitwise_equal(device, arch):
    rows = make_rows(34, VOCABULARY, masks=False)
    logits = draw_logits(34, VOCABULARY, spread=1.0).to(device)
    first, second = (device_tokens(logits, rows, device, arch, logprobs=True)[:2] for _ in range(2))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
