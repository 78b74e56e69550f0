"""One step ahead of the tokens: what is started before what is known, and what that may waste.

That the output is the same is test_equivalence.py's business, which runs everything in this mode.
"""

from dataclasses import replace

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.buckets import decode_buckets
from inkling_rocm.engine.decode_runner import DecodeRunner
from tests.engine import history_model
from tests.engine.history_model import (
    EOS,
    HistoryModel,
    add_request,
    assert_empty,
    history_core,
    reference_tokens,
    run_to_end,
)

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
PROMPT = [(7 * i + 3) % 250 for i in range(9)]


@pytest.fixture(autouse=True)
def _ahead(monkeypatch):
    monkeypatch.setattr(history_model, "BUCKETS", (1, 2, 4, 8))


def watch(core):
    """Records ("run", tokens of the step) and ("wait", number of the step) as they happen."""
    log, run = [], core.executor.run

    def recording(step):
        number = sum(kind == "run" for kind, _ in log)
        log.append(("run", len(step.token_ids)))
        output = run(step)
        wait = output.wait

        def waiting():
            log.append(("wait", number))
            return wait()

        output.wait = waiting
        return output

    core.executor.run = recording
    return log


def waits_before_next_run(log):
    """For each step but the last: whether it was booked before the next one was started."""
    runs = [at for at, (kind, _) in enumerate(log) if kind == "run"]
    waits = {number: at for at, (kind, number) in enumerate(log) if kind == "wait"}
    return [waits[i] < runs[i + 1] for i in range(len(runs) - 1)]


def test_tokens_are_drawn_with_the_step_unless_logits_are_edited(monkeypatch):
    """One penalised row takes its batch out of the graph's drawing, and only while it runs."""
    drawn = []
    original = DecodeRunner.run

    def run(self, step):
        found = original(self, step)
        drawn.append((len(step.slots), found[2] is not None))
        return found

    monkeypatch.setattr(DecodeRunner, "run", run)
    core = history_core()
    penalised = replace(GREEDY, max_new_tokens=4, frequency_penalty=0.5)
    requests = [add_request(core, 1, PROMPT, GREEDY), add_request(core, 2, PROMPT, penalised)]
    run_to_end(core)
    for request, params in zip(requests, (GREEDY, penalised), strict=True):
        assert request.handle.tokens() == reference_tokens(PROMPT, params)
    assert {(2, False), (1, True)} == set(drawn)
    assert_empty(core)


class ShapeModel(HistoryModel):
    """Logits depend on how many rows they are computed for, as on a GPU whose kernels change with
    the shape; there by a rounding, here so that it is seen."""

    def logits(self, hidden, host):
        logits = super().logits(hidden, host)
        logits[:, len(hidden)] += 50.0
        return logits


def test_log_probabilities_are_of_the_logits_that_were_drawn_from():
    """Three rows run in a bucket of four: the drawn token is the most likely one there."""
    core = history_core(model=ShapeModel())
    requests = [add_request(core, i, PROMPT[i:], GREEDY, logprobs=1) for i in (1, 2, 3)]
    run_to_end(core)
    for request in requests:
        found = [entry for update in request.handle.updates for entry in update.logprobs]
        assert len(found) == GREEDY.max_new_tokens
        assert [entry.top for entry in found] == [((e.token_id, e.logprob),) for e in found]
    assert_empty(core)


def test_a_step_is_started_before_the_previous_one_is_booked():
    core = history_core()
    log = watch(core)
    request = add_request(core, 1, PROMPT, GREEDY)
    run_to_end(core)
    assert waits_before_next_run(log) == [False] * 11
    assert [n for kind, n in log if kind == "run"] == [9] + [1] * 11, "nothing is wasted at the end"
    assert request.handle.tokens() == reference_tokens(PROMPT, GREEDY)


def test_a_stop_id_costs_one_token_and_no_more():
    params = SamplingParams(max_new_tokens=60, seed=8, logit_bias={EOS: 3.5})
    core = history_core()
    log = watch(core)
    request = add_request(core, 1, PROMPT, params)
    run_to_end(core)
    tokens = request.handle.tokens()
    assert tokens == reference_tokens(PROMPT, params)
    assert tokens[-1] == EOS
    assert 1 < len(tokens) < 60
    assert sum(kind == "run" for kind, _ in log) == len(tokens) + 1
    assert_empty(core)


