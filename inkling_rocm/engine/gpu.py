"""What an engine prepares on a GPU before its first request: kernels compiled, graphs captured, the
sampler's memory; and the report of what all that takes."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from tqdm import tqdm

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.buckets import captured_prompts, captured_sizes
from inkling_rocm.engine.compile_ahead import compiling_ahead, may_compile_ahead
from inkling_rocm.engine.decode_runner import DecodeRunner
from inkling_rocm.engine.free_memory import GIB, free_bytes
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.memory import MemoryPlan
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.prefill_runner import PrefillRunner
from inkling_rocm.engine.speculative.mtp import MTPDrafter
from inkling_rocm.engine.speculative.round_runner import RoundRunner
from inkling_rocm.engine.speculative.round_sampler import RoundSampler
from inkling_rocm.engine.token_sampler import DeviceTokenSampler, TokenSampler, TorchSampler
from inkling_rocm.ops.registry import OpSet
from kernel_base.arch import arch_of_device

logger = logging.getLogger(__name__)

# Their torch references ask the device for sizes, which a graph cannot record.
CAPTURED_OPS = ("attention_prologue", "rel_attention", "residual_conv_norm", "gate", "experts")
# Kernels are chosen by numbers of tokens: powers of two and what is half way between them find all.
WARM_UP_TOKENS = (1, *(step << n for n in range(20) for step in (2, 3)))


def make_sampler(parts: EngineParts, plan: MemoryPlan) -> TokenSampler:
    """The sampling kernels on a GPU, else torch."""
    if parts.device.type == "cpu":
        return TorchSampler()
    from inkling_rocm.engine.device_sampler import DeviceSampler  # it imports Triton

    sampler = DeviceSampler(
        vocabulary=parts.config.text.unpadded_vocab_size,
        slots=plan.slots,
        device=parts.device,
        arch=arch_of_device(parts.device).name,
    )
    return DeviceTokenSampler(sampler)


def why_not_captured(ops: OpSet) -> str | None:
    """Why decode cannot be captured with these variants; None when it can."""
    torch_ops = [c.op for c in ops.choices if c.variant == "torch" and c.op in CAPTURED_OPS]
    if torch_ops:
        return f"the torch variants of {', '.join(torch_ops)} cannot be captured"
    return None


@torch.inference_mode()
def make_decode_runner(
    parts: EngineParts,
    args: EngineArgs,
    plan: MemoryPlan,
    host: EmbeddedHost,
    sampler: TokenSampler,
) -> DecodeRunner | None:
    """Compile what prompts need, then capture decode. Returns: None where nothing is captured."""
    buckets = _prepare(parts, args, plan, host, sampler)
    if buckets is None:
        return None
    draws = sampler.for_rounds(rejection=False)
    runner = DecodeRunner(parts.model, host, draws, buckets=buckets, max_kv=plan.context_length)
    if may_compile_ahead(parts.model.ops):
        with compiling_ahead(progress=host.comm.tp_rank == 0):
            runner.compile()
    _capture(runner, parts.device, plan)
    return runner


@torch.inference_mode()
def make_prefill_runner(
    parts: EngineParts, args: EngineArgs, plan: MemoryPlan, host: EmbeddedHost
) -> PrefillRunner | None:
    """Capture small prompt steps, after decode steps were. Returns: None where none is asked."""
    tokens = captured_prompts(args, chunk=plan.chunk_tokens, max_running=plan.max_running)
    if not tokens:
        return None
    runner = PrefillRunner(
        parts.model, host, tokens=tokens, max_rows=plan.max_running, max_kv=plan.context_length
    )
    _capture(runner, parts.device, plan)
    return runner


@torch.inference_mode()
def make_round_runner(
    parts: EngineParts,
    args: EngineArgs,
    plan: MemoryPlan,
    host: EmbeddedHost,
    drafter: MTPDrafter,
    sampler: TokenSampler,
    draws: RoundSampler,
    simulated: torch.Tensor | None,
) -> RoundRunner | None:
    """Compile what prompts need, then capture the rounds of speculation with draft blocks. Returns:
    None where nothing is captured."""
    buckets = _prepare(parts, args, plan, host, sampler)
    if buckets is None:
        return None
    assert parts.drafts is not None
    most = parts.drafts.depths
    runner = RoundRunner(
        parts.drafts,
        host,
        drafter,
        draws,
        buckets=buckets,
        drafts=tuple(range(1, most + 1)) if args.speculative_adaptive else (most,),
        max_kv=plan.context_length,
        simulated=simulated,
    )
    _capture(runner, parts.device, plan)
    return runner


def _prepare(
    parts: EngineParts,
    args: EngineArgs,
    plan: MemoryPlan,
    host: EmbeddedHost,
    sampler: TokenSampler,
) -> tuple[int, ...] | None:
    """Compile what prompts need. Returns: batch sizes to capture; None = nothing is captured."""
    if parts.device.type == "cpu":
        for name in ("cuda_graph_bs", "cuda_graph_max_bs", "cuda_graph_max_bs_prefill"):
            if getattr(args, name) is not None:
                logger.warning("%s has no effect: a CPU has no graphs", name)
        return None
    _warm_up(parts, plan, host, sampler)
    reason = "--disable-cuda-graph" if args.disable_cuda_graph else None
    reason = reason or why_not_captured(parts.model.ops)
    if reason is not None:
        logger.info("no graphs: %s", reason)
        return None
    return captured_sizes(args, plan.max_running)


def _capture(
    runner: DecodeRunner | PrefillRunner | RoundRunner, device: torch.device, plan: MemoryPlan
) -> None:
    before, started = free_bytes(device), time.perf_counter()
    runner.capture()
    free = free_bytes(device)
    logger.info(
        "graphs of up to %s: %.1f s, %.3f GiB (%.3f planned); %.2f GiB stay free",
        runner.largest,
        time.perf_counter() - started,
        (before - free) / GIB,
        plan.other.graphs / GIB,
        free / GIB,
    )


def largest_prompts(plan: MemoryPlan, pools: tuple[PagePool, ...]) -> tuple[int, int]:
    """What fills the largest prompt step while nothing else runs. Returns: tokens of a prompt, in
    whole pages where the context holds one, and of all prompts together."""
    page = plan.page_size
    row = plan.context_length - plan.context_length % page or plan.context_length
    pages = min(pool.free for pool in pools)
    rows = min(max(pages // -(-row // page), 1), plan.max_running)
    return row, min(plan.chunk_tokens, rows * row, pages * page)


def _warm_up(
    parts: EngineParts, plan: MemoryPlan, host: EmbeddedHost, sampler: TokenSampler
) -> None:
    """Compute prompts of the usual sizes: it compiles their kernels (which Triton keeps on disk for
    the next start) and shows that the largest forward fits."""
    before, started = free_bytes(parts.device), time.perf_counter()
    if may_compile_ahead(parts.model.ops):
        with compiling_ahead(progress=host.comm.tp_rank == 0):
            _, logits_1V = _prompt_steps(parts, plan, host)
            sampler.compile(logits_1V)
    most, _ = _prompt_steps(parts, plan, host, progress=host.comm.tp_rank == 0)
    logger.info(
        "warm-up on up to %d tokens: %.1f s, workspace %.3f GiB (%.3f planned)",
        most,
        time.perf_counter() - started,
        (before - free_bytes(parts.device)) / GIB,
        plan.other.forward / GIB,
    )


def _prompt_steps(
    parts: EngineParts, plan: MemoryPlan, host: EmbeddedHost, progress: bool = False
) -> tuple[int, torch.Tensor]:
    """Forwards over prompts of the usual sizes. Returns: tokens of the largest, and the logits of
    its last."""
    row, most = largest_prompts(plan, host.pools)
    slots = np.array([host.rings.take() for _ in range(-(-most // row))])
    sizes = tqdm(
        sorted({min(n, most) for n in (*WARM_UP_TOKENS, most)}),
        desc="warming up",
        disable=not progress,
    )
    for tokens in sizes:
        sizes.set_postfix(tokens=tokens)
        lengths = np.array([min(row, tokens - at) for at in range(0, tokens, row)])
        rows = slots[: len(lengths)]
        for pool in host.pools:
            for slot, length in zip(rows.tolist(), lengths.tolist(), strict=True):
                pool.extend(slot, length)
        for snapshot in (0, *host.rings.snapshot_slots[:1]):  # these are kernels of their own
            kept = np.array([[snapshot, lengths[0]]], np.int32) if snapshot else None
            host.prepare(rows, np.zeros_like(rows), lengths, snapshots=kept)
            hidden_TH = parts.model.forward(host.input_ids(np.zeros(tokens, np.int64)), host)
        logits_1V = parts.model.logits(hidden_TH[-1:], host)
    torch.cuda.synchronize(parts.device)
    for pool in host.pools:
        for slot in slots.tolist():
            pool.release(slot)
        pool.take_changes(slots)
    for slot in reversed(slots.tolist()):
        host.rings.give_back(slot)
    return most, logits_1V
