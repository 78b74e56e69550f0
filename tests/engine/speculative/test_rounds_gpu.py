"""Rounds captured as graphs on a GPU: tokens of decoding without speculation on a CPU, no
synchronisation inside."""

import pytest
import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.model import DraftBlocks, InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named, arch_of_device
from tests.engine.prefix_cache.test_speculation import SALTS, converse
from tests.engine.prefix_cache.test_speculation import prompt_of as prompt_of_turn
from tests.engine.speculative.known_texts import KnownTexts
from tests.engine.test_gpu import prompts_of
from tests.engine.tiny import tiny_mtp_config

pytestmark = pytest.mark.gpu

GPU, CPU = torch.device("cuda"), torch.device("cpu")
CONFIG = tiny_mtp_config()
PROMPTS = prompts_of(6)
PARAMS = [
    SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_new_tokens=24, seed=3, n=2, ignore_eos=True),
    SamplingParams(max_new_tokens=30, seed=5, top_k=9, ignore_eos=True),
] * 2
LITTLE = {"max_total_tokens": 140, "page_size": 1}


def engine_on(device, steps, **args) -> Engine:
    arch = arch_named("cpu") if device == CPU else arch_of_device(device)
    weights = allocate(CONFIG, dtype=torch.float32, device=device, parts=("text", "mtp"))
    fill_dummy(CONFIG, weights, seed=3)
    model = InklingModel(CONFIG, weights, resolve_ops(CONFIG, arch, dtype="float32"))
    parts = EngineParts(
        config=CONFIG,
        model=model,
        tokenizer=None,
        dtype=torch.float32,
        device=device,
        drafts=DraftBlocks(model, weights, steps) if steps else None,
    )
    settings = {"page_size": 16, "max_running_requests": 8, "max_total_tokens": 800}
    settings |= {"speculative_algorithm": "EAGLE" if steps else None}
    settings |= {"speculative_num_steps": steps or None, "cuda_graph_bs": (1, 3, 8), **args}
    return Engine(EngineArgs(model_path="tiny", skip_tokenizer_init=True, **settings), parts=parts)


def counted(engine):
    """Counts rounds, in which any synchronising call raises."""
    runner, rounds = engine._core.executor.rounds, []
    assert runner is not None, "rounds were not captured"
    run = runner.run

    def running(step):
        rounds.append(len(step.slots))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.run = running
    return rounds


def tokens_of(handle):
    """Tokens of each continuation of a request."""
    found = {}
    for update in handle:
        assert update.error is None, update.error
        found.setdefault(update.index, []).extend(update.token_ids)
    return [found[index] for index in sorted(found)]


def answers(engine, prompts=PROMPTS, params=PARAMS):
    """All submitted at once."""
    asked = zip(prompts, params, strict=True)
    handles = [engine.submit(prompt, some) for prompt, some in asked]
    return [tokens_of(handle) for handle in handles]


def texts_of(prompts, found):
    """As KnownTexts takes them."""
    return {
        (tuple(prompt), index): [*prompt, *tokens]
        for prompt, outputs in zip(prompts, found, strict=True)
        for index, tokens in enumerate(outputs)
    }


