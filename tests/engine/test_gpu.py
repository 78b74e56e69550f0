"""The engine on a GPU (graphs, kernels, one step ahead) gives what the CPU reference gives."""

from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named, arch_of_device
from tests.engine.tiny import tiny_config

pytestmark = pytest.mark.gpu

GPU, CPU = torch.device("cuda"), torch.device("cpu")
PATTERNS = ((True, True, False), (False, True), (True, False, True, False), (True,), (False,))
SAMPLED = (
    {"max_new_tokens": 24, "temperature": 0},
    {"max_new_tokens": 24, "sampling_seed": 3, "n": 2},
    {"max_new_tokens": 24, "sampling_seed": 4, "top_p": 0.9, "frequency_penalty": 0.5},
    {"max_new_tokens": 24, "sampling_seed": 5, "top_k": 9, "logit_bias": {3: 2.0}},
)


def engine_on(device, *, pattern=PATTERNS[0], seed=3, **args) -> Engine:
    config = tiny_config(layer_is_local=pattern)
    arch = arch_named("cpu") if device == CPU else arch_of_device(device)
    ops = resolve_ops(config, arch, dtype="float32")
    weights = allocate(config, dtype=torch.float32, device=device)
    fill_dummy(config, weights, seed=seed)
    parts = EngineParts(
        config=config,
        model=InklingModel(config, weights, ops),
        tokenizer=None,
        dtype=torch.float32,
        device=device,
    )
    settings = {"page_size": 16, "chunked_prefill_size": 9, "max_running_requests": 8}
    settings |= {"max_total_tokens": 800, "check_invariants": True, **args}
    return Engine(EngineArgs(model_path="tiny", skip_tokenizer_init=True, **settings), parts=parts)


def prompts_of(count, salt=0):
    return [[(13 * i + 5 * r + 29 * salt) % 150 for i in range(3 + 7 * r)] for r in range(count)]


def outputs(engine, prompts, params):
    return [
        r["output_ids"] for r in flat(engine.generate(input_ids=prompts, sampling_params=params))
    ]


def flat(results):
    return [x for r in results for x in (r if isinstance(r, list) else [r])]


@pytest.mark.parametrize("seed", range(20))
def test_greedy_tokens_of_twenty_models(seed):
    """Requests of different lengths end at different steps: the batch grows and shrinks."""
    pattern = PATTERNS[seed % len(PATTERNS)]
    params = [{"max_new_tokens": 4 + 5 * r, "temperature": 0} for r in range(6)]
    with engine_on(CPU, pattern=pattern, seed=seed) as engine:
        wanted = outputs(engine, prompts_of(6, seed), params)
    with engine_on(GPU, pattern=pattern, seed=seed) as engine:
        assert engine._core.executor.decode is not None, "decode was not captured"
        assert outputs(engine, prompts_of(6, seed), params) == wanted


def test_sampled_tokens_and_prompt_logits():
    prompts, params = prompts_of(8), list(SAMPLED) * 2
    with engine_on(CPU) as engine:
        wanted = outputs(engine, prompts, params)
        logits = engine.prompt_logits(prompts[-1])
    with engine_on(GPU) as engine:
        assert outputs(engine, prompts, params) == wanted
        error = (engine.prompt_logits(prompts[-1]) - logits).abs().max() / logits.abs().max()
    assert error < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_cuda_graph": True},
        {"disable_overlap_schedule": True},
        {"cuda_graph_bs": (3, 8)},
        {"max_total_tokens": 80, "page_size": 1},
        {"chunked_prefill_size": 3, "cuda_graph_max_bs": 2},
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_change_nothing(settings):
    """Kernel by kernel, one step at a time, padded buckets, preempted in flight, batches beyond the
    largest graph."""
    prompts, params = prompts_of(5), {"max_new_tokens": 20, "temperature": 0}
    with engine_on(CPU) as engine:
        wanted = outputs(engine, prompts, params)
    with engine_on(GPU, **settings) as engine:
        assert outputs(engine, prompts, params) == wanted
        assert (engine.stats().preemptions > 0) == (settings.get("max_total_tokens") == 80)


def test_runs_are_bitwise_reproducible():
    """Log probabilities to the last bit: split-KV, atomics and replays included."""
    prompts = prompts_of(6)
    asked = {"max_new_tokens": 40, "temperature": 0}
    runs = []
    with engine_on(GPU) as engine:
        for _ in range(3):
            results = engine.generate(
                input_ids=prompts, sampling_params=asked, return_logprob=True, top_logprobs_num=3
            )
            runs.append([r["meta_info"]["output_token_logprobs"] for r in results])
    assert runs[0] == runs[1] == runs[2]


def test_aborts_in_flight_leave_nothing_behind():
    with engine_on(GPU) as engine:
        from inkling_rocm.engine import SamplingParams

        params = SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)
        for prompt in prompts_of(3):
            handle = engine.submit(prompt, replace(params))
            for count, _ in enumerate(handle):
                if count == 5:
                    handle.abort()
        assert engine.drain(30)
        stats = engine.stats()
        assert stats.pages_used == {"global": 0, "window": 0}
        assert stats.conv_slots_used == 0
