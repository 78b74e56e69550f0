"""Speculative verification: the distribution it draws from, and equality with the ordinary sampler.

The model of the distribution tests is a Markov chain over a few tokens: the target's logits are
those of the previous token, and so are the draft's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.random import uniform
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.engine.speculative import verification
from inkling_rocm.engine.speculative.verification import draw_drafts, verify_draft
from tests.support.sampling import chi_square_z, reference_probs

VOCAB = 7
START = VOCAB
TRIALS = 2000
INF = float("inf")
CUTS = ({}, {"top_p": 0.8}, {"top_k": 4}, {"top_k": 5, "top_p": 0.85}, {"min_p": 0.15})
SETTINGS = (
    *((0.5, cut) for cut in CUTS[:2]),
    *((1.0, cut) for cut in CUTS[:2]),
    *(pytest.param(1.0, cut, marks=pytest.mark.full) for cut in CUTS[2:]),
    *((1.5, cut) for cut in CUTS[:2]),
)


def chain(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits by previous token, [VOCAB + 1, VOCAB]."""
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(VOCAB + 1, VOCAB, generator=generator) * 1.5
    if kind == "close":
        return target, target + 0.4 * torch.randn(target.shape, generator=generator)
    if kind == "uniform":
        return target, torch.zeros_like(target)
    assert kind == "disjoint"
    odd = torch.arange(VOCAB) % 2 == 1
    return target.masked_fill(odd, -INF), torch.zeros_like(target).masked_fill(~odd, -INF)


def plain_row(params, seed, position):
    return SampleRow(params, seed, position, LogitEdits(params, (), ()))


def speculate(target, draft, params, *, num_drafts, rejection=True, bonus_from_draft=False):
    """The first two tokens of TRIALS sequences, [TRIALS, 2], and the mean number accepted."""
    tokens: list[list[int]] = [[] for _ in range(TRIALS)]
    accepted = []
    while short := [i for i, found in enumerate(tokens) if len(found) < 2]:
        rows = [plain_row(params, i, len(tokens[i])) for i in short]
        last = torch.tensor([tokens[i][-1] if tokens[i] else START for i in short])
        logits, stash, drafts = [target[last]], [], []
        for depth in range(num_drafts):
            stash.append(draft[last])
            last = draw_drafts(stash[-1], rows, depth, rejection=rejection)
            drafts.append(last)
            logits.append(target[last])
        if bonus_from_draft:
            logits[-1] = draft[last]
        found, count = verify_draft(
            torch.stack(logits, 1), torch.stack(drafts, 1), torch.stack(stash, 1), rows,
            rejection=rejection,
        )  # fmt: skip
        accepted += count.tolist()
        for i, row, n in zip(short, found.tolist(), count.tolist(), strict=True):
            assert row[n + 1 :] == [-1] * (num_drafts - n)
            tokens[i] += row[: n + 1]
    return np.array([found[:2] for found in tokens]), np.mean(accepted)


def deviation(tokens, target, params) -> tuple[float, float]:
    """Chi-square z of the first token and of both together."""
    first = reference_probs(target[START], params)
    joint = np.stack([first[t] * reference_probs(target[t], params) for t in range(VOCAB)])
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, tuple(tokens.T), 1)
    if counts[joint == 0].any():
        return INF, INF
    return chi_square_z(counts.sum(1), first), chi_square_z(counts.ravel(), joint.ravel())


@pytest.mark.parametrize("kind", ["close", "uniform", "disjoint"])
@pytest.mark.parametrize(("temperature", "cut"), SETTINGS, ids=str)
def test_rejection_sampling_draws_from_the_target(temperature, cut, kind):
    params = SamplingParams(temperature=temperature, **cut)
    target, draft = chain(kind)
    tokens, accepted = speculate(target, draft, params, num_drafts=2 - (temperature == 1.5))
    assert max(deviation(tokens, target, params)) < 4
    if kind == "disjoint":
        assert accepted == 0
    if kind == "close":
        assert accepted > 0.5


