"""Prefix hits and a block draft: whoever shares the model's pages shares the draft's keys, those
that a verification has written included."""

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.speculative.dflash import DFlashDrafter
from tests.dflash.watch import VOCAB, Watch, make_engine

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)


def prompt_of(length, salt=0):
    return [(5 * i * i + 3 * i + salt) % VOCAB for i in range(length)]


def converse(engine):
    """Two conversations that begin alike, of three turns each.

    Returns: the answers by their prompts, and the cached tokens of each turn.
    """
    answers, cached = {}, []
    for salt in (0, 1):
        text = prompt_of(19) + prompt_of(9, salt)
        for turn in range(3):
            updates = list(engine.submit(text, GREEDY))
            assert updates[-1].error is None, updates[-1].error
            answer = [token for update in updates for token in update.token_ids]
            answers[tuple(text)] = answer
            cached.append(updates[-1].cached_tokens)
            text = text + answer + prompt_of(4, turn + salt)
    return answers, cached


@pytest.fixture(scope="module")
def plain():
    with make_engine(speculate=False, disable_radix_cache=True) as engine:
        return converse(engine)[0]


def watched(monkeypatch, truth, **args):
    with make_engine(speculative_use_rejection_sampling=True, **args) as engine:
        for pool in engine._core.scheduler.pools:
            for storage in (pool.storage, *pool.beside):
                storage[:, :, 1:] = float("nan")
        watch = Watch(monkeypatch, engine, truth, compare=True)
        return watch, *converse(engine)


@pytest.mark.parametrize(
    "args",
    [{"page_size": 16}, {"page_size": 16, "chunked_prefill_size": 9}, {"page_size": 1}],
    ids=["pages of 16", "chunks of 9", "pages of 1"],
)
def test_drafts_behind_a_hit_are_those_of_a_fresh_run(monkeypatch, plain, args):
    watch, answers, cached = watched(monkeypatch, plain, **args)
    assert answers == plain
    assert watch.accepted > 10
    assert watch.rejected > 10
    assert watch.compared > 10
    assert watch.worst < 1e-4
    # Of the first prompt's 28 tokens; then of what was answered too.
    assert cached[0] == 0
    assert min(cached[1], cached[4]) >= 32
    assert min(cached[2], cached[5]) >= 48
    if args["page_size"] == 16:  # of smaller pages no boundary is kept where prompts part first
        assert cached[3] == 16


def test_keys_that_a_hit_does_not_bring_show(monkeypatch, plain):
    """The same with the draft's keys dropped whenever a page comes to a sequence again."""
    share = PagePool.share

    def without(pool, slot, first, pages):
        for storage in pool.beside:
            storage[:, :, list(pages)] = float("nan")
        share(pool, slot, first, pages)

    monkeypatch.setattr(PagePool, "share", without)
    watch, answers, cached = watched(monkeypatch, plain, page_size=16)
    assert max(cached) >= 48
    assert watch.worst == torch.inf
    assert answers == plain, "drafts are worse, outputs the same"


def test_aborts_and_preemption_between_hits(monkeypatch, plain):
    """Everything at once in little memory, twice."""
    with make_engine(page_size=1, max_total_tokens=100, prefix_snapshots=6) as engine:
        watch = Watch(monkeypatch, engine, plain)
        prompts = list(plain)
        for _ in range(2):
            gone = engine.submit(prompts[2], GREEDY)
            handles = [engine.submit(list(prompt), GREEDY) for prompt in prompts]
            engine.abort(gone.rid)
            found = [[t for update in handle for t in update.token_ids] for handle in handles]
            assert found == [plain[prompt] for prompt in prompts]
        assert watch.accepted > 0
        assert engine.stats().preemptions > 0
        assert engine._core.scheduler.cache.stats().hits > 0


def test_the_drafter_has_the_models_pages():
    with make_engine() as engine:
        drafter = engine._core.executor.speculation.drafter
        assert isinstance(drafter, DFlashDrafter)
        (pool,) = (pool for pool in engine._core.scheduler.pools if not pool.window)
        assert pool.beside[0] is drafter._cache.storage
