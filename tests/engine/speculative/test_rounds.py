"""Rounds that run ahead over padded buckets give the output of decoding without speculation, and
leave in every depth what a fresh run over the same tokens finds."""

import random
from dataclasses import replace

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.shared_sampler import SharedSampler, ToldSampler
from inkling_rocm.engine.speculative import round_runner
from inkling_rocm.engine.token_sampler import TorchSampler
from tests.engine.history_model import add_request, assert_empty, run_to_end
from tests.engine.speculative.rounds import DraftErrors, Rounds
from tests.engine.speculative.test_mtp import CONFIG, GREEDY, outputs, prompt_of, tokens_of
from tests.engine.speculative.truth import TruthfulSampler, drafter_of
from tests.engine.test_run_ahead import waits_before_next_run, watch
from tests.engine.tiny import core_of, tiny_engine

LONG = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
PENALISED = SamplingParams(max_new_tokens=12, seed=9, repetition_penalty=1.3, ignore_eos=True)
REQUESTS = [
    (prompt_of(1), GREEDY),
    (prompt_of(3, 1), SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True)),
    (prompt_of(17, 2), SamplingParams(temperature=0.0, max_new_tokens=1)),
    (prompt_of(30, 3), SamplingParams(max_new_tokens=15, n=3, seed=8, top_k=20)),
    (prompt_of(45, 4), SamplingParams(max_new_tokens=24, seed=9, top_p=0.9)),
    (prompt_of(16, 6), LONG),
]


@pytest.fixture(scope="module")
def plain():
    """Outputs without speculation."""
    return outputs(REQUESTS)[0]


def poison(engine):
    """NaN wherever nothing was written: pages, rings, hidden states, drafts."""
    scheduler = engine._core.scheduler
    for pool in scheduler.pools:
        pool.storage[:, :, 1:] = float("nan")
    for storage in scheduler.rings.storage:
        storage[:, 1:] = float("nan")


