"""Steps from fixed buffers on emulated AMD code (metadata kernel, layer kernels, padding, one step
step ahead) give the tokens of the CPU reference."""

import pytest
import torch

pytest.importorskip("triton")

from functools import partial

from gcn_emulator.triton_driver import emulate
from inkling_rocm.engine import NoMetrics, SamplingParams, decode_runner
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.decode_runner import DecodeRunner
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.engine.prefill_runner import PrefillRunner
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.token_sampler import TorchSampler
from inkling_rocm.kernels.metadata import decode_metadata
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named
from tests.engine.history_model import add_request, assert_empty, run_to_end
from tests.engine.tiny import VOCAB, greedy_tokens, tiny_config, tiny_model

CPU = torch.device("cpu")


def emulated_core(arch: str) -> EngineCore:
    config = tiny_config(layer_is_local=(True, False))
    text = config.text
    args = EngineArgs(model_path="x", page_size=16, max_running_requests=3, max_total_tokens=96)
    plan = plan_memory(text, args, dtype=torch.float32, device=CPU)
    pools, rings = build_pools(text, plan, dtype=torch.float32, device=CPU)
    host = EmbeddedHost(
        text, pools, rings, max_tokens=plan.chunk_tokens + 3, max_rows=3, device=CPU, check=True
    )
    ops = resolve_ops(config, arch_named(arch), dtype="float32")
    model = InklingModel(config, dict(tiny_model(config).weights), ops)
    draws = TorchSampler().for_rounds(rejection=False)
    decode = DecodeRunner(model, host, draws, buckets=(1, 3), max_kv=plan.context_length)
    prefill = PrefillRunner(model, host, tokens=(26,), max_rows=3, max_kv=plan.context_length)
    executor = LocalExecutor(
        model,
        host,
        TorchSampler(),
        vocabulary=VOCAB,
        runs_ahead=True,
        decode=decode,
        prefill=prefill,
    )
    scheduler = Scheduler(pools, rings, chunk_tokens=plan.chunk_tokens, max_running=3)
    return EngineCore(executor, scheduler, NoMetrics())


def test_tokens_of_the_reference(monkeypatch):
    """Two prompts in a bucket of 26 tokens, two rows in one of three, then one in one of one."""
    derive = partial(decode_metadata, arch="gfx942")
    monkeypatch.setattr(decode_runner, "_derive", lambda device: derive)
    prompts = [[3, 1, 4, 1, 5], [9 + i for i in range(18)]]
    with emulate("gfx942"):
        core = emulated_core("gfx942")
        requests = [
            add_request(core, i + 1, prompt, SamplingParams(max_new_tokens=n, temperature=0.0))
            for i, (prompt, n) in enumerate(zip(prompts, (3, 5), strict=True))
        ]
        run_to_end(core)
    assert core.executor.prefill._made, "the prompts were laid out afresh"
    config = tiny_config(layer_is_local=(True, False))
    for request, prompt, n in zip(requests, prompts, (3, 5), strict=True):
        assert request.handle.tokens() == greedy_tokens(prompt, n, config)
    assert_empty(core)
