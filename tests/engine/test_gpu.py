"""The engine on a GPU (graphs, kernels, one step ahead) gives what the CPU reference gives."""

import random
from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
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


def engine_on(
    device, *, pattern=PATTERNS[0], seed=3, dtype=torch.float32, weights_in=None, **args
) -> Engine:
    """An engine over a tiny model; weights_in: a narrower dtype whose values its weights have."""
    config = tiny_config(layer_is_local=pattern)
    arch = arch_named("cpu") if device == CPU else arch_of_device(device)
    ops = resolve_ops(config, arch, dtype=str(dtype).removeprefix("torch."))
    weights = allocate(config, dtype=weights_in or dtype, device=device)
    fill_dummy(config, weights, seed=seed)
    if weights_in is not None:
        kept = allocate(config, dtype=dtype, device="meta")
        weights = {name: w.to(kept[name].dtype) for name, w in weights.items()}
    parts = EngineParts(
        config=config,
        model=InklingModel(config, weights, ops),
        tokenizer=None,
        dtype=dtype,
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
        {"check_invariants": False},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 3, "cuda_graph_max_bs": 2},
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_change_nothing(settings):
    """Kernel by kernel, one step at a time, padded buckets, preempted in flight, never waiting for
    the device, every prompt whole, batches beyond the largest graph."""
    prompts, params = prompts_of(5), {"max_new_tokens": 20, "temperature": 0}
    with engine_on(CPU) as engine:
        wanted = outputs(engine, prompts, params)
    with engine_on(GPU, **settings) as engine:
        assert outputs(engine, prompts, params) == wanted
        assert (engine.stats().preemptions > 0) == (settings.get("max_total_tokens") == 80)


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(seed):
    """Prompts and outputs of all lengths, drawn and greedy, several continuations, too few pages:
    chunks, batches, padding, preemptions and prefix hits fall as they may."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(150) for _ in range(draw.randint(1, 60))] for _ in range(48)]
    prompts += [[*prompt, 7, 8] for prompt in draw.sample(prompts, 12)]
    params = [
        {
            "max_new_tokens": draw.randint(1, 40),
            "temperature": draw.choice((0.0, 0.0, 1.0)),
            "sampling_seed": draw.randrange(1000),
            "n": draw.choice((1, 1, 1, 2)),
        }
        for _ in prompts
    ]
    settings = {"max_total_tokens": 192, "chunked_prefill_size": draw.choice((5, 16, 40))}
    settings |= {"page_size": draw.choice((1, 16)), "check_invariants": False}
    with engine_on(CPU, seed=seed, **settings) as engine:
        wanted = outputs(engine, prompts, params)
    with engine_on(GPU, seed=seed, **settings) as engine:
        assert outputs(engine, prompts, params) == wanted


def test_runs_are_bitwise_reproducible():
    """Log probabilities to the last bit: split-KV, atomics and replays included, while requests end
    one after the other and new ones take their place."""
    runs = []
    # Without checks steps are not waited for; without cached prefixes all runs compute the same.
    with engine_on(GPU, check_invariants=False, disable_radix_cache=True) as engine:
        for _ in range(3):
            with engine._thread.changed:  # all are there before the first step
                handles = [
                    engine.submit(
                        prompt,
                        SamplingParams(max_new_tokens=6 + 9 * (r % 5), temperature=0.0),
                        logprobs=3,
                        stream=False,
                    )
                    for r, prompt in enumerate(prompts_of(12))
                ]
            runs.append([(update.token_ids, update.logprobs) for h in handles for update in h])
    assert len(runs[0]) == 12
    assert runs[0] == runs[1] == runs[2]


def test_bf16_errs_like_bf16_on_a_cpu():
    """Against fp32 on the same weights. Medians over tokens: the two route a few differently."""
    prompt = [(13 * i + 5) % 150 for i in range(100)]

    def logits(device, **settings):
        with engine_on(device, chunked_prefill_size=33, **settings) as engine:
            return engine.prompt_logits(prompt)

    exact = logits(CPU, weights_in=torch.bfloat16)

    def error(found):
        return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).median())

    eager = error(logits(CPU, dtype=torch.bfloat16))
    assert 1e-4 < eager < 0.1
    assert error(logits(GPU, dtype=torch.bfloat16)) < 2 * eager + 2.0**-9


def test_an_engine_from_arguments(small_config_path):
    """Loading included: one dense layer of Inkling-Small, as graphs and kernel by kernel."""
    found = []
    for disable in (False, True):
        engine = Engine(
            model_path=str(small_config_path),
            load_format="dummy",
            dtype="float32",  # bf16 logits have ties
            json_model_override_args='{"num_hidden_layers": 1}',
            skip_tokenizer_init=True,
            context_length=512,
            max_running_requests=4,
            max_total_tokens=4096,
            disable_cuda_graph=disable,
        )
        with engine:
            assert (engine._core.executor.decode is None) == disable
            params = {"max_new_tokens": 20, "temperature": 0}
            found.append(outputs(engine, [[5 + r] * (30 + r) for r in range(4)], params))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_greedy_token_is_the_most_likely_of_its_log_probabilities(dtype):
    """Five rows run in a bucket of eight; both are of the logits of all eight."""
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    with engine_on(GPU, dtype=dtype) as engine:
        handles = [engine.submit(prompt, params, logprobs=1) for prompt in prompts_of(5)]
        for handle in handles:
            found = [entry for update in handle for entry in update.logprobs]
            assert len(found) == 30
            assert [entry.logprob for entry in found] == [entry.top[0][1] for entry in found]


def test_aborts_in_flight_leave_nothing_behind():
    with engine_on(GPU) as engine:
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
