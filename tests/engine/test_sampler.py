"""Sampling against plain float64 definitions, and independence of the batch."""

import math

import numpy as np
import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.logit_edits import LogitEdits, TokenCounts
from inkling_rocm.engine.logprobs import token_logprobs
from inkling_rocm.engine.random import gumbel, row_key
from inkling_rocm.engine.sampler import HEAD_WIDTHS, SampleRow, kept_logits, sample
from tests.support.sampling import chi_square_z, reference_probs

VOCAB = 1000
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, min_p=0.02),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7, top_p=0.9),
    SamplingParams(top_k=HEAD_WIDTHS[0] + 50),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999, temperature=2.0),
    SamplingParams(top_k=20, min_p=0.2),
    SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(logit_bias={3: 5.0, 999: -100.0}, top_p=0.7),
]


def row(params, *, seed=0, position=10, prompt=(1, 2), generated=(), stop_ids=()):
    edits = LogitEdits(params, prompt, stop_ids)
    for token in generated:
        edits.add(token)
    return SampleRow(params, seed, position, edits)


def draws(logits, params, count):
    rows = [row(params, seed=5, position=i) for i in range(count)]
    tokens = sample(logits.expand(count, -1).contiguous(), rows, keep_logits=False)
    return np.bincount(tokens, minlength=len(logits))


@pytest.mark.parametrize(
    "params", PARAMS[1:10], ids=lambda p: f"T{p.temperature} k{p.top_k} p{p.top_p} m{p.min_p}"
)
def test_the_distribution(params):
    """A chi-square test over 8000 draws; its own power is tested below."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    counts = draws(logits, params, 8000)
    probs = reference_probs(logits, params)
    assert not counts[probs == 0].any(), "a token outside the cut was drawn"
    assert chi_square_z(counts, probs) < 4


def test_the_chi_square_test_can_fail():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    counts = draws(logits, SamplingParams(temperature=1.02), 8000)
    wrong = reference_probs(logits, SamplingParams(temperature=1.2))
    assert chi_square_z(counts, wrong) > 4


@pytest.mark.parametrize("spread", [2.0, 0.05])
def test_kept_logits_are_those_of_the_definition(spread):
    """All cuts in one batch; a head of few tokens and one of most."""
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(2)) * spread
    probs = kept_logits(logits, PARAMS[1:10]).double().softmax(-1)
    for i, params in enumerate(PARAMS[1:10]):
        want = reference_probs(logits[i], params)
        np.testing.assert_allclose(probs[i].numpy(), want, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 300])
def test_small_and_uneven_vocabularies(vocab):
    logits = torch.zeros(vocab)
    for params in (
        SamplingParams(),
        SamplingParams(top_p=1 - 2**-53),
        SamplingParams(top_k=10**6),
        SamplingParams(top_k=3),
    ):
        counts = draws(logits, params, 20 * vocab)
        reached = (counts > 0).sum()
        assert reached == (min(3, vocab) if params.top_k == 3 else vocab)


def test_a_top_p_of_zero_leaves_the_most_likely_token():
    logits = torch.randn(VOCAB)
    assert draws(logits, SamplingParams(top_p=0.0), 50)[logits.argmax()] == 50


@pytest.mark.parametrize("threads", [1, 4])
def test_alone_and_in_a_batch_of_32_bitwise(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(32, 5003, generator=generator) * 3
        rows = [row(PARAMS[i % len(PARAMS)], seed=i, position=7 * i) for i in range(32)]
        together = sample(logits, rows, keep_logits=True)
        lone = [sample(logits[i : i + 1], rows[i : i + 1], keep_logits=True)[0] for i in range(32)]
        backwards = sample(logits.flip(0).contiguous(), rows[::-1], keep_logits=True)[::-1]
        assert together == lone == backwards
        scores = token_logprobs(logits, together, [3] * 32)
        assert scores == [
            token_logprobs(logits[i : i + 1], lone[i : i + 1], [3])[0] for i in range(32)
        ]
    finally:
        torch.set_num_threads(before)


def test_rounding_noise_in_flat_logits_rarely_changes_a_token():
    """Why not the inverse CDF: 1e-6 of noise over 50000 equal tokens must not move the choice."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 50000, generator=generator) * 0.01
    noisy = logits + torch.randn(64, 50000, generator=generator) * 1e-6
    rows = [row(SamplingParams(), seed=i) for i in range(64)]
    same = sum(
        a == b
        for a, b in zip(
            sample(logits, rows, keep_logits=True),
            sample(noisy, rows, keep_logits=True),
            strict=True,
        )
    )
    assert same >= 63


