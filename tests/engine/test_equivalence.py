"""The output is the same however a request is chunked, paged, batched, preempted or forked."""

from dataclasses import replace

import pytest

from inkling_rocm.engine import SamplingParams
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

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
VARIED = [
    GREEDY,
    SamplingParams(max_new_tokens=25, seed=1, ignore_eos=True),
    SamplingParams(max_new_tokens=9, seed=2, top_k=5, temperature=0.7, ignore_eos=True),
    SamplingParams(max_new_tokens=30, seed=3, top_p=0.8, ignore_eos=True),
    SamplingParams(
        max_new_tokens=22,
        seed=4,
        frequency_penalty=0.9,
        presence_penalty=0.5,
        repetition_penalty=1.4,
        ignore_eos=True,
    ),
    SamplingParams(max_new_tokens=30, seed=5, logit_bias={EOS: 4.0}, min_new_tokens=7),
    SamplingParams(max_new_tokens=14, seed=6, min_p=0.1, stop_token_ids=(7, 8, 9, 10, 11)),
]


@pytest.fixture(autouse=True, params=[None, (1, 2, 3, 5, 8)], ids=["plain", "ahead"])
def mode(request, monkeypatch):
    """Every test runs plainly, and one step ahead over padded buckets."""
    monkeypatch.setattr(history_model, "BUCKETS", request.param)


def prompt_of(length, salt=0):
    return [(7 * i + 31 * salt + 3) % 250 for i in range(length)]


@pytest.mark.parametrize("chunk", [*range(1, 9), 15, 16, 17, -1])
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_and_pages(chunk, page_size):
    core = history_core(chunked_prefill_size=chunk, page_size=page_size)
    prompt = prompt_of(45)
    request = add_request(core, 1, prompt, GREEDY)
    run_to_end(core)
    assert request.handle.tokens() == reference_tokens(prompt, GREEDY)
    assert_empty(core)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 15, 16, 17, 31, 32, 33, 64])
def test_prompt_lengths_around_page_and_window_borders(length, page_size):
    core = history_core(chunked_prefill_size=16, page_size=page_size)
    prompt = prompt_of(length)
    request = add_request(core, 1, prompt, GREEDY)
    run_to_end(core)
    assert request.handle.tokens() == reference_tokens(prompt, GREEDY)


@pytest.mark.parametrize("order", [1, -1])
def test_a_full_batch_of_different_requests(order):
    core = history_core(chunked_prefill_size=11, max_running_requests=5)
    requests = {}
    for i, params in list(enumerate(VARIED * 2))[::order]:
        requests[i] = add_request(core, len(requests) + 1, prompt_of(3 + 9 * i, salt=i), params)
    run_to_end(core)
    for i, request in requests.items():
        expected = reference_tokens(prompt_of(3 + 9 * i, salt=i), request.params)
        assert request.handle.tokens() == expected, f"request {i}"
    assert_empty(core)


def test_preempted_requests_are_unchanged():
    """Room for about two of seven requests at their end: preemption must happen, and not show."""
    core = history_core(chunked_prefill_size=16, max_total_tokens=100, page_size=1)
    requests = []
    for i, params in enumerate(VARIED):
        params = replace(params, max_new_tokens=50)
        prompt = prompt_of(20 + i, salt=i)
        requests.append(add_request(core, i + 1, prompt, params, logprobs=2, prompt_logprobs=True))
    run_to_end(core)
    assert core.scheduler.preemptions >= 3
    for i, request in enumerate(requests):
        prompt = prompt_of(20 + i, salt=i)
        assert request.handle.tokens() == reference_tokens(prompt, request.params), f"request {i}"
        updates = request.handle.updates
        assert sum(len(u.logprobs) for u in updates) == len(request.handle.tokens())
        assert len(updates[0].prompt_logprobs) == len(prompt)
        assert [x.token_id for x in updates[0].prompt_logprobs] == prompt
    assert_empty(core)


def test_forced_preemption_at_every_moment():
    """Preempt the only decoding request after each step."""
    prompt, params = prompt_of(23), VARIED[4]
    expected = reference_tokens(prompt, params)
    for moment in range(1, 26):
        core = history_core(chunked_prefill_size=8)
        request = add_request(core, 1, prompt, params)
        for _ in range(moment):
            core.step()
        if not core.idle:
            core.scheduler.running.insert(0, None)  # _preempt refuses to preempt the last one
            core.scheduler._preempt(request.sequences[0])
            core.scheduler.running.remove(None)
        run_to_end(core)
        assert request.handle.tokens() == expected, f"preempted after step {moment}"
        assert_empty(core)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
