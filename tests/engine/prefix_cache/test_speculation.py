"""Prefix hits and draft blocks: outputs are those without either, and the draft state behind a hit
is that of a fresh run at every depth, also where a verification has written it."""

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.memory import MemoryPlan
from inkling_rocm.engine.prefix_cache.checks import check_books
from inkling_rocm.engine.prefix_cache.tree import PrefixTree
from tests.engine.speculative.rounds import DraftErrors, Rounds
from tests.engine.speculative.truth import TruthfulSampler, drafter_of, fresh_draft_logits
from tests.engine.tiny import VOCAB, tiny_engine, tiny_mtp_config

CONFIG = tiny_mtp_config()
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
SALTS = (0, 3)


def prompt_of(length, salt=0):
    return [(7 * i + 31 * salt + 3) % VOCAB for i in range(length)]


def converse(engine, salts):
    """Conversations one after the other. Returns: tokens of each answer, cached tokens of each."""
    answers, cached = [], []
    for salt in salts:
        text = prompt_of(20 + salt, salt % 2)
        for turn in range(3):
            updates = list(engine.submit(text, GREEDY))
            assert updates[-1].error is None, updates[-1].error
            answers.append([token for update in updates for token in update.token_ids])
            cached.append(updates[-1].cached_tokens)
            text = text + answers[-1] + prompt_of(5, turn + salt)
            check_books(engine._core.scheduler.cache, engine._core.scheduler.running)
    return answers, cached


@pytest.fixture(scope="module")
def plain():
    with tiny_engine(CONFIG, disable_radix_cache=True) as engine:
        return converse(engine, SALTS)[0]


def worst_draft_error(steps, truth, *, rounds=False, **args):
    """Returns: the largest difference between draft logits and those of a fresh run, the answers
    and the cached tokens."""
    with tiny_engine(
        CONFIG, speculative_num_steps=steps, speculative_use_rejection_sampling=True, **args
    ) as engine:
        ahead = Rounds(engine) if rounds else None
        truthful = TruthfulSampler(engine, truth)
        errors = DraftErrors(engine, truthful)
        answers, cached = converse(engine, SALTS)
        assert truthful.accepted > 0
        assert ahead is None or ahead.ahead > 10
    return max(errors.found), answers, cached


@pytest.mark.parametrize(
    ("steps", "args"),
    [
        (2, {}),
        (8, {"rounds": True}),
        pytest.param(8, {"chunked_prefill_size": 25}, marks=pytest.mark.full),
        pytest.param(2, {"rounds": True}, marks=pytest.mark.full),
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(3, {"chunked_prefill_size": 9}, marks=pytest.mark.full),
    ],
)
def test_draft_logits_behind_a_hit_are_those_of_a_fresh_run(plain, steps, args):
    error, answers, cached = worst_draft_error(steps, 0.6, page_size=16, **args)
    assert error < 1e-3
    assert answers == plain
    # The second turns begin behind pages that only a verification has written.
    assert all(tokens >= 16 for tokens in cached[1::3])
    assert max(cached[1::3]) >= 32
    assert min(cached[2::3]) >= 48


@pytest.mark.full
def test_rings_that_only_cover_a_booked_round_show(monkeypatch):
    """A boundary that a round has passed is copied when the next one has run too."""
    monkeypatch.setattr(
        MemoryPlan, "draft_tokens", property(lambda plan: plan.most_drafts + plan.draft_depths)
    )
    assert worst_draft_error(8, 0.6, rounds=True, page_size=16)[0] > 1e-2


def test_a_key_without_the_lookahead_shows(monkeypatch):
    """The draft state of the last positions of a page depends on the tokens behind it."""
    key = PrefixTree.key

    def short(self, tokens, index):
        return key(self, tokens, index)[: self.page_size]

    monkeypatch.setattr(PrefixTree, "key", short)
    with tiny_engine(
        CONFIG, speculative_num_steps=8, speculative_use_rejection_sampling=True, page_size=16
    ) as engine:
        TruthfulSampler(engine, 0.6)
        drafter, scheduler = drafter_of(engine), engine._core.scheduler
        list(engine.submit(prompt_of(40), GREEDY))
        errors, propose = [], drafter.propose

        def checking(confirmed):
            propose(confirmed)
            for row in confirmed.drafting.tolist():
                slot = int(confirmed.step.slots[row])
                (sequence,) = scheduler.running
                tokens = [*sequence.tokens, *confirmed.tokens[row]]
                want = fresh_draft_logits(CONFIG, tokens, drafter.tokens[slot].tolist())
                errors.append((drafter.logits[slot] - want).abs().max())

        drafter.propose = checking
        other = prompt_of(32) + prompt_of(20, 3)
        updates = list(engine.submit(other, GREEDY))
    assert updates[-1].cached_tokens == 32
    assert torch.stack(errors).max() > 1e-2


def test_together_under_preemption(plain):
    """The answers again, all at once in little memory."""
    prompts = [prompt_of(20 + salt, salt % 2) for salt in SALTS] * 2
    with tiny_engine(
        CONFIG, speculative_num_steps=4, max_total_tokens=128, page_size=1, prefix_snapshots=6
    ) as engine:
        TruthfulSampler(engine, 0.6)
        for _ in range(2):
            handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
            found = [[t for update in handle for t in update.token_ids] for handle in handles]
            assert found == plain[::3] * 2
        check_books(engine._core.scheduler.cache, engine._core.scheduler.running)
        assert engine.stats().preemptions > 0
        assert engine._core.scheduler.cache.stats().hits > 0