@pytest.fixture(scope="module")
def wanted():
    with engine_on(CPU, 0) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def conversations():
    """Answers of `converse`, and its texts."""
    with engine_on(CPU, 0, disable_radix_cache=True) as engine:
        found = converse(engine, SALTS)[0]
    texts, left = {}, iter(found)
    for salt in SALTS:
        text = prompt_of_turn(20 + salt, salt % 2)
        for turn in range(3):
            texts[tuple(text), 0] = whole = text + next(left)
            text = whole + prompt_of_turn(5, turn + salt)
    return found, texts


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize(
    "args",
    [
        {},
        LITTLE,
        {"cuda_graph_bs": (2, 5)},
        {"chunked_prefill_size": 5},
        {"disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_tokens_without_speculation(wanted, steps, args):
    """In batches of several buckets and beyond the largest, prompt chunks between rounds,
    preemption in flight."""
    with engine_on(GPU, steps, **args) as engine:
        rounds = counted(engine)
        known = KnownTexts(engine, texts_of(PROMPTS, wanted), 0.6)
        assert answers(engine) == wanted
        assert len(rounds) > 3
        assert known.accepted() > 10
        assert (engine.stats().preemptions > 0) == (args is LITTLE)
        assert not any(engine.stats().pages_used.values())


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_the_blocks_own_drafts_and_joining_prompts(wanted, steps):
    """Requests come one by one while others decode: rounds and prompt steps take turns."""
    with engine_on(GPU, steps) as engine:
        rounds = counted(engine)
        asked = zip(PROMPTS, PARAMS, strict=True)
        handles, first = [], []
        for prompt, params in asked:
            handles.append(engine.submit(prompt, params))
            first.append(next(iter(handles[-1])))
        for handle, update, want in zip(handles, first, wanted, strict=True):
            found = tokens_of(handle)
            found[update.index] = [*update.token_ids, *found[update.index]]
            assert found == want
        assert len(rounds) > 3


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("args", [{}, {"chunked_prefill_size": 25}], ids=str)
def test_prefix_hits_on_what_a_verification_has_written(conversations, steps, args):
    """And every depth's draft logits are those of a fresh run on a CPU."""
    plain, texts = conversations
    with engine_on(GPU, steps, speculative_use_rejection_sampling=True, **args) as engine:
        known = KnownTexts(engine, texts, 0.6, compare=CONFIG)
        found, cached = converse(engine, SALTS)
        assert found == plain
        assert known.accepted() > 20
    assert all(tokens >= 16 for tokens in cached[1::3])
    assert max(cached[1::3]) >= 32
    assert min(cached[2::3]) >= 48
    assert len(known.errors) > 20
    assert max(known.errors) < 2e-3


def test_the_comparison_can_fail(conversations):
    """A fresh run whose draft blocks read the hidden states of a position before."""
    plain, texts = conversations
    with engine_on(GPU, 2, speculative_use_rejection_sampling=True) as engine:
        known = KnownTexts(engine, texts, 0.6, compare=CONFIG, roll=1)
        assert converse(engine, SALTS)[0] == plain
    assert min(known.errors) > 1e-2


def test_hits_in_host_memory_and_on_disk(conversations, tmp_path):
    """What was given up comes back from pinned memory, and after a restart from files."""
    plain, texts = conversations
    tiers = {
        "enable_hierarchical_cache": True, "hicache_size": 0.01, "load_format": "dummy",
        "hicache_storage_backend": "file", "hicache_storage_dir": str(tmp_path),
    }  # fmt: skip
    for restarted in (False, True):
        with engine_on(GPU, 2, prefix_snapshots=3, **tiers) as engine:
            known = KnownTexts(engine, texts, 0.6)
            for _ in range(2):
                assert converse(engine, SALTS)[0] == plain
            stats = engine.stats().prefix_cache.tiers
            assert stats.loads > 0
            assert stats.failed_loads == 0
            assert not restarted or stats.disk.hits > 0
            assert known.accepted() > 20


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("args", [{}, LITTLE], ids=str)
def test_aborts_leave_the_others_alone(wanted, steps, args):
    """While rounds run ahead; slots and pages go to requests that wait."""
    with engine_on(GPU, steps, **{**args, "max_running_requests": 4}) as engine:
        KnownTexts(engine, texts_of(PROMPTS, wanted), 0.6)
        for kept in (slice(0, None, 2), slice(1, None, 2)):
            handles = [engine.submit(p, some) for p, some in zip(PROMPTS, PARAMS, strict=True)]
            for number, handle in enumerate(handles):
                if handle not in handles[kept]:
                    for count, _ in enumerate(handle):
                        if count == number:
                            handle.abort()
            assert [tokens_of(handle) for handle in handles[kept]] == wanted[kept]
        assert engine.drain(30)
        assert not any(engine.stats().pages_used.values())
        assert engine.stats().conv_slots_used == 0


def test_invariants_hold(wanted):
    with engine_on(GPU, 3, check_invariants=True) as engine:
        KnownTexts(engine, texts_of(PROMPTS, wanted), 0.6)
        assert answers(engine) == wanted


@pytest.mark.parametrize("args", [{}, LITTLE], ids=str)
def test_a_graph_for_every_step_of_a_round(wanted, args):
    with engine_on(GPU, 3, **args) as engine:
        with torch.inference_mode():
            engine._core.executor.rounds.capture(one_graph=False)
        rounds = counted(engine)
        KnownTexts(engine, texts_of(PROMPTS, wanted), 0.6)
        assert answers(engine) == wanted
        assert len(rounds) > 3


def test_launched_kernel_by_kernel(wanted):
    with engine_on(GPU, 3, disable_cuda_graph=True) as engine:
        assert engine._core.executor.rounds is None
        assert answers(engine) == wanted


@pytest.mark.parametrize("steps", [2, 8])
def test_a_changing_number_of_drafts(wanted, steps):
    with engine_on(GPU, steps, speculative_adaptive=True) as engine:
        rounds = counted(engine)
        KnownTexts(engine, texts_of(PROMPTS, wanted), 0.6)
        numbers = [1, steps, 1, 1, steps // 2, steps] * 20
        engine._core.speculation.choose = lambda batch: numbers.pop() if numbers else steps
        assert answers(engine) == wanted
        assert len(rounds) > 3


@pytest.mark.parametrize(
    "args",
    [{"speculative_use_rejection_sampling": True}, {"speculative_simulate_acceptance": 0.7}],
    ids=str,
)
def test_other_modes_run_to_the_end(args):
    with engine_on(GPU, 4, **args) as engine:
        rounds = counted(engine)
        lengths = [len(tokens) for outputs in answers(engine) for tokens in outputs]
        assert lengths == [40, 24, 24, 30] * 2
        assert len(rounds) > 3
