"""The whole model with every op on its Triton variant: emulated AMD code, or a GPU, against the CPU
reference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.moe.timing import count_launches
from gcn_emulator.triton_driver import emulate
from inkling_rocm.bench.layer import Case, LayerBench
from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.load import load_parts
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_named, arch_of_device
from tests.parity.conftest import build
from tests.parity.test_transformers import relative_error
from tests.support.plain_host import PlainHost, run_chunks

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "inkling.json"
OURS = ("attention_prologue", "rel_attention", "residual_conv_norm", "rms_norm", "embed")
MOE = ("gate", "experts", "dense_mlp")


def triton_model(pair, arch: str, device="cpu") -> InklingModel:
    ops = resolve_ops(
        pair.config, arch_named(arch), dtype="float32", attention_backend="triton",
        moe_runner_backend="triton",
    )  # fmt: skip
    chosen = {choice.op: choice.variant for choice in ops.choices}
    assert {chosen[op] for op in (*OURS, *MOE)} == {"triton"}
    return InklingModel(pair.config, {n: w.to(device) for n, w in pair.weights.items()}, ops)


def logits(model, config, prompt, chunks) -> torch.Tensor:
    return run_chunks(model, PlainHost(config, num_requests=1, max_len=48), prompt, chunks)


@torch.no_grad()
def compare(pair, arch: str, chunks) -> list[str]:
    """The kernels launched, in order, after the logits have been compared."""
    prompt = pair.prompt[: sum(chunks)]
    want = logits(build(pair.config, pair.weights), pair.config, prompt, chunks)
    with emulate(arch) as driver:
        got = logits(triton_model(pair, arch), pair.config, prompt, chunks)
    assert relative_error(got, want) < 1e-5
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    return [record.name for record in driver.records]


def test_tiny_model_emulated(oracle_pair):
    """Prefill, a short chunk and decode; every kernel takes part."""
    names = compare(oracle_pair("faults"), "gfx942", [20, 3, 1])
    launched = Counter(names)
    layers, forwards = 3, 3
    assert launched["_residual_conv_norm_kernel"] == 2 * layers * forwards
    assert launched["_attention_prologue_kernel"] == layers * forwards
    assert launched["_ring_tail_kernel"] == 3 * layers * 2  # not in decode
    assert launched["_prefill_kernel"] == layers
    assert launched["_decode_kernel"] == 2 * layers
    # A decode step: embedding, first norm, head, and a dense and two MoE layers.
    last = len(names) - names[::-1].index("_embed_kernel") - 1
    decode = Counter(names[last + 2 : -1])
    moe = decode["_router_kernel"] + decode["_select_kernel"]
    assert decode["_linear_vector_kernel"] == 2 * layers
    assert decode.total() == 8 * layers + moe
    assert moe == 2


@pytest.mark.full
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("seed", ["faults", 0, 1, 2])
def test_tiny_models_emulated(oracle_pair, seed, arch):
    compare(oracle_pair(seed), arch, [17, 5, 1, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ["faults", *range(5)])
@torch.no_grad()
def test_tiny_models_on_a_gpu(oracle_pair, seed):
    torch.backends.cuda.matmul.allow_tf32 = False
    pair, device = oracle_pair(seed), torch.device("cuda")
    chunks = [17, 5, 1, 1]
    want = logits(build(pair.config, pair.weights), pair.config, pair.prompt[: sum(chunks)], chunks)
    with device:  # the plain host makes its tensors where new ones go
        model = triton_model(pair, arch_of_device(device).name, device)
        got = logits(model, pair.config, pair.prompt[: sum(chunks)], chunks).cpu()
    assert relative_error(got, want) < 1e-5
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.gpu
@torch.inference_mode()
def test_launches_of_a_decode_layer():
    """One rank of eight of the large model, every layer by itself: window and global attention, a
    dense MLP and experts, at the batch sizes that are measured. On an H200 each op takes one
    launch, but attention two and dense MLP and experts two."""
    if arch_of_device("cuda").name != "sm90":
        pytest.skip("counts are of an H200's tuning rows")
    batches = (1, 8, 32, 128)
    cases = [Case(rows=batch, context=8192, tokens=1) for batch in batches]
    args = EngineArgs(
        model_path=str(CONFIG), load_format="dummy", skip_tokenizer_init=True, rank_slice=8,
        json_model_override_args='{"num_hidden_layers": 6}', max_running_requests=128,
        context_length=8193, max_total_tokens=128 * (8193 + 64), chunked_prefill_size=-1,
        device="cuda",
    )  # fmt: skip
    bench = LayerBench(load_parts(args), args, cases)
    model, host = bench.parts.model, bench.host
    kinds = {(layer.is_moe, layer.attention.window > 0) for layer in model.layers}
    assert kinds == {(False, True), (True, True), (True, False)}
    for case in cases:
        bench.prepare(case)
        x_TH = torch.randn(case.rows, model.config.text.hidden_size, device="cuda").bfloat16()
        for layer, norm_H in zip(model.layers, model.next_norms, strict=True):

            def call(layer=layer, norm_H=norm_H, x_TH=x_TH):
                host.meta.memo.clear()
                return layer.forward(x_TH, x_TH, norm_H, host)

            launches = count_launches(call)
            assert launches <= (10 if layer.is_moe else 9), (case.name, layer.is_moe, launches)