@pytest.mark.parametrize(
    ("params", "ahead"),
    [
        (SamplingParams(max_new_tokens=8, seed=1, ignore_eos=True), True),
        (SamplingParams(max_new_tokens=8, seed=1, logit_bias={7: 2.0}, ignore_eos=True), True),
        (SamplingParams(max_new_tokens=8, seed=1, frequency_penalty=0.5, ignore_eos=True), False),
        (SamplingParams(max_new_tokens=8, seed=1, min_new_tokens=8), False),
    ],
)
def test_rows_that_need_the_host_make_the_step_synchronous(params, ahead):
    core = history_core()
    log = watch(core)
    request = add_request(core, 1, PROMPT, params)
    run_to_end(core)
    assert waits_before_next_run(log) == [not ahead] * 7
    assert request.handle.tokens() == reference_tokens(PROMPT, params)


def test_min_new_tokens_is_synchronous_only_until_it_is_reached():
    params = SamplingParams(max_new_tokens=10, seed=1, min_new_tokens=4)
    core = history_core()
    log = watch(core)
    request = add_request(core, 1, PROMPT, params)
    run_to_end(core)
    assert request.handle.tokens() == reference_tokens(PROMPT, params)
    waited = waits_before_next_run(log)
    assert waited == [True] * 4 + [False] * (len(waited) - 4)


def test_one_row_that_needs_the_host_holds_the_batch_only_while_it_runs():
    core = history_core()
    log = watch(core)
    add_request(core, 1, PROMPT, GREEDY)
    held = SamplingParams(max_new_tokens=3, seed=1, presence_penalty=0.5, ignore_eos=True)
    add_request(core, 2, PROMPT, held)
    run_to_end(core)
    assert waits_before_next_run(log) == [True] * 3 + [False] * 8


def test_penalties_run_ahead_where_the_executor_counts():
    """The executor here does not really, so only the order of things is looked at."""
    core = history_core()
    core.executor.counts_tokens = True
    log = watch(core)
    params = SamplingParams(max_new_tokens=8, seed=1, frequency_penalty=0.5, ignore_eos=True)
    add_request(core, 1, PROMPT, params)
    run_to_end(core)
    assert not any(waits_before_next_run(log))


def test_continuations_start_from_a_booked_step():
    core = history_core()
    log = watch(core)
    params = SamplingParams(max_new_tokens=6, seed=11, n=3, ignore_eos=True)
    request = add_request(core, 1, PROMPT, params)
    run_to_end(core)
    assert waits_before_next_run(log) == [True] + [False] * 4
    for index in range(3):
        assert request.handle.tokens(index) == reference_tokens(PROMPT, params, seed=11 + index)
    assert_empty(core)


def test_abort_and_reuse_with_a_step_in_flight():
    """The slot and pages of an aborted request go to the next one while its step still runs."""
    for moment in range(1, 8):
        core = history_core(max_running_requests=1, max_total_tokens=32)
        add_request(core, 1, PROMPT, GREEDY)
        for _ in range(moment):
            core.step()
        assert core._flight is not None
        other = add_request(core, 2, PROMPT[::-1], GREEDY)
        core.abort("r1")
        run_to_end(core)
        assert other.handle.tokens() == reference_tokens(PROMPT[::-1], GREEDY), moment
        assert_empty(core)


def test_a_step_that_fails_in_flight_ends_its_requests_only():
    core = history_core()
    request = add_request(core, 1, PROMPT, GREEDY)
    core.step()
    core.step()
    flight = core._flight

    def planted():
        raise RuntimeError("planted")

    flight.output.wait = planted
    later = add_request(core, 2, PROMPT, GREEDY)
    run_to_end(core)
    assert request.handle.reasons() == {0: "error"}
    # It was in the batch of the step after, not of the one that failed.
    assert later.handle.tokens() == reference_tokens(PROMPT, GREEDY)
    assert_empty(core)


def test_buckets():
    assert decode_buckets(1) == (1,)
    assert decode_buckets(6) == (1, 2, 4, 6)
    assert decode_buckets(64) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
    assert decode_buckets(100)[-3:] == (80, 96, 100)