@pytest.mark.parametrize("page_size", [1, 16])
def test_continuations_share_the_prompt(length, page_size):
    params = SamplingParams(max_new_tokens=20, seed=11, n=4, ignore_eos=True)
    core = history_core(page_size=page_size)
    request = add_request(core, 1, prompt_of(length), params)
    pages = [pool.used for pool in core.scheduler.pools]
    core.step()
    pool = core.scheduler.pools[0]
    assert not pool.window
    shared = length // page_size
    partial = 4 * (length % page_size > 0)
    assert pool.used == shared + partial, pages
    of_sequences = [r - held for r, held in zip(pool.references, pool.held, strict=True)]
    assert of_sequences.count(4) == shared
    run_to_end(core)
    for index in range(4):
        expected = reference_tokens(prompt_of(length), params, seed=11 + index)
        assert request.handle.tokens(index) == expected, f"continuation {index}"
    assert len({tuple(request.handle.tokens(i)) for i in range(4)}) == 4
    assert_empty(core)


@pytest.mark.parametrize(("max_running", "tokens"), [(2, 4096), (6, 6 * 16), (1, 4096)])
def test_continuations_that_find_no_room_are_computed_later(max_running, tokens):
    params = SamplingParams(max_new_tokens=18, seed=11, n=6, ignore_eos=True)
    core = history_core(max_running_requests=max_running, max_total_tokens=tokens)
    request = add_request(core, 1, prompt_of(40), params)
    other = add_request(core, 2, prompt_of(9), GREEDY)
    run_to_end(core)
    for index in range(6):
        expected = reference_tokens(prompt_of(40), params, seed=11 + index)
        assert request.handle.tokens(index) == expected, f"continuation {index}"
    assert other.handle.tokens() == reference_tokens(prompt_of(9), GREEDY)
    assert_empty(core)


def test_continuations_end_independently():
    params = SamplingParams(max_new_tokens=60, seed=5, n=5, logit_bias={EOS: 4.5})
    core = history_core()
    request = add_request(core, 1, prompt_of(20), params)
    run_to_end(core)
    lengths = set()
    for index in range(5):
        expected = reference_tokens(prompt_of(20), params, seed=5 + index)
        assert request.handle.tokens(index) == expected
        lengths.add(len(expected))
    assert len(lengths) > 1
    assert_empty(core)


@pytest.mark.parametrize("max_running", [1, 8])
@pytest.mark.parametrize("index", range(3))
def test_one_continuation_is_aborted_at_every_moment(index, max_running):
    """Also before its prompt is computed, from which the others start: they go on unchanged."""
    params = SamplingParams(max_new_tokens=4, seed=11, n=3, ignore_eos=True)
    expected = [reference_tokens(prompt_of(20), params, seed=11 + i) for i in range(3)]
    settings = {"chunked_prefill_size": 8, "max_running_requests": max_running}
    for moment in (0, 1, 2, 3, 4, 6):
        core = history_core(**settings)
        request = add_request(core, 1, prompt_of(20), params)
        for _ in range(moment):
            core.step()
        core.abort("r1", index)
        run_to_end(core)
        for i in range(3):
            found, end = request.handle.tokens(i), request.handle.reasons()[i]
            assert end == "length" if i != index else end in ("abort", "length"), (moment, i)
            assert found == expected[i][: len(found) if end == "abort" else None], (moment, i)
        assert_empty(core)


class _Forgetful(HistoryModel):
    """Claims that the window is one shorter: what an oracle of ours must notice."""

    def _hashes(self, host, row, tokens):
        hashes = super()._hashes(host, row, tokens)
        hashes[:, 1] = hashes[:, 1] * 0
        return hashes


def test_the_oracle_can_fail():
    core = history_core(model=_Forgetful())
    request = add_request(core, 1, prompt_of(30), GREEDY)
    run_to_end(core)
    assert request.handle.tokens() != reference_tokens(prompt_of(30), GREEDY)


def test_the_model_notices_a_lost_ring_slot():
    core = history_core()
    request = add_request(core, 1, prompt_of(30), GREEDY)
    core.step()
    for storage in core.scheduler.rings.storage:
        storage[:, request.sequences[0].slot] = 0
    run_to_end(core)
    assert request.handle.reasons() == {0: "error"}
    assert_empty(core)


def test_the_model_notices_a_wrong_page():
    core = history_core()
    request = add_request(core, 1, prompt_of(40), GREEDY)
    core.step()
    slot = request.sequences[0].slot
    runner = core.executor.decode
    table = core.scheduler.pools[0].table if runner is None else runner.tables.tensors[0]
    table[slot, [0, 1]] = table[slot, [1, 0]]
    run_to_end(core)
    assert request.handle.reasons() == {0: "error"}
