"""Speculation by a block draft changes no output, and its state is always that of a fresh run."""

import itertools
from dataclasses import replace

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.speculative.dflash import DFlashDrafter
from tests.dflash.watch import VOCAB, Watch, make_engine, run

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_new_tokens=12, seed=3, top_p=0.9, ignore_eos=True)
PENALISED = replace(DRAWN, frequency_penalty=0.7, min_new_tokens=5, logit_bias={1: 1.0})
PROMPTS = [[(7 * i + 3 * s + 1) % VOCAB for i in range(n)] for s, n in enumerate((3, 30, 17, 1))]


@pytest.fixture(scope="module")
def expected():
    cases = {"greedy": GREEDY, "drawn": DRAWN, "penalised": PENALISED}
    return {
        name: run(make_engine(speculate=False), [(p, params) for p in PROMPTS])
        for name, params in cases.items()
    }


def by_prompt(outputs):
    return {tuple(prompt): tokens for prompt, (tokens, *_) in zip(PROMPTS, outputs, strict=True)}


@pytest.mark.parametrize("params", ["greedy", "drawn", "penalised"])
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"speculative_num_draft_tokens": 2},
        {"speculative_num_draft_tokens": 4, "chunked_prefill_size": 7, "page_size": 1},
        {"chunked_prefill_size": 1, "max_running_requests": 3},
        {"max_total_tokens": 60, "chunked_prefill_size": 16, "page_size": 1},
    ],
    ids=["whole block", "one draft", "chunks of 7", "chunks of 1", "preemption"],
)
def test_outputs_are_those_without_speculation(monkeypatch, expected, args, params):
    sampling = {"greedy": GREEDY, "drawn": DRAWN, "penalised": PENALISED}[params]
    engine = make_engine(**args)
    watch = Watch(monkeypatch, engine, by_prompt(expected[params]))
    assert run(engine, [(p, sampling) for p in PROMPTS]) == expected[params]
    assert watch.accepted > 5
    assert watch.rejected > 5
    if "max_total_tokens" in args:
        assert engine.stats().preemptions > 0


def test_continuations_and_mixed_requests():
    requests = [
        (PROMPTS[1], replace(DRAWN, n=3)),
        (PROMPTS[0], GREEDY),
        (PROMPTS[2], replace(DRAWN, n=2, seed=8, temperature=0.7)),
        (PROMPTS[3], replace(GREEDY, max_new_tokens=1)),
    ]
    want = run(make_engine(speculate=False), requests)
    for page_size in (1, 16):
        assert run(make_engine(page_size=page_size), requests) == want


def test_blocks_of_changing_length(monkeypatch, expected):
    """What an adaptive controller may choose, no drafts at all included."""
    engine = make_engine()
    watch = Watch(monkeypatch, engine, by_prompt(expected["greedy"]))
    steps = itertools.cycle((5, 0, 3, 1, 4))
    monkeypatch.setattr(engine._core.speculation, "choose", lambda batch: next(steps))
    assert run(engine, [(p, GREEDY) for p in PROMPTS]) == expected["greedy"]
    assert watch.accepted > 5
    found = engine.stats().speculation
    assert sum(found.accepted) == watch.accepted
    assert sum(found.drafted) == watch.accepted + watch.rejected


def test_greedy_requests_under_rejection_sampling(expected):
    engine = make_engine(speculative_use_rejection_sampling=True)
    mixed = [x for p in PROMPTS for x in ((p, GREEDY), (p, DRAWN))]
    assert run(engine, mixed)[::2] == expected["greedy"]


def test_an_abort_leaves_the_others_alone(expected):
    with make_engine() as engine:
        long = engine.submit(PROMPTS[1], replace(GREEDY, max_new_tokens=200))
        others = [engine.submit(p, GREEDY) for p in PROMPTS]
        next(iter(long))
        engine.abort(long.rid)
        got = [[[t for update in handle for t in update.token_ids]] for handle in others]
        assert got == expected["greedy"]
        assert all(pool.used == 0 for pool in engine._core.scheduler.pools)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"chunked_prefill_size": 5, "page_size": 1},
        {"max_total_tokens": 60, "chunked_prefill_size": 16, "page_size": 1},
    ],
    ids=["rejections", "chunk borders", "preemption"],
)
def test_drafts_are_those_of_a_fresh_run(monkeypatch, expected, args):
    engine = make_engine(speculative_use_rejection_sampling=True, **args)
    watch = Watch(monkeypatch, engine, by_prompt(expected["greedy"]), compare=True)
    run(engine, [*((p, GREEDY) for p in PROMPTS), (PROMPTS[2], replace(GREEDY, n=2))])
    assert watch.compared > 10
    assert watch.accepted > 10
    assert watch.rejected > 10
    assert watch.worst < 1e-4
    if "max_total_tokens" in args:
        assert engine.stats().preemptions > 0


def _keeps_rejected_positions(drafter, confirmed):
    """What a drafter that took the verified length for the confirmed one would do."""
    step = confirmed.step
    return replace(confirmed, end=step.q_start + step.q_len)


def _forgets_the_bonus(drafter, confirmed):
    return replace(confirmed, end=confirmed.end - (confirmed.step.draft.verify > 0))


@pytest.mark.parametrize("wrong", [_keeps_rejected_positions, _forgets_the_bonus])
def test_wrong_books_are_noticed(monkeypatch, expected, wrong):
    propose = DFlashDrafter.propose
    monkeypatch.setattr(DFlashDrafter, "propose", lambda d, c: propose(d, wrong(d, c)))
    engine = make_engine(speculative_use_rejection_sampling=True)
    watch = Watch(monkeypatch, engine, by_prompt(expected["greedy"]), compare=True)
    run(engine, [(p, GREEDY) for p in PROMPTS[:2]])
    assert watch.worst > 1e-2


def test_a_wrong_tap_layer_is_noticed(monkeypatch, expected):
    taps = DFlashDrafter.taps
    monkeypatch.setattr(
        DFlashDrafter, "taps", lambda d, n: {(k + 1) % 3: x for k, x in taps(d, n).items()}
    )
    engine = make_engine(speculative_use_rejection_sampling=True)
    watch = Watch(monkeypatch, engine, by_prompt(expected["greedy"]), compare=True)
    run(engine, [(p, GREEDY) for p in PROMPTS[:2]])
    assert watch.worst > 1e-2
