"""Rounds captured as graphs on a GPU: tokens of the CPU reference, no synchronisation inside.
Written without one at hand: these tests have not run yet."""

import pytest
import torch

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.model import DraftBlocks, InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named, arch_of_device
from tests.engine.test_gpu import outputs, prompts_of
from tests.engine.tiny import tiny_mtp_config

pytestmark = pytest.mark.gpu

GPU, CPU = torch.device("cuda"), torch.device("cpu")
PARAMS = [
    {"max_new_tokens": 40, "temperature": 0},
    {"max_new_tokens": 24, "sampling_seed": 3, "n": 2},
    {"max_new_tokens": 30, "sampling_seed": 5, "top_k": 9},
] * 2


def engine_on(device, steps, **args) -> Engine:
    config = tiny_mtp_config()
    arch = arch_named("cpu") if device == CPU else arch_of_device(device)
    weights = allocate(config, dtype=torch.float32, device=device, parts=("text", "mtp"))
    fill_dummy(config, weights, seed=3)
    model = InklingModel(config, weights, resolve_ops(config, arch, dtype="float32"))
    parts = EngineParts(
        config=config,
        model=model,
        tokenizer=None,
        dtype=torch.float32,
        device=device,
        drafts=DraftBlocks(model, weights, steps) if steps else None,
    )
    settings = {"page_size": 16, "max_running_requests": 8, "max_total_tokens": 800}
    settings |= {"speculative_algorithm": "EAGLE" if steps else None}
    settings |= {"speculative_num_steps": steps or None, **args}
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


@pytest.fixture(scope="module")
def wanted():
    with engine_on(CPU, 0) as engine:
        return outputs(engine, prompts_of(6), PARAMS)


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize(
    "args", [{}, {"max_total_tokens": 160, "page_size": 1}, {"cuda_graph_bs": (3, 8)}], ids=str
)
def test_tokens_of_the_reference(wanted, steps, args):
    with engine_on(GPU, steps, **args) as engine:
        rounds = counted(engine)
        assert outputs(engine, prompts_of(6), PARAMS) == wanted
        assert len(rounds) > 3


def test_invariants_hold(wanted):
    with engine_on(GPU, 3, check_invariants=True) as engine:
        assert engine._core.executor.rounds is not None
        assert outputs(engine, prompts_of(6), PARAMS) == wanted


def test_a_graph_for_every_step_of_a_round(wanted):
    with engine_on(GPU, 3) as engine:
        with torch.inference_mode():
            engine._core.executor.rounds.capture(one_graph=False)
        rounds = counted(engine)
        assert outputs(engine, prompts_of(6), PARAMS) == wanted
        assert len(rounds) > 3


@pytest.mark.parametrize(
    "args",
    [
        {"speculative_use_rejection_sampling": True},
        {"speculative_simulate_acceptance": 0.7},
        {"speculative_adaptive": True},
    ],
    ids=str,
)
def test_other_modes_run_to_the_end(args):
    with engine_on(GPU, 4, **args) as engine:
        rounds = counted(engine)
        lengths = [len(tokens) for tokens in outputs(engine, prompts_of(6), PARAMS)]
        assert max(lengths) == 40
        assert len(rounds) > 3