@pytest.mark.parametrize(
    ("steps", "args"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(2, {"chunked_prefill_size": 5, "page_size": 1}, marks=pytest.mark.full),
        (8, {}),
        (2, {"page_size": 1, "max_total_tokens": 140}),
        pytest.param(8, {"page_size": 1, "max_total_tokens": 140}, marks=pytest.mark.full),
        pytest.param(1, {"page_size": 1, "max_total_tokens": 140}, marks=pytest.mark.full),
        pytest.param(8, {"chunked_prefill_size": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_outputs_are_those_without_speculation(plain, steps, args):
    with tiny_engine(CONFIG, speculative_num_steps=steps, **args) as engine:
        poison(engine)
        rounds, truthful = Rounds(engine), TruthfulSampler(engine, 0.7)
        handles = [engine.submit(*request) for request in REQUESTS]
        assert [tokens_of(handle) for handle in handles] == plain
        assert truthful.accepted > 20 * min(steps, 2)
        assert rounds.run > 5
        assert rounds.ahead > rounds.run / 2
        assert (engine.stats().preemptions > 0) == ("max_total_tokens" in args)
        assert not any(engine.stats().pages_used.values())


def test_the_blocks_own_drafts_and_joining_prompts(plain):
    """Requests come one by one while others decode: rounds and other steps take turns."""
    with tiny_engine(CONFIG, speculative_num_steps=3) as engine:
        rounds = Rounds(engine)
        handles = []
        for request in reversed(REQUESTS):
            handles.insert(0, engine.submit(*request))
            next(iter(handles[0]))
        found = [tokens_of(handle) for handle in handles]
        assert 3 < rounds.ahead < rounds.run
    for got, want in zip(found, plain, strict=True):  # the first updates were taken above
        assert all(want[i][-len(tokens) :] == tokens for i, tokens in got.items())


def test_a_row_whose_logits_are_edited_takes_the_batch_with_it(plain):
    penalised = outputs([(prompt_of(9), PENALISED)])[0][0]
    with tiny_engine(CONFIG, speculative_num_steps=2) as engine:
        rounds = Rounds(engine)
        other = engine.submit(prompt_of(9), PENALISED)
        long = engine.submit(*REQUESTS[-1])
        assert tokens_of(other) == penalised
        assert tokens_of(long) == plain[-1]
        assert 30 < rounds.run < 58, "rounds begin where the penalised one has ended"


@pytest.mark.parametrize("fewest", [0, 1])
def test_number_of_drafts_changes(plain, fewest):
    """As with --speculative-adaptive. A round verifies as many drafts as it is to make, whether
    more or fewer were made before; only after none were made (fewest = 0) is another step taken."""
    with tiny_engine(CONFIG, speculative_num_steps=4) as engine:
        rounds = Rounds(engine, drafts=(0, 1, 2, 3, 4))
        truthful, rng = TruthfulSampler(engine, 0.7), random.Random(3)
        numbers = range(fewest, 5)  # all of them soon, whichever steps the prompts take
        plan = [k for _ in range(20) for k in rng.sample(numbers, len(numbers)) for _ in range(2)]
        stats, executor = engine._core.speculation, engine._core.executor
        stats.choose = lambda batch: plan.pop() if plan else 4
        taken, booked, others = [], [], []
        takes, book, run = rounds.runner.takes, stats.book, executor.run
        rounds.runner.takes = lambda rows, k: taken.append(k) or takes(rows, k)

        def booking(drafted, accepted, seconds, *, steps, made):
            booked.append((max(drafted, default=0), steps, made))
            book(drafted, accepted, seconds, steps=steps, made=made)

        def running(step):
            decoding = (step.q_len == step.draft.verify + 1) & (step.q_start > 0)
            if step.round is None and decoding.all():
                others.append(step)
            return run(step)

        stats.book, executor.run = booking, running
        handles = [engine.submit(*request) for request in REQUESTS]
        assert [tokens_of(handle) for handle in handles] == plain
        assert set(taken) == set(range(fewest, 5))
        assert rounds.run > 10
        assert truthful.accepted > 20
        assert any(steps and drafted < steps for drafted, steps, _ in booked), "grew in a round"
        assert all(steps in (None, made) for _, steps, made in booked)
        if fewest:
            assert len(others) <= 1, "the forks' first"


def test_logprobs_are_those_of_the_tokens():
    want, got = [], []
    for into, args in ((want, {}), (got, {"speculative_num_steps": 4})):
        with tiny_engine(CONFIG, **args) as engine:
            if args:
                rounds = Rounds(engine)
                TruthfulSampler(engine, 0.6)
            quiet = engine.submit(prompt_of(5, 2), GREEDY)
            for update in engine.submit(prompt_of(9), GREEDY, logprobs=2):
                into += update.logprobs
            tokens_of(quiet)
    assert rounds.ahead > 2
    assert [x.token_id for x in got] == [x.token_id for x in want]
    for ours, theirs in zip(got, want, strict=True):
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("steps", "truth", "args"),
    [
        (1, 0.5, {}),
        (8, 0.5, {}),
        *(pytest.param(steps, 0.0, {}, marks=pytest.mark.full) for steps in (1, 2, 8)),
        pytest.param(2, 0.5, {"chunked_prefill_size": 3}, marks=pytest.mark.full),
        pytest.param(8, 0.5, {"max_total_tokens": 96, "page_size": 1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_draft_logits_of_every_depth_are_those_of_a_fresh_run(steps, truth, args):
    with tiny_engine(
        CONFIG, speculative_num_steps=steps, speculative_use_rejection_sampling=True, **args
    ) as engine:
        poison(engine)
        rounds, truthful = Rounds(engine), TruthfulSampler(engine, truth)
        errors = DraftErrors(engine, truthful)
        handles = [engine.submit(prompt_of(1 + 9 * i, i), GREEDY) for i in range(4 if args else 3)]
        for handle in handles:
            tokens_of(handle)
        assert rounds.ahead > 1
        assert (engine.stats().preemptions > 0) == ("max_total_tokens" in args)
    assert len(errors.found) > 3 * rounds.run / 2
    assert max(errors.found) < 1e-3


def test_a_window_that_begins_too_late_shows(monkeypatch):
    """What rejected drafts left in the deeper blocks is not computed again."""
    right = round_runner.draft_metadata_reference

    def late(tensors, tokens_BM, **shape):
        right(tensors, tokens_BM, **shape)
        for pool in tensors.draft.pools:
            rows = pool.write.view(tensors.rows, -1)
            rows[tensors.draft.positions.view(rows.shape) < tensors.verify.q_start[:, None]] = 0

    monkeypatch.setattr(round_runner, "draft_metadata_reference", late)
    with tiny_engine(
        CONFIG,
        speculative_num_steps=8,
        speculative_use_rejection_sampling=True,
        check_invariants=False,
    ) as engine:
        Rounds(engine)
        errors = DraftErrors(engine, TruthfulSampler(engine, 0.5))
        tokens_of(engine.submit(prompt_of(20), GREEDY))
    assert max(errors.found) > 1e-2


HOST_READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
    "unique", "masked_select",
)  # fmt: skip


def test_a_round_asks_the_device_for_nothing(plain, monkeypatch):
    """Outside the model's ops, whose torch variants no graph captures, and the torch sampler."""
    state = {"inside": False, "rounds": 0}

    def refusing(name, original):
        def method(tensor, *args, **kwargs):
            assert not state["inside"], f"Tensor.{name} in a round"
            return original(tensor, *args, **kwargs)

        return method

    def exempt(owner, name):
        function = getattr(owner, name)

        def outside(*args, **kwargs):
            before, state["inside"] = state["inside"], False
            try:
                return function(*args, **kwargs)
            finally:
                state["inside"] = before

        monkeypatch.setattr(owner, name, outside)

    for name in HOST_READS:
        monkeypatch.setattr(torch.Tensor, name, refusing(name, getattr(torch.Tensor, name)))
    with tiny_engine(CONFIG, speculative_num_steps=3, check_invariants=False) as engine:
        runner = Rounds(engine).runner
        for owner, names in (
            (runner._model, ("forward", "logits")),
            (runner._blocks, ("forward",)),
            (runner._sampler, ("verify", "draft")),
        ):
            for name in names:
                exempt(owner, name)
        right = runner._round

        def guarded(bucket):
            state["inside"] = True
            try:
                right(bucket)
            finally:
                state["inside"] = False
            state["rounds"] += 1

        runner._round = guarded
        assert tokens_of(engine.submit(*REQUESTS[-1])) == plain[-1]
        assert state["rounds"] > 30
        state["inside"] = True
        with pytest.raises(AssertionError, match=r"Tensor\.tolist in a round"):
            torch.zeros(1).tolist()
        state["inside"] = False


def test_the_next_round_is_started_before_this_one_is_booked():
    with tiny_engine(CONFIG, speculative_num_steps=2) as engine:
        Rounds(engine)
        core = core_of(engine)
        log = watch(core)
        add_request(core, 1, prompt_of(9), GREEDY)
        run_to_end(core)
        waits = waits_before_next_run(log)
        # The prompt is booked at once, and nothing comes after a round that must be the last.
        assert waits[0]
        assert not any(waits[1:])
        assert_empty(core)


def test_a_stop_id_costs_one_round_and_no_more(plain):
    tokens = plain[0][0]
    stop = next(token for token in tokens[9:] if tokens.index(token) >= 9)
    params = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=(stop,))
    for truth in (0.0, 1.0):
        with tiny_engine(CONFIG, speculative_num_steps=3) as engine:
            rounds = Rounds(engine)
            TruthfulSampler(engine, truth)
            core, expected = core_of(engine), tokens[: tokens.index(stop) + 1]
            request = add_request(core, 1, prompt_of(1), params)
            run_to_end(core)
            assert request.handle.tokens() == expected
            # The first token is the prompt's.
            needed = -(-(len(expected) - 1) // 4) if truth else len(expected) - 1
            assert rounds.run == needed + 1
            assert_empty(core)


def test_aborts_preemption_and_reuse_with_a_round_in_flight(plain):
    """At every moment: the slot and pages go to another request while the round still runs."""
    for moment in range(1, 8, 2):
        with tiny_engine(CONFIG, speculative_num_steps=2, max_running_requests=2) as engine:
            Rounds(engine)
            TruthfulSampler(engine, 0.5)
            core = core_of(engine)
            add_request(core, 1, prompt_of(12), LONG)
            kept = add_request(core, 2, *REQUESTS[0])
            for _ in range(moment):
                core.step()
            other = add_request(core, 3, *REQUESTS[1])
            core.abort("r1")
            core._land()
            if kept.sequences[0].slot and not kept.sequences[0].finished:
                core.scheduler._requeue(kept.sequences[0])
            run_to_end(core)
            assert kept.handle.tokens() == plain[0][0], moment
            assert other.handle.tokens() == plain[1][0], moment
            assert_empty(core)


def test_a_round_that_fails_in_flight_ends_its_requests_only(plain):
    with tiny_engine(CONFIG, speculative_num_steps=2) as engine:
        Rounds(engine)
        core = core_of(engine)
        request = add_request(core, 1, prompt_of(9), LONG)
        for _ in range(3):
            core.step()

        def planted():
            raise RuntimeError("planted")

        core._flight.output.wait = planted
        later = add_request(core, 2, *REQUESTS[0])
        run_to_end(core)
        assert request.handle.reasons() == {0: "error"}
        assert later.handle.tokens() == plain[0][0]
        assert_empty(core)


def test_rejection_sampling_and_simulated_acceptance_run_to_the_end():
    for args in (
        {"speculative_use_rejection_sampling": True},
        {"speculative_simulate_acceptance": 0.8},
    ):
        with tiny_engine(CONFIG, speculative_num_steps=4, **args) as engine:
            rounds = Rounds(engine)
            params = SamplingParams(max_new_tokens=60, seed=5, ignore_eos=True)
            handles = [engine.submit(prompt_of(9, i), params) for i in range(3)]
            assert [len(tokens_of(handle)[0]) for handle in handles] == [60] * 3
            assert rounds.ahead > 5
            stats = engine.stats().speculation
        if "speculative_simulate_acceptance" in args:
            # (0.8 + 0.8 ** 2 + ...) / 4 = 0.59
            assert 0.5 < sum(stats.accepted) / sum(stats.drafted) < 0.68


class _Wire:
    """Stands where the communicator of two ranks stands, for one of them."""

    def __init__(self, told, *, tells):
        self.told = told
        self.tells = tells

    def broadcast(self, tensor):
        if self.tells:
            self.told.append(tensor.clone())
            return tensor
        found = self.told.pop(0)
        assert found.shape == tensor.shape
        return found


def test_what_rank_0_tells_is_enough(plain):
    """A follower that is told the tokens holds the same drafts and lengths after every step."""
    told = []
    with (
        tiny_engine(CONFIG, speculative_num_steps=3) as engine,
        tiny_engine(CONFIG, speculative_num_steps=3, check_invariants=False) as second,
    ):
        shared = SharedSampler(TorchSampler(), _Wire(told, tells=True))
        for each, sampler in (
            (engine, shared),
            (second, ToldSampler(_Wire(told, tells=False))),
        ):
            executor = each._core.executor
            executor.sampler = executor.speculation._sampler = sampler
            drafter_of(each)._sampler = sampler
        lead, follow = Rounds(engine), Rounds(second)
        run = lead.executor.run

        def both(step):
            output = run(step)
            follow.executor.follow(replace(step, samples=()))
            assert not told
            assert torch.equal(drafter_of(engine).tokens[1:], drafter_of(second).tokens[1:])
            assert torch.equal(lead.runner.length, follow.runner.length)
            return output

        lead.executor.run = both
        handles = [engine.submit(*REQUESTS[i]) for i in (0, 1)]
        assert [tokens_of(handle) for handle in handles] == plain[:2]
        assert follow.run == lead.run > 5