@pytest.mark.parametrize("kind", ["close", "uniform"])
@pytest.mark.parametrize("cut", CUTS[:2], ids=str)
def test_equal_tokens_draw_from_the_target_too(kind, cut):
    params = SamplingParams(**cut)
    target, draft = chain(kind)
    tokens, accepted = speculate(target, draft, params, num_drafts=2, rejection=False)
    assert max(deviation(tokens, target, params)) < 4
    # A draft drawn with noise of its own would be equal with probability sum(p q) only.
    assert accepted > (0.9 if kind == "close" else 0.2)


def always(log_p, log_q, draft_n, keys_n):
    return torch.ones_like(draft_n, dtype=torch.bool)


def by_target(log_p, log_q, draft_n, keys_n):
    u = uniform(keys_n, torch.zeros_like(draft_n[:, None]), stream=verification.ACCEPT_STREAM)
    return u[:, 0] < log_p.gather(1, draft_n[:, None])[:, 0].exp()


def whole_target(log_p, log_q):
    return log_p.exp()


@pytest.mark.parametrize(("temperature", "cut"), [(0.5, {}), (1.0, CUTS[1]), (1.5, {})], ids=str)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_accept", always), ("_accept", by_target), ("_residual", whole_target), ("bonus", None)],
    ids=["always accept", "accept with p", "resample from p", "bonus from q"],
)
def test_wrong_rules_fail_the_same_test(monkeypatch, name, wrong, cut, temperature):
    params = SamplingParams(temperature=temperature, **cut)
    target, draft = chain("uniform")
    if name != "bonus":
        monkeypatch.setattr(verification, name, wrong)
    tokens, _ = speculate(
        target, draft, params, num_drafts=1, bonus_from_draft=name == "bonus"
    )  # fmt: skip
    assert deviation(tokens, target, params)[1] > 10


# --- equality with the ordinary sampler --------------------------------------------------------

WIDE = 300
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=1.4, top_k=9),
    SamplingParams(top_p=0.7),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.4, frequency_penalty=0.7, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias={5: 3.0, 9: -50.0}),
    SamplingParams(temperature=0.3, min_new_tokens=5, logit_bias={3: 9.0, 7: 8.0}),
    SamplingParams(temperature=0.0, min_new_tokens=5, logit_bias={3: 9.0, 7: 8.0}),
    SamplingParams(top_k=1),
)
GENERATED = (7, 9, 9)


def wide_row(i: int, extra=(), mask=None) -> SampleRow:
    """Row i of the equality tests, `extra` generated tokens later."""
    params = PARAMS[i % len(PARAMS)]
    edits = LogitEdits(params, (1, 2, 2, 40), (3, 4), mask)
    for token in (*GENERATED, *extra):
        edits.add(token)
    return SampleRow(params, 1000 + i, 20 + i + len(extra), edits)


def step_by_step(logits_MV, i):
    """The ordinary sampler's tokens, each position after the tokens before it."""
    found: list[int] = []
    for logits in logits_MV:
        found += sample(logits[None], [wide_row(i, found)], keep_logits=True)
    return found


def wide_logits(count, positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, positions, WIDE, generator=generator)


def drafts_of(want, wrong_at):
    """The wanted tokens but for one position a row."""
    drafts = torch.tensor(want)[:, :-1].clone()
    for row, at in enumerate(wrong_at):
        if at < drafts.shape[1]:
            drafts[row, at] = (drafts[row, at] + 1) % WIDE
    return drafts


def test_without_rejection_sampling_the_tokens_are_the_ordinary_samplers():
    count, positions = 4 * len(PARAMS), 5
    logits = wide_logits(count, positions)
    kept = logits.clone()
    want = [step_by_step(logits[i], i) for i in range(count)]
    wrong_at = [i * 7 % positions for i in range(count)]  # 4: none is wrong
    tokens, accepted = verify_draft(
        logits, drafts_of(want, wrong_at), None, [wide_row(i) for i in range(count)],
        rejection=False,
    )  # fmt: skip
    assert accepted.tolist() == wrong_at
    for i, at in enumerate(wrong_at):
        assert tokens[i].tolist() == want[i][: at + 1] + [-1] * (positions - 1 - at)
    assert torch.equal(logits, kept)


