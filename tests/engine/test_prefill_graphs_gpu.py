"""Small prompt steps replayed from graphs on a GPU give what the CPU reference gives."""

import pytest
import torch

from inkling_rocm.engine import Engine, EngineArgs
from tests.engine.test_gpu import CPU, GPU, SAMPLED, engine_on, outputs

pytestmark = pytest.mark.gpu

PROMPTS = [
    [(13 * i + 5 * r) % 150 for i in range(n)] for r, n in enumerate((60, 17, 3, 33, 48, 90))
]
GREEDY = {"max_new_tokens": 12, "temperature": 0}


def engine_with(device, **args):
    settings = {"chunked_prefill_size": 50, "cuda_graph_bs": (2, 8), "max_total_tokens": 1600}
    return engine_on(device, **{**settings, **args})


def replays(engine, *, strict=False):
    """Sizes of the steps that run from graphs; strict: in which any synchronising call raises."""
    runner, taken = engine._core.executor.prefill, []
    assert runner is not None, "prompt steps were not captured"
    assert len(runner.graphs) == len(runner.buckets)
    run = runner.run

    def counted(step):
        taken.append(len(step.token_ids))
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            return run(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.run = counted
    return taken


@pytest.fixture(scope="module")
def wanted():
    params = [GREEDY, *SAMPLED, GREEDY]
    longer = [[*prompt, 5, 6, 7] for prompt in PROMPTS]
    with engine_with(CPU, disable_radix_cache=True) as engine:
        tokens = outputs(engine, PROMPTS, params), outputs(engine, longer, params)
        return params, longer, tokens, engine.prompt_logits(PROMPTS[-1])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 1, "max_total_tokens": 180},
        {"chunked_prefill_size": 33, "page_size": 64},
        {"cuda_graph_max_bs_prefill": 53, "disable_overlap_schedule": True},
        {"check_invariants": False},
    ],
    ids=str,
)
def test_tokens_of_the_reference(wanted, settings):
    """Chunks beside decoding rows, padded, preempted, then with prefix hits from snapshots that
    such steps have kept."""
    params, longer, tokens, logits = wanted
    with engine_with(GPU, **settings) as engine:
        taken = replays(engine, strict=settings.get("check_invariants") is False)
        assert outputs(engine, PROMPTS, params) == tokens[0]
        assert outputs(engine, longer, params) == tokens[1]
        assert engine.stats().prefix_cache.hit_tokens > 0
        error = (engine.prompt_logits(PROMPTS[-1]) - logits).abs().max() / logits.abs().max()
    assert error < 1e-4
    assert len(taken) > 3


def test_other_tokens_of_a_replay_change_nothing():
    """A prompt alone, and among others in buckets of other sizes, over and over: the same log
    probabilities to the last bit wherever it runs in the same bucket."""
    runs = []
    settings = {"check_invariants": False, "disable_radix_cache": True, "max_running_requests": 1}
    with engine_with(GPU, **settings) as engine:
        taken = replays(engine)
        for _ in range(3):
            results = engine.generate(
                input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=3
            )
            runs.append([r["meta_info"]["output_token_logprobs"] for r in results])
    assert runs[0] == runs[1] == runs[2]
    assert len(taken) > 10


def test_bf16_is_as_near_as_kernel_by_kernel():
    errors = []
    with engine_with(CPU, weights_in=torch.bfloat16) as engine:
        exact = engine.prompt_logits(PROMPTS[0])
    for off in (False, True):
        settings = {"dtype": torch.bfloat16, "disable_prefill_cuda_graph": off}
        with engine_with(GPU, **settings) as engine:
            assert (engine._core.executor.prefill is None) == off
            errors.append((engine.prompt_logits(PROMPTS[0]) - exact).norm() / exact.norm())
    graph, eager = errors
    assert graph < 1.5 * eager + 1e-3


def test_real_widths(small_config_path, tmp_path):
    """Logits of a whole prompt in bf16, padded to every bucket, beside those of launched kernels:
    both are as far from a forward in fp32."""
    (tmp_path / "config.json").write_text(small_config_path.read_text())
    args = {"json_model_override_args": '{"num_hidden_layers": 3}', "load_format": "dummy"}
    args |= {"rank_slice": 8, "skip_tokenizer_init": True, "max_total_tokens": 4096}
    args |= {"max_running_requests": 4, "cuda_graph_bs": (1,), "model_path": str(tmp_path)}
    prompts = [[(17 * i + 101 * n) % 5000 + 10 for i in range(n)] for n in (24, 60, 120, 250, 500)]
    with Engine(EngineArgs(dtype="float32", disable_cuda_graph=True, **args)) as engine:
        exact = [engine.prompt_logits(prompt)[-1] for prompt in prompts]
    with Engine(EngineArgs(dtype="bfloat16", **args)) as engine:
        taken = replays(engine)
        graph = [engine.prompt_logits(prompt)[-1] for prompt in prompts]
        assert len(taken) == len(prompts)
        engine._core.executor.prefill = None
        launched = [engine.prompt_logits(prompt)[-1] for prompt in prompts]
    for want, replayed, plain in zip(exact, graph, launched, strict=True):
        errors = [float((got - want).norm() / want.norm()) for got in (replayed, plain)]
        assert errors[0] < 1.2 * errors[1] + 1e-3, errors
