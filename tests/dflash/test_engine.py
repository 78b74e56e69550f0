"""Speculation by a block draft changes no output, and its state is always that of a fresh run."""

import itertools
from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.dflash import allocate_dflash, fill_dflash_dummy, random_dflash
from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.speculative.dflash import DFlashDrafter
from inkling_rocm.model import InklingModel
from inkling_rocm.model.dflash import DFlashModel, DraftCache
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named
from tests.engine.tiny import tiny_config
from tests.support.plain_host import PlainHost, Row

VOCAB = 6  # so small that a draft which knows nothing is right now and then
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=18, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_new_tokens=12, seed=3, top_p=0.9, ignore_eos=True)
PENALISED = replace(DRAWN, frequency_penalty=0.7, min_new_tokens=5, logit_bias={1: 1.0})
PROMPTS = [[(7 * i + 3 * s + 1) % VOCAB for i in range(n)] for s, n in enumerate((3, 30, 17, 1))]


def target():
    config = tiny_config()
    return replace(config, text=replace(config.text, vocab_size=8, unpadded_vocab_size=VOCAB))


CONFIG = target()
DRAFT = replace(random_dflash(CONFIG.text, block_size=6), windows=(0, 9))


@pytest.fixture(scope="module")
def parts():
    weights = allocate(CONFIG, dtype=torch.float32, device="cpu")
    fill_dummy(CONFIG, weights, seed=3)
    draft = allocate_dflash(DRAFT, dtype=torch.float32, device="cpu")
    fill_dflash_dummy(DRAFT, draft, seed=2)
    return EngineParts(
        config=CONFIG,
        model=InklingModel(
            CONFIG, weights, resolve_ops(CONFIG, arch_named("cpu"), dtype="float32")
        ),
        tokenizer=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_draft=DFlashModel(DRAFT, draft),
    )


def make_engine(parts, *, speculate=True, **args):
    settings = {"page_size": 16, "max_running_requests": 8, "check_invariants": True, **args}
    if speculate:
        settings |= {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "demo"}
    else:
        parts = replace(parts, block_draft=None)
    return Engine(EngineArgs(model_path="tiny", skip_tokenizer_init=True, **settings), parts=parts)


def run(engine, requests):
    """Tokens of every continuation of (prompt, params) requests that run together."""
    with engine:
        for pool in engine._core.scheduler.pools:
            for storage in (pool.storage, *pool.beside):
                storage[:, :, 1:] = float("nan")
        handles = [engine.submit(prompt, params) for prompt, params in requests]
        found = []
        for handle, (_, params) in zip(handles, requests, strict=True):
            tokens = [[] for _ in range(params.n)]
            for update in handle:
                assert not update.error, update.error
                tokens[update.index] += update.token_ids
            found.append(tokens)
        assert all(pool.used == 0 for pool in engine._core.scheduler.pools)
        return found


class Watch:
    """Counts accepted and rejected drafts, and makes some of a draft that knows nothing right.

    Args: truth: greedy outputs by prompt: 0, 1, ... all of a block's drafts are taken from them,
        in turn. compare: compare every third block's logits with those of a fresh run.
    """

    def __init__(self, monkeypatch, parts, engine, truth, *, compare=False):
        self.accepted = self.rejected = self.seen = self.compared = 0
        self.worst, self.parts = 0.0, parts
        self.truth = {tuple(p): t for p, (t, *_) in zip(PROMPTS, truth, strict=True)}
        core = engine._core
        propose, blocks = DFlashDrafter.propose, DFlashDrafter._draft_blocks

        def counted(drafter, confirmed):
            for row, verified in enumerate(confirmed.step.draft.verify):
                accepted = max(len(confirmed.tokens[row]) - 1, 0)
                self.accepted += accepted
                self.rejected += int(verified) - accepted
            propose(drafter, confirmed)

        def compared(drafter, confirmed, slots_n, steps):
            blocks(drafter, confirmed, slots_n, steps)
            sequences = {s.slot: s for s in core.scheduler.running}
            for row in confirmed.drafting:
                slot = int(confirmed.step.slots[row])
                sequence = sequences[slot]
                tokens = [*sequence.tokens, *confirmed.tokens[row]]
                if compare and self.seen % 3 == 0:
                    self.compare(drafter.logits[slot, :steps], tokens)
                made = len(tokens) - sequence.prompt_len
                right = self.truth[tuple(tokens[: sequence.prompt_len])][made:]
                right = right[: self.seen % (steps + 1)]
                drafter.tokens[slot, : len(right)] = torch.tensor(right, dtype=torch.int64)
                self.seen += 1

        monkeypatch.setattr(DFlashDrafter, "propose", counted)
        monkeypatch.setattr(DFlashDrafter, "_draft_blocks", compared)

    def compare(self, logits_NV, tokens):
        error = (logits_NV - fresh_logits(self.parts, tokens, len(logits_NV))).abs().max()
        self.worst = max(self.worst, float(error.nan_to_num(torch.inf)))
        self.compared += 1


