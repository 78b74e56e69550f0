"""Drafts by the checkpoint's blocks: the output is that of decoding without them, and what the
blocks find at every depth is what a fresh run over the same tokens finds."""

import random

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.sequence import Sequence
from inkling_rocm.model.mtp import text_with_drafts
from tests.engine.speculative.truth import TruthfulSampler, drafter_of, fresh_draft_logits
from tests.engine.tiny import VOCAB, tiny_engine, tiny_mtp_config

CONFIG = tiny_mtp_config()
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def prompt_of(length, salt=0):
    return [(7 * i + 31 * salt + 3) % VOCAB for i in range(length)]


def tokens_of(handle):
    tokens = {}
    for update in handle:
        assert update.error is None, update.error
        tokens.setdefault(update.index, []).extend(update.token_ids)
    return tokens


def outputs(requests, *, truth=None, **args):
    """Tokens of each (prompt, params), all submitted at once; with `truth` a share of the drafts is
    what the model will say. Returns: those, and how many drafts were accepted."""
    with tiny_engine(CONFIG, **args) as engine:
        sampler = None
        if truth is not None:
            sampler = TruthfulSampler(engine, truth)
        handles = [engine.submit(prompt, params) for prompt, params in requests]
        found = [tokens_of(handle) for handle in handles]
        assert engine.stats().running == 0
        assert all(used == 0 for used in engine.stats().pages_used.values())
        return found, 0 if sampler is None else sampler.accepted


MIXED = [
    (prompt_of(1), GREEDY),
    (prompt_of(3, 1), SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True)),
    (prompt_of(17, 2), SamplingParams(temperature=0.0, max_new_tokens=1)),
    (prompt_of(30, 3), SamplingParams(max_new_tokens=15, n=3, seed=8, top_k=20)),
    (prompt_of(45, 4), SamplingParams(max_new_tokens=24, seed=9, repetition_penalty=1.3)),
    (prompt_of(9, 5), SamplingParams(max_new_tokens=24, seed=2, min_new_tokens=20, min_p=0.05)),
    (prompt_of(16, 6), GREEDY),
]


@pytest.fixture(scope="module")
def plain():
    """Outputs without speculation."""
    return outputs(MIXED)[0]


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("args", [{}, {"chunked_prefill_size": 5, "page_size": 1}], ids=str)
def test_outputs_are_those_without_speculation(plain, steps, args):
    found, accepted = outputs(MIXED, truth=0.7, speculative_num_steps=steps, **args)
    assert found == plain
    assert accepted > 20 * min(steps, 2), "drafts must have been accepted, or this shows nothing"


def test_with_the_blocks_own_drafts(plain):
    assert outputs(MIXED, speculative_num_steps=3)[0] == plain


@pytest.mark.parametrize("steps", [2, 8])
def test_under_preemption(steps):
    requests = [
        (prompt_of(20 + i, i), SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True))
        for i in range(5)
    ]
    want = outputs(requests)[0]
    with tiny_engine(
        CONFIG, speculative_num_steps=steps, max_total_tokens=112, page_size=1
    ) as engine:
        TruthfulSampler(engine, 0.6)
        handles = [engine.submit(prompt, params) for prompt, params in requests]
        assert [tokens_of(handle) for handle in handles] == want
        assert engine.stats().preemptions > 0


def test_an_abort_leaves_the_others_alone(plain):
    long = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    with tiny_engine(CONFIG, speculative_num_steps=8) as engine:
        TruthfulSampler(engine, 0.6)
        victims = [engine.submit(prompt_of(12, 20 + i), long) for i in range(2)]
        next(iter(victims[0]))
        handles = [engine.submit(prompt, params) for prompt, params in MIXED]
        for victim in victims:
            victim.abort()
        assert [tokens_of(handle) for handle in handles] == plain
        for victim in victims:
            assert list(victim)[-1].finish_reason == "abort"


def test_a_stop_within_a_round_ends_the_output(plain):
    """The token that ends it may come with others behind it."""
    stop = plain[0][0][10]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=(stop,))
    found, _ = outputs([(prompt_of(1), params)], truth=1.0, speculative_num_steps=8)
    assert found[0][0] == plain[0][0][: plain[0][0].index(stop) + 1]