def test_the_equality_depends_on_the_accepted_drafts():
    """Rows whose edits depend on earlier tokens differ if the drafts are left out of them."""
    count, positions = len(PARAMS), 4
    logits = wide_logits(1, 1).expand(count, positions, WIDE)
    want = [step_by_step(logits[i], i) for i in range(count)]
    stale = [[sample(x[None], [wide_row(i)], keep_logits=True)[0] for x in logits[i]]
             for i in range(count)]  # fmt: skip
    for i in (6, 8, 10):
        assert stale[i] != want[i]
    tokens, accepted = verify_draft(
        logits, drafts_of(want, [positions] * count), None, [wide_row(i) for i in range(count)],
        rejection=False,
    )  # fmt: skip
    assert tokens.tolist() == want
    assert accepted.tolist() == [positions - 1] * count


def test_penalties_of_accepted_drafts_enter_the_target_distribution():
    """One draft that the penalty then forbids: rejection sampling's second token avoids it."""
    params = SamplingParams(presence_penalty=1e4)
    rows = [plain_row(params, seed, 0) for seed in range(200)]
    stash = torch.zeros(200, 1, VOCAB)
    drafts = draw_drafts(stash[:, 0], rows, 0, rejection=True)
    tokens, accepted = verify_draft(
        torch.zeros(200, 2, VOCAB), drafts[:, None], stash, rows, rejection=True
    )
    assert accepted.tolist() == [1] * 200
    assert (tokens[:, 0] == drafts).all()
    assert (tokens[:, 0] != tokens[:, 1]).all()


def rejection_problem(count, num_drafts):
    logits = wide_logits(count, num_drafts + 1)
    noise = wide_logits(count, num_drafts, seed=1)
    stash = logits[:, :-1] + 0.5 * noise
    rows = [wide_row(i) for i in range(count)]
    drafts = torch.stack(
        [draw_drafts(stash[:, d].contiguous(), rows, d, rejection=True) for d in range(num_drafts)],
        1,
    )
    return logits, drafts, stash, rows


@pytest.mark.parametrize("rejection", [False, True])
def test_results_do_not_depend_on_the_batch(rejection):
    count = 3 * len(PARAMS)
    logits, drafts, stash, rows = rejection_problem(count, 3)
    tokens, accepted = verify_draft(logits, drafts, stash, rows, rejection=rejection)
    again = verify_draft(
        logits.flip(0), drafts.flip(0), stash.flip(0), rows[::-1], rejection=rejection
    )
    assert torch.equal(again[0].flip(0), tokens)
    assert torch.equal(again[1].flip(0), accepted)
    for i in range(count):
        one = slice(i, i + 1)
        lone = verify_draft(logits[one], drafts[one], stash[one], rows[one], rejection=rejection)
        assert torch.equal(lone[0], tokens[one])
        assert torch.equal(
            draw_drafts(stash[one, 2], rows[one], 2, rejection=rejection),
            draw_drafts(stash[:, 2], rows, 2, rejection=rejection)[one],
        )
    if rejection:
        assert 0 < accepted.double().mean() < 3


def test_greedy_rows_are_verified_by_the_largest_logit():
    count, positions = 4, 3
    logits = wide_logits(count, positions)
    rows = [plain_row(SamplingParams(temperature=0.0), i, 5) for i in range(count)]
    best = logits.argmax(-1)
    tokens, accepted = verify_draft(
        logits, drafts_of(best.tolist(), [0, 1, 2, 2]), logits[:, :-1], rows, rejection=True
    )
    assert accepted.tolist() == [0, 1, 2, 2]
    assert torch.equal(tokens, torch.where(tokens < 0, -1, best))
    drafts = draw_drafts(logits[:, 0], rows, 0, rejection=True)
    assert torch.equal(drafts, best[:, 0])


class EvenOnly:
    def allowed(self):
        return np.arange(WIDE) % 2 == 0