def test_seed_and_position_both_matter():
    logits = torch.zeros(1, VOCAB).expand(2, -1).contiguous()
    params = SamplingParams()
    a, b = sample(logits, [row(params, seed=1), row(params, seed=2)], keep_logits=True)
    c, d = sample(logits, [row(params, seed=1), row(params, seed=1, position=11)], keep_logits=True)
    assert a == c
    assert a != b
    assert c != d


def test_hashed_noise_is_gumbel_and_uncorrelated():
    keys = torch.tensor([row_key(seed, position) for seed in range(20) for position in range(20)])
    x = gumbel(keys, torch.arange(500), stream=2)
    assert abs(x.mean() - 0.5772157) < 0.01
    assert abs(x.var() - math.pi**2 / 6) < 0.02
    y = x - x.mean()
    for shifted in (y[:, 1:] * y[:, :-1], y[1:] * y[:-1], y[20:] * y[:-20]):
        assert abs(shifted.mean()) < 0.015
    assert not torch.equal(x, gumbel(keys, torch.arange(500), stream=1))
    assert torch.equal(x[:, 100:101], gumbel(keys, torch.tensor([100]), stream=2))


def test_penalties_by_their_definition():
    params = SamplingParams(
        temperature=0.0,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        repetition_penalty=1.5,
        logit_bias={4: 0.25, 9: -1.0},
    )
    prompt, generated = [1, 2, 2, 5], [5, 7, 7, 7, 4]
    logits = torch.randn(3, 12)
    expected = logits[1].double().clone()
    for token in {*prompt, *generated}:
        value = expected[token]
        expected[token] = value / 1.5 if value > 0 else value * 1.5
    for token in set(generated):
        expected[token] -= 0.7 * generated.count(token) + 0.3
    expected[4] += 0.25
    expected[9] -= 1.0
    from inkling_rocm.engine.logit_edits import apply_edits

    untouched = logits.clone()
    edits = row(params, prompt=prompt, generated=generated).edits
    apply_edits(logits, [(1, edits)])
    torch.testing.assert_close(logits[1].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[[0, 2]], untouched[[0, 2]])


def test_counts_grow_past_their_first_buffer():
    counts = TokenCounts([3, 3, 1])
    for token in range(200):
        counts.add(token % 150)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {t: 2.0 if t < 50 else 1.0 for t in range(150)}


def test_stop_ids_are_masked_until_enough_tokens():
    params = SamplingParams(temperature=0.0, min_new_tokens=2)
    logits = torch.zeros(1, 10)
    logits[0, 5] = 3.0
    for generated, allowed in (((), False), ((1,), False), ((1, 2), True)):
        (token,) = sample(
            logits, [row(params, generated=generated, stop_ids=(5,))], keep_logits=True
        )
        assert (token == 5) == allowed


@pytest.mark.parametrize("which", range(len(PARAMS)))
def test_rows_without_a_finite_logit_are_reported_and_alone(which):
    logits = torch.randn(3, VOCAB)
    logits[1] = float("nan")
    rows = [row(PARAMS[which])] * 3
    tokens = sample(logits, rows, keep_logits=True)
    assert tokens[1] is None
    assert None not in (tokens[0], tokens[2])
    logits[1] = float("-inf")
    assert sample(logits, rows, keep_logits=True)[1] is None


def test_kept_logits_are_untouched():
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sample(logits, [row(PARAMS[10], generated=(4,)), row(PARAMS[11])], keep_logits=True)
    assert torch.equal(logits, before)


def test_logprobs_by_their_definition():
    logits = torch.randn(2, VOCAB) * 5
    first, second = token_logprobs(logits, [3, 8], [2, 0])
    expected = logits.double().log_softmax(-1)
    assert first.logprob == pytest.approx(expected[0, 3].item(), abs=1e-5)
    assert second.logprob == pytest.approx(expected[1, 8].item(), abs=1e-5)
    top = expected[0].topk(2)
    assert [t for t, _ in first.top] == top.indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert second.top == ()
