"""The engine on a GPU gives what it gives on the CPU."""

import pytest
import torch

from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_of_device
from tests.engine.tiny import tiny_config, tiny_engine, tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu_engine():
    device = torch.device("cuda")
    config = tiny_config()
    weights = {name: w.to(device) for name, w in tiny_model(config).weights.items()}
    ops = resolve_ops(config, arch_of_device(device), dtype="float32", attention_backend="torch")
    parts = EngineParts(
        config=config,
        model=InklingModel(config, weights, ops),
        tokenizer=None,
        dtype=torch.float32,
        device=device,
    )
    args = EngineArgs(
        model_path="tiny",
        skip_tokenizer_init=True,
        page_size=16,
        chunked_prefill_size=9,
        max_running_requests=8,
        max_total_tokens=400,
        check_invariants=True,
    )
    with Engine(args, parts=parts) as engine:
        yield engine


def test_tokens_and_logits_of_the_cpu(gpu_engine):
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [[(13 * i + 5 * r) % 150 for i in range(7 + 8 * r)] for r in range(8)]
    params = [
        {"max_new_tokens": 24, "temperature": 0},
        {"max_new_tokens": 24, "sampling_seed": 3, "n": 2},
        {"max_new_tokens": 24, "sampling_seed": 4, "top_p": 0.9, "frequency_penalty": 0.5},
        {"max_new_tokens": 24, "sampling_seed": 5, "top_k": 9, "logit_bias": {3: 2.0}},
    ] * 2
    with tiny_engine() as cpu_engine:
        wanted = cpu_engine.generate(input_ids=prompts, sampling_params=params)
        logits = cpu_engine.prompt_logits(prompts[-1])
    found = gpu_engine.generate(input_ids=prompts, sampling_params=params)
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in wanted]
    error = (gpu_engine.prompt_logits(prompts[-1]) - logits).abs().max() / logits.abs().max()
    assert error < 1e-4