@pytest.mark.parametrize("rejection", [False, True])
def test_rows_with_a_grammar_accept_no_draft(rejection):
    logits, drafts, stash, rows = rejection_problem(2 * len(PARAMS), 2)
    masked = [wide_row(i, mask=EvenOnly()) if i % 2 else row for i, row in enumerate(rows)]
    first = sample(logits[:, 0], masked, keep_logits=True)
    drafts[1::2, 0] = torch.tensor(first)[1::2]  # even the right one
    want = verify_draft(logits, drafts, stash, rows, rejection=rejection)
    tokens, accepted = verify_draft(logits, drafts, stash, masked, rejection=rejection)
    assert tokens[1::2].tolist() == [[t, -1, -1] for t in first[1::2]]
    assert not accepted[1::2].any()
    assert torch.equal(tokens[::2], want[0][::2])
    assert torch.equal(accepted[::2], want[1][::2])


@pytest.mark.parametrize("rejection", [False, True])
def test_missing_drafts_end_a_round_with_an_ordinary_token(rejection):
    logits, drafts, stash, rows = rejection_problem(len(PARAMS), 2)
    drafts[:, 0] = -1
    tokens, accepted = verify_draft(logits, drafts, stash, rows, rejection=rejection)
    want = sample(logits[:, 0], rows, keep_logits=True)
    assert tokens.tolist() == [[t, -1, -1] for t in want]
    assert not accepted.any()


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("value", [float("nan"), -INF, INF])
def test_rows_end_where_no_logit_is_finite_and_alone(rejection, value):
    logits, drafts, stash, rows = rejection_problem(len(PARAMS), 2)
    want, _ = verify_draft(logits, drafts, stash, rows, rejection=rejection)
    reached = (want[:, 1] >= 0).tolist()
    poisoned = logits.clone()
    poisoned[::2, 1] = value
    tokens, accepted = verify_draft(poisoned, drafts, stash, rows, rejection=rejection)
    assert torch.equal(tokens[1::2], want[1::2])
    for i in range(0, len(PARAMS), 2):
        assert tokens[i].tolist() == [want[i, 0], -1, -1]
        assert accepted[i] == int(reached[i])
    assert any(reached[::2]) or not rejection


def test_a_draft_model_without_finite_logits_offers_nothing():
    rows = [wide_row(i) for i in range(len(PARAMS))]
    stash = torch.full((len(PARAMS), 1, WIDE), float("nan"))
    for rejection in (False, True):
        assert draw_drafts(stash[:, 0], rows, 0, rejection=rejection).tolist() == [-1] * len(PARAMS)
    # Even if a draft comes with such logits (a simulated one), the token is the target's.
    logits = wide_logits(len(PARAMS), 2)
    drafts = logits[:, :1].argmin(-1)
    tokens, accepted = verify_draft(logits, drafts, stash, rows, rejection=True)
    assert not accepted.any()
    assert (tokens[:, 0] >= 0).all()


def test_drafts_have_noise_of_their_own_for_rejection_sampling_only():
    """As many equal tokens as independent draws have, against all of them."""
    logits = torch.zeros(400, WIDE)
    rows = [plain_row(SamplingParams(), seed, 3) for seed in range(400)]
    drawn = torch.tensor(sample(logits, rows, keep_logits=True))
    assert (draw_drafts(logits, rows, 0, rejection=False) == drawn).all()
    apart = draw_drafts(logits, rows, 0, rejection=True)
    assert (apart == drawn).sum() < 10
    assert (apart == draw_drafts(logits, rows, 1, rejection=True)).sum() < 10


def test_wrong_arguments_are_named():
    logits, drafts, stash, rows = rejection_problem(3, 2)
    with pytest.raises(ValueError, match="wanted float32"):
        verify_draft(logits.double(), drafts, stash, rows, rejection=True)
    with pytest.raises(ValueError, match=r"drafts are torch.int64 \(3, 3\)"):
        verify_draft(logits, torch.zeros(3, 3, dtype=torch.int64), stash, rows, rejection=True)
    with pytest.raises(ValueError, match="draft logits are None"):
        verify_draft(logits, drafts, None, rows, rejection=True)
