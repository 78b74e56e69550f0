"""Who runs when: budget, order, fairness, preemption."""

import pytest

from inkling_rocm.engine import SamplingParams
from tests.engine.history_model import (
    add_request,
    assert_empty,
    history_core,
    reference_tokens,
    run_to_end,
)

LONG = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)


def watch(core):
    """Record every step's batch as {order: tokens}."""
    batches = []
    schedule = core.scheduler.schedule

    def recording():
        batch = schedule()
        batches.append({s.request.order: n for s, n in batch})
        return batch

    core.scheduler.schedule = recording
    return batches


def test_the_prompt_budget_holds_and_decodes_come_on_top():
    core = history_core(chunked_prefill_size=10)
    batches = watch(core)
    for i in range(6):
        add_request(core, i + 1, [i + 1] * (5 + 13 * i), LONG)
    run_to_end(core)
    assert max(sum(n for n in batch.values() if n > 1) for batch in batches) == 10
    # A step is full while two prompts are unfinished.
    assert sum(batches[0].values()) == 10


def test_a_long_prompt_does_not_stop_decodes():
    core = history_core(chunked_prefill_size=8)
    batches = watch(core)
    add_request(core, 1, [1, 2, 3], LONG)
    core.step()
    add_request(core, 2, [4] * 200, SHORT)
    for _ in range(20):
        core.step()
    assert all(batch[1] == 1 for batch in batches[1:])
    assert all(batch[2] == 8 for batch in batches[1:])


def test_a_short_prompt_does_not_wait_behind_a_long_one():
    core = history_core(chunked_prefill_size=8)
    batches = watch(core)
    add_request(core, 1, [4] * 200, SHORT)
    core.step()
    short = add_request(core, 2, [5] * 8, SHORT)
    core.step()
    core.step()
    assert batches[1] == {1: 4, 2: 4}
    assert short.handle.tokens()


def test_the_oldest_prompt_advances_under_a_stream_of_short_ones():
    core = history_core(chunked_prefill_size=8)
    batches = watch(core)
    long = add_request(core, 1, [4] * 160, SHORT)
    for i in range(60):
        add_request(core, i + 2, [5] * 7, SHORT)
        core.step()
        if long.handle.tokens():
            break
    assert long.handle.tokens()
    assert all(batch[1] >= 4 for batch in batches[:39])


def test_admission_is_in_order_of_arrival():
    core = history_core(max_running_requests=2)
    requests = [add_request(core, i + 1, [i + 1] * (40 if i == 2 else 3), SHORT) for i in range(6)]
    finished = []
    while not core.idle:
        core.step()
        finished += [r.order for r in requests if r.handle.reasons() and r.order not in finished]
    assert finished == sorted(finished)


def test_nothing_overtakes_a_request_that_waits_for_pages():
    core = history_core(max_total_tokens=96, page_size=16)
    add_request(core, 1, [1] * 50, LONG)
    core.step()
    big = add_request(core, 2, [2] * 60, SHORT)
    small = add_request(core, 3, [3] * 3, SHORT)
    core.step()
    assert big.sequences[0].slot == small.sequences[0].slot == 0
    run_to_end(core)
    assert_empty(core)


def test_preempted_requests_resume_before_new_ones():
    core = history_core(max_total_tokens=64, page_size=1)
    long = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    add_request(core, 1, [1] * 20, long)
    second = add_request(core, 2, [2] * 20, long)
    while not core.scheduler.preempted:
        core.step()
    third = add_request(core, 3, [3] * 3, SHORT)
    core.step()
    assert third.sequences[0].slot == 0, "it would fit, but the preempted one does not"
    while not third.sequences[0].slot:
        core.step()
    assert second.sequences[0].slot or second.sequences[0].finished
    run_to_end(core)
    assert_empty(core)