def fresh_logits(parts, tokens, steps):
    """Draft logits [steps, V] after these tokens: one forward of the model, one of the draft."""
    *past, last = tokens
    n, H = len(past), CONFIG.text.hidden_size
    host = PlainHost(CONFIG, num_requests=1, max_len=n, page_size=n)
    host.prepare([Row(1, 0, n)])
    taps = {layer: torch.empty(n, H) for layer in DRAFT.target_layer_ids}
    parts.model.forward(torch.tensor(past), host, taps)
    draft = parts.block_draft
    shape = (DRAFT.num_layers, 2, 2, n, DRAFT.num_kv_heads, DRAFT.head_dim)
    cache = DraftCache(storage=torch.full(shape, float("nan")))
    positions = torch.arange(n)
    draft.write_context(torch.cat(list(taps.values()), 1), positions, n + positions, cache)
    ids = torch.tensor([[last] + [DRAFT.mask_token_id] * steps])
    embeds = parts.model.weights["embed"][ids]
    hidden = draft.forward(embeds, torch.tensor([n]), torch.ones(1, 1, dtype=torch.int32), cache)
    return parts.model.logits(hidden[0, 1:], host)


@pytest.fixture(scope="module")
def expected(parts):
    cases = {"greedy": GREEDY, "drawn": DRAWN, "penalised": PENALISED}
    return {
        name: run(make_engine(parts, speculate=False), [(p, params) for p in PROMPTS])
        for name, params in cases.items()
    }


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
def test_outputs_are_those_without_speculation(monkeypatch, parts, expected, args, params):
    sampling = {"greedy": GREEDY, "drawn": DRAWN, "penalised": PENALISED}[params]
    engine = make_engine(parts, **args)
    watch = Watch(monkeypatch, parts, engine, expected[params])
    assert run(engine, [(p, sampling) for p in PROMPTS]) == expected[params]
    assert watch.accepted > 5
    assert watch.rejected > 5
    if "max_total_tokens" in args:
        assert engine.stats().preemptions > 0


def test_continuations_and_mixed_requests(parts):
    requests = [
        (PROMPTS[1], replace(DRAWN, n=3)),
        (PROMPTS[0], GREEDY),
        (PROMPTS[2], replace(DRAWN, n=2, seed=8, temperature=0.7)),
        (PROMPTS[3], replace(GREEDY, max_new_tokens=1)),
    ]
    want = run(make_engine(parts, speculate=False), requests)
    for page_size in (1, 16):
        assert run(make_engine(parts, page_size=page_size), requests) == want


def test_blocks_of_changing_length(monkeypatch, parts, expected):
    """What an adaptive controller may choose, no drafts at all included."""
    engine = make_engine(parts)
    watch = Watch(monkeypatch, parts, engine, expected["greedy"])
    steps = itertools.cycle((5, 0, 3, 1, 4))
    monkeypatch.setattr(engine._core.speculation, "choose", lambda batch: next(steps))
    assert run(engine, [(p, GREEDY) for p in PROMPTS]) == expected["greedy"]
    assert watch.accepted > 5
    found = engine.stats().speculation
    assert sum(found.accepted) == watch.accepted
    assert sum(found.drafted) == watch.accepted + watch.rejected


def test_greedy_requests_under_rejection_sampling(parts, expected):
    engine = make_engine(parts, speculative_use_rejection_sampling=True)
    mixed = [x for p in PROMPTS for x in ((p, GREEDY), (p, DRAWN))]
    assert run(engine, mixed)[::2] == expected["greedy"]


def test_an_abort_leaves_the_others_alone(parts, expected):
    with make_engine(parts) as engine:
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
def test_drafts_are_those_of_a_fresh_run(monkeypatch, parts, expected, args):
    engine = make_engine(parts, speculative_use_rejection_sampling=True, **args)
    watch = Watch(monkeypatch, parts, engine, expected["greedy"], compare=True)
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
def test_wrong_books_are_noticed(monkeypatch, parts, expected, wrong):
    propose = DFlashDrafter.propose
    monkeypatch.setattr(DFlashDrafter, "propose", lambda d, c: propose(d, wrong(d, c)))
    engine = make_engine(parts, speculative_use_rejection_sampling=True)
    watch = Watch(monkeypatch, parts, engine, expected["greedy"], compare=True)
    run(engine, [(p, GREEDY) for p in PROMPTS[:2]])
    assert watch.worst > 1e-2


def test_a_wrong_tap_layer_is_noticed(monkeypatch, parts, expected):
    taps = DFlashDrafter.taps
    monkeypatch.setattr(
        DFlashDrafter, "taps", lambda d, n: {(k + 1) % 3: x for k, x in taps(d, n).items()}
    )
    engine = make_engine(parts, speculative_use_rejection_sampling=True)
    watch = Watch(monkeypatch, parts, engine, expected["greedy"], compare=True)
    run(engine, [(p, GREEDY) for p in PROMPTS[:2]])
    assert watch.worst > 1e-2
