"""A round on emulated AMD code (metadata kernels, layer kernels, verification and drafting kernels,
padded buckets, one round ahead) gives the tokens of the CPU reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.engine import NoMetrics, SamplingParams
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.speculative import round_runner
from inkling_rocm.engine.speculative.mtp import MTPDrafter
from inkling_rocm.engine.speculative.round import Speculation
from inkling_rocm.engine.speculative.round_runner import RoundRunner
from inkling_rocm.engine.speculative.stats import SpeculationStats
from inkling_rocm.engine.token_sampler import DeviceTokenSampler
from inkling_rocm.kernels.round_metadata import draft_metadata, verify_metadata
from inkling_rocm.model import DraftBlocks, InklingModel
from inkling_rocm.model.mtp import text_with_drafts
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named
from tests.engine.history_model import add_request, assert_empty, run_to_end
from tests.engine.tiny import VOCAB, greedy_tokens, tiny_config, tiny_model, tiny_mtp_config

CPU = torch.device("cpu")
CONFIG = replace(tiny_config(layer_is_local=(True, False)), mtp=tiny_mtp_config().mtp)
STEPS, ROWS = 2, 3


def emulated_core(arch: str) -> EngineCore:
    text = text_with_drafts(CONFIG, STEPS)
    args = EngineArgs(
        model_path="x", page_size=16, max_running_requests=ROWS, max_total_tokens=96,
        disable_radix_cache=True,
    )  # fmt: skip
    plan = plan_memory(text, args, dtype=torch.float32, device=CPU, draft_depths=STEPS)
    pools, rings = build_pools(text, plan, dtype=torch.float32, device=CPU)
    tokens = plan.chunk_tokens + ROWS * (1 + plan.draft_tokens)
    host = EmbeddedHost(
        text, pools, rings, max_tokens=tokens, max_rows=ROWS, device=CPU, check=True
    )
    ops = resolve_ops(CONFIG, arch_named(arch), dtype="float32")
    model = InklingModel(CONFIG, dict(tiny_model(CONFIG).weights), ops)
    blocks = DraftBlocks(model, model.weights, STEPS)
    device = DeviceSampler(vocabulary=VOCAB, slots=plan.slots, device=CPU, arch=arch)
    sampler = DeviceTokenSampler(device)
    drafter = MTPDrafter(blocks, host, sampler)
    rounds = RoundRunner(
        blocks, host, drafter, sampler.for_rounds(rejection=False), buckets=(1, ROWS),
        drafts=(STEPS,), max_kv=plan.context_length,
    )  # fmt: skip
    executor = LocalExecutor(
        model, host, sampler, vocabulary=VOCAB, runs_ahead=True,
        speculation=Speculation(drafter, sampler), rounds=rounds,
    )  # fmt: skip
    scheduler = Scheduler(
        pools, rings, chunk_tokens=plan.chunk_tokens, max_running=ROWS, depths=STEPS,
        most_drafts=STEPS,
    )  # fmt: skip
    return EngineCore(executor, scheduler, NoMetrics(), SpeculationStats(STEPS, NoMetrics()))


@pytest.mark.full
def test_tokens_of_the_reference(monkeypatch):
    """Two rows in a bucket of three, then one in a bucket of one."""
    arch = "gfx942"
    kernels = tuple(partial(kernel, arch=arch) for kernel in (verify_metadata, draft_metadata))
    monkeypatch.setattr(round_runner, "_derive", lambda device: kernels)
    prompts = [[3, 1, 4, 1, 5], [9 + i for i in range(18)]]
    with emulate(arch):
        core = emulated_core(arch)
        requests = [
            add_request(core, i + 1, prompt, SamplingParams(max_new_tokens=n, temperature=0.0))
            for i, (prompt, n) in enumerate(zip(prompts, (3, 5), strict=True))
        ]
        steps = run_to_end(core)
    for request, prompt, n in zip(requests, prompts, (3, 5), strict=True):
        assert request.handle.tokens() == greedy_tokens(prompt, n, CONFIG)
    assert steps > 3
    assert core.executor.rounds.length.any(), "rounds have run"
    assert_empty(core)
