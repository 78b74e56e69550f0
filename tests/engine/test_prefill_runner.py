"""Small prompt steps from padded buckets give what steps laid out afresh give. On a CPU without
graphs; tests/engine/test_gpu.py has them with."""

from dataclasses import replace

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.buckets import captured_prompts
from inkling_rocm.engine.prefill_runner import PrefillRunner
from tests.engine.tiny import tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
SIZES = (3, 16, 33)


def prompts_of(lengths, salt=0):
    return [[(13 * i + 5 * r + 29 * salt) % 150 for i in range(n)] for r, n in enumerate(lengths)]


def with_runner(engine, **settings):
    """An engine whose small prompt steps run from buckets, and the sizes of those that did."""
    local, taken = engine._core.executor, []
    settings = {"tokens": SIZES, "max_rows": 8, "max_kv": 512, "short_row": 1, **settings}
    runner = PrefillRunner(local.model, local.host, **settings)
    run = runner.run
    runner.run = lambda step: taken.append(len(step.token_ids)) or run(step)
    local.prefill = runner
    return taken


def tokens_of(engine, prompts, params=GREEDY):
    handles = [engine.submit(prompt, params) for prompt in prompts]
    found = []
    for handle in handles:
        updates = list(handle)
        assert all(u.error is None for u in updates), [u.error for u in updates]
        found.append([token for u in updates for token in u.token_ids])
    return found


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [7, 33])
def test_tokens_and_logits_of_steps_laid_out_afresh(page_size, chunk):
    """Prompts around the bucket sizes, in chunks beside decoding rows, then with prefix hits, whose
    snapshots prompt steps have kept."""
    prompts = prompts_of((1, 2, 3, 4, 15, 16, 17, 32, 33, 34, 90))
    settings = {"page_size": page_size, "chunked_prefill_size": chunk}
    with tiny_engine(**settings) as engine:
        wanted = tokens_of(engine, prompts)
        logits = engine.prompt_logits(prompts[-1])
    with tiny_engine(**settings) as engine:
        taken = with_runner(engine)
        assert tokens_of(engine, prompts) == wanted
        longer = [[*prompt, 5, 6, 7] for prompt in prompts]
        again = tokens_of(engine, longer)
        assert engine.stats().prefix_cache.hit_tokens > 0
        error = (engine.prompt_logits(prompts[-1]) - logits).abs().max() / logits.abs().max()
        assert error < 1e-5
    assert len(set(taken)) > 4
    assert max(taken) <= SIZES[-1]
    with tiny_engine(disable_radix_cache=True, **settings) as engine:
        assert tokens_of(engine, longer) == again


def test_lost_snapshots_are_noticed():
    """Rings that were not kept show in what a prefix hit computes from them."""
    prompts = prompts_of((40, 50, 90))
    found = []
    for lost in (False, True):
        with tiny_engine(chunked_prefill_size=33) as engine:
            with_runner(engine)
            runner = engine._core.executor.prefill
            run = runner.run
            runner.run = lambda step: run(replace(step, snapshots=None) if lost else step)  # noqa: B023
            logprobs = []
            for prompt in prompts:
                tokens_of(engine, [prompt])
                (update,) = engine.submit(
                    [*prompt, 5, 6, 7], replace(GREEDY, max_new_tokens=1), logprobs=20, stream=False
                )
                assert update.cached_tokens > 0
                logprobs.append(dict(update.logprobs[0].top))
            found.append(logprobs)
    differences = [
        abs(kept[token] - changed[token])
        for kept, changed in zip(*found, strict=True)
        for token in kept.keys() & changed.keys()
    ]
    assert max(differences) > 1e-3


def test_what_it_takes():
    """Not steps of short rows only, which are verified, and not larger ones."""
    with tiny_engine(chunked_prefill_size=40) as engine:
        taken = with_runner(engine, tokens=(32,), short_row=16)
        for length in (16, 17, 33, 32):
            tokens_of(engine, prompts_of((length,), salt=length))
    assert taken == [17, 32]


def test_padding_changes_no_state():
    """Pages and rings are, bit for bit, what the step alone leaves."""
    states = []
    for wide in (False, True):
        with tiny_engine(max_running_requests=2, disable_radix_cache=True) as engine:
            with_runner(engine, tokens=(24,) if not wide else (60,))
            tokens_of(engine, prompts_of((24,)), replace(GREEDY, max_new_tokens=1))
            host = engine._core.executor.host
            states.append([*(p.storage.clone() for p in host.pools), *host.rings.storage])
    for exact, padded in zip(*states, strict=True):
        assert exact.abs().sum() > 0
        torch.testing.assert_close(padded, exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(padded == 0, exact == 0)


def test_captured_sizes():
    def sizes(chunk=8192, **args):
        return captured_prompts(EngineArgs(model_path="x", **args), chunk=chunk, max_running=4)

    assert sizes() == (32, 64, 128, 256, 512, 1024)
    assert sizes(cuda_graph_max_bs_prefill=100) == (32, 64, 100)
    assert sizes(cuda_graph_max_bs_prefill=24) == (24,)
    assert sizes(cuda_graph_max_bs_prefill=3000) == (32, 64, 128, 256, 512, 1024, 2048, 3000)
    assert sizes(chunk=600, cuda_graph_max_bs_prefill=3000)[-2:] == (512, 604)
    assert sizes(chunk=100) == (32, 64, 104)
    assert sizes(chunk=16) == ()
    assert sizes(cuda_graph_max_bs_prefill=16) == ()
    assert sizes(disable_prefill_cuda_graph=True) == ()
    assert sizes(speculative_algorithm="EAGLE") == ()
    with pytest.raises(ValueError, match="cuda_graph_max_bs_prefill 0"):
        sizes(cuda_graph_max_bs_prefill=0)