def test_the_youngest_is_preempted():
    core = history_core(max_total_tokens=80, page_size=1)
    victims = []
    preempt = core.scheduler._preempt

    def recording(sequence):
        running = [s.order for s in core.scheduler.running]
        victims.append(sequence.order == max(running))
        preempt(sequence)

    core.scheduler._preempt = recording
    for i in range(4):
        add_request(core, i + 1, [i + 1] * 10, LONG)
    run_to_end(core)
    assert victims
    assert all(victims)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_smallest_pool_still_serves_everyone(page_size, chunk):
    """Room for one sequence only: they take turns, none starves, none deadlocks."""
    core = history_core(max_total_tokens=64, page_size=page_size, chunked_prefill_size=chunk)
    requests = [
        add_request(core, i + 1, [i + 1] * (5 + 4 * i), SamplingParams(max_new_tokens=30, seed=i))
        for i in range(6)
    ]
    run_to_end(core, most_steps=5000)
    assert all(r.handle.reasons()[0] in ("stop", "length") for r in requests)
    assert_empty(core)


def test_two_half_computed_prompts_do_not_block_each_other():
    """Both hold pages, neither can finish: the younger one must make room."""
    core = history_core(max_total_tokens=64, page_size=16, chunked_prefill_size=16)
    first = add_request(core, 1, [1] * 60, SHORT)
    core.step()
    second = add_request(core, 2, [2] * 60, SHORT)
    # Past admission's reserve, as a fork or a resumed request might be.
    core.scheduler.waiting.popleft()
    second.sequences[0].slot = core.scheduler.rings.take()
    core.scheduler.running.append(second.sequences[0])
    run_to_end(core)
    assert first.handle.reasons() == second.handle.reasons() == {0: "length"}
    assert core.scheduler.preemptions >= 1
    assert_empty(core)


def test_abort_at_every_moment_frees_everything():
    params = SamplingParams(max_new_tokens=12, seed=1, n=3, ignore_eos=True)
    for moment in range(16):
        core = history_core(chunked_prefill_size=6, max_running_requests=2, max_total_tokens=96)
        for i in range(3):
            add_request(core, i + 1, [i + 1] * (10 + i), params)
        for _ in range(moment):
            core.step()
        requests = dict(core.requests)
        for rid in list(requests):
            core.abort(rid)
            core.abort(rid)
        assert_empty(core)
        for request in requests.values():
            assert set(request.handle.reasons()) == {0, 1, 2}


@pytest.mark.parametrize("part", ["rings", "pools"])
def test_a_fork_that_fails_loses_nothing(part, monkeypatch):
    """Out of memory while the prompt's last page and rings are copied."""
    core = history_core(page_size=16)
    thing = core.scheduler.rings if part == "rings" else core.scheduler.pools[-1]

    def planted(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(thing, "fork", planted)
    forked = SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True, n=3)
    request = add_request(core, 1, [4] * 20, forked)
    run_to_end(core)
    assert request.handle.reasons() == {0: "error", 1: "error", 2: "error"}
    assert_empty(core)
    monkeypatch.undo()
    again = add_request(core, 2, [4] * 20, forked)
    run_to_end(core)
    assert set(again.handle.reasons().values()) == {"length"}


def test_a_continuation_whose_copies_may_be_lost_begins_again():
    """The step after a fork was not started, and only the parent was in its batch."""
    params = SamplingParams(max_new_tokens=9, seed=3, n=2, ignore_eos=True)
    prompt = [5, 6, 7]
    core = history_core()
    request = add_request(core, 1, prompt, params)
    core.step()
    parent, child = request.sequences
    assert child.slot
    assert child.forked
    core.scheduler.rings.take_copies()
    for pool in core.scheduler.pools:
        pool.take_changes([parent.slot])
    core.scheduler.start_failed([parent])
    assert not child.slot
    run_to_end(core)
    assert request.handle.tokens(1) == reference_tokens(prompt, params, seed=4)
    assert_empty(core)