def test_logprobs_are_those_of_the_tokens():
    want, got = [], []
    for into, args in ((want, {}), (got, {"speculative_num_steps": 4})):
        with tiny_engine(CONFIG, **args) as engine:
            if args:
                TruthfulSampler(engine, 0.6)
            for update in engine.submit(prompt_of(9), GREEDY, logprobs=2, prompt_logprobs=True):
                into += [*update.prompt_logprobs, *update.logprobs]
    assert [x.token_id for x in got] == [x.token_id for x in want]
    assert [[i for i, _ in x.top] for x in got] == [[i for i, _ in x.top] for x in want]
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def worst_draft_error(steps, truth, temperature=0.0, **args) -> float:
    """Largest difference between the logits drafts were drawn from and those of a fresh run; at a
    temperature the continuations of a prompt part."""
    worst = [0.0]
    with tiny_engine(
        CONFIG, speculative_num_steps=steps, speculative_use_rejection_sampling=True, **args
    ) as engine:
        TruthfulSampler(engine, truth)
        drafter, scheduler = drafter_of(engine), engine._core.scheduler
        propose = drafter.propose

        def checking(confirmed):
            propose(confirmed)
            running = {sequence.slot: sequence for sequence in scheduler.running}
            for row in confirmed.drafting.tolist():
                slot = int(confirmed.step.slots[row])
                tokens = [*running[slot].tokens, *confirmed.tokens[row]]
                drafts = drafter.tokens[slot].tolist()
                want = fresh_draft_logits(CONFIG, tokens, drafts)
                error = (drafter.logits[slot] - want).abs().max()
                worst[0] = max(worst[0], float(error.nan_to_num(torch.inf)))  # max() drops a NaN

        drafter.propose = checking
        rng = random.Random(steps)
        handles = [
            engine.submit(
                prompt_of(rng.randint(1, 40), i),
                SamplingParams(
                    temperature=temperature, max_new_tokens=12, ignore_eos=True, n=1 + i % 2, seed=i
                ),
            )
            for i in range(5)
        ]
        for handle in handles:
            tokens_of(handle)
    return worst[0]


CASES = {
    "rejections": {"truth": 0.5},
    "all rejected": {"truth": 0.0},
    "chunk borders": {"truth": 0.5, "chunked_prefill_size": 3},
    "preemption": {"truth": 0.5, "max_total_tokens": 96, "page_size": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_draft_logits_of_every_depth_are_those_of_a_fresh_run(steps, case):
    assert worst_draft_error(steps, **CASES[case]) < 1e-3


@pytest.mark.parametrize("steps", [1, 2])
def test_draft_logits_of_continuations_that_part(steps):
    """The deepest block has read the first token of one of them before the others start."""
    assert worst_draft_error(steps, 0.5, temperature=1.0, page_size=1) < 1e-3


@pytest.mark.parametrize("case", ["rejections", "chunk borders"])
def test_state_that_is_not_computed_again_shows(monkeypatch, case):
    """What a server does that keeps the draft state of rejected tokens."""
    monkeypatch.setattr(Sequence, "settled", property(lambda self: self.computed))
    assert worst_draft_error(8, **CASES[case]) > 1e-2


def test_more_steps_than_blocks_are_refused():
    with pytest.raises(ValueError, match=r"9 draft steps were asked for.* 8 draft blocks"):
        text_with_drafts(CONFIG, 9)


def test_the_hidden_state_fed_forward_matters():
    """The comparison above can fail: another hidden state or token changes the logits."""
    tokens, drafts = prompt_of(20), [1, 2, 3]
    right = fresh_draft_logits(CONFIG, tokens, drafts)
    wrong = fresh_draft_logits(CONFIG, tokens, drafts, roll=1)
    shifted = fresh_draft_logits(CONFIG, [tokens[1], *tokens[1:]], drafts)
    assert torch.isfinite(right).all()
    assert (right - wrong).abs().max() > 1e-2
    assert (right - shifted).abs().max() > 1e-2
