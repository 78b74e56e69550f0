"""Running a problem on one target: the model's forwards, and the tokens of the whole engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.table import allocate
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.engine import Engine
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.engine.rings import ConvRings
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from inkling_rocm.ops.registry import OpSet
from inkling_rocm.parity.problems import Problem
from inkling_rocm.parity.watch import Listener, watched
from kernel_base.arch import Arch, arch_named, arch_of_device

EMULATED = ("gfx942", "gfx950")
# Greedy, and every kind of random draw, with a seed each.
ENGINE_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"sampling_seed": 11},
    {"sampling_seed": 12, "top_p": 0.9, "frequency_penalty": 0.5},
)
ENGINE_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a problem runs.

    Attributes:
        name: "cpu" (torch reference ops), "gfx942" or "gfx950" (Triton variants, emulated), "cuda"
            (the variants of this machine's GPU).
    """

    name: str
    arch: Arch
    device: torch.device

    @staticmethod
    def named(name: str) -> Target:
        """Raises: ValueError: an unknown target, or a GPU this machine does not have."""
        if name == "cuda":
            if not torch.cuda.is_available():
                raise ValueError("target cuda: torch sees no GPU")
            device = torch.device("cuda")
            return Target(name=name, arch=arch_of_device(device), device=device)
        if name not in ("cpu", *EMULATED):
            raise ValueError(f"target {name!r}: choose from cpu, {', '.join(EMULATED)}, cuda")
        return Target(name=name, arch=arch_named(name), device=torch.device("cpu"))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Kernels launched inside run on this target."""
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            if self.name in EMULATED:
                from gcn_emulator.triton_driver import emulate

                with emulate(self.name):
                    yield
            else:
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32


def make_weights(problem: Problem, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The problem's weights; float64 ones are the fp32 ones, exactly."""
    kept = torch.float32 if dtype == torch.float64 else dtype
    weights = allocate(problem.config, dtype=kept, device=device)
    fill_dummy(problem.config, weights, seed=problem.seed)
    return weights


def choose_ops(problem: Problem, target: Target, dtype: torch.dtype) -> OpSet:
    """Every op on the best variant of the target."""
    name = str(dtype).removeprefix("torch.")
    return resolve_ops(problem.config, target.arch, dtype=name)


def run_forwards(
    problem: Problem,
    target: Target,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    listener: Listener,
    ops: OpSet | None = None,
) -> list[Tensor]:
    """Run the problem's prefill and decode forwards; the tokens after the prompts are the
    problem's, so that every target computes the same thing.

    Returns: fp32 logits [rows, V] of every forward's last tokens, on the CPU.
    """
    text = problem.config.text
    args = EngineArgs(
        model_path="parity", page_size=16, max_running_requests=4, max_total_tokens=256
    )
    plan = plan_memory(text, args, dtype=dtype, device=target.device)
    pools, _ = build_pools(text, plan, dtype=dtype, device=target.device)
    rings = ConvRings(text, slots=plan.slots, dtype=dtype, device=target.device)
    host = EmbeddedHost(
        text, pools, rings, max_tokens=64, max_rows=8, device=target.device, check=True
    )
    chosen = choose_ops(problem, target, dtype) if ops is None else ops
    model = InklingModel(problem.config, dict(weights), watched(chosen, listener))
    slots = [rings.take() for _ in problem.prompts]
    ids = [
        [*prompt, *more]
        for prompt, more in zip(problem.prompts, problem.continuations, strict=True)
    ]
    computed = [0] * len(slots)
    logits = []
    steps = (*problem.chunks, *[(1,) * len(slots)] * problem.decode_steps)
    with torch.inference_mode():
        for lengths in steps:
            rows = [i for i, length in enumerate(lengths) if length]
            for i in rows:
                for pool in pools:
                    pool.trim(slots[i], computed[i])
                    pool.extend(slots[i], computed[i] + lengths[i])
            host.prepare(
                np.array([slots[i] for i in rows], np.int64),
                np.array([computed[i] for i in rows], np.int64),
                np.array([lengths[i] for i in rows], np.int64),
            )
            step_ids = [t for i in rows for t in ids[i][computed[i] : computed[i] + lengths[i]]]
            hidden = model.forward(host.input_ids(np.array(step_ids, np.int64)), host)
            ends = torch.tensor(np.cumsum([lengths[i] for i in rows]) - 1, device=target.device)
            logits.append(model.logits(hidden[ends], host).cpu())
            for i in rows:
                computed[i] += lengths[i]
    return logits


def engine_tokens(
    problem: Problem, target: Target, weights: dict[str, Tensor], dtype: torch.dtype
) -> list[list[int]]:
    """Tokens of the whole engine (scheduler, chunked prefill, sampler): prompt by prompt, each with
    every entry of ENGINE_PARAMS."""
    ops = choose_ops(problem, target, dtype)
    parts = EngineParts(
        config=problem.config,
        model=InklingModel(problem.config, dict(weights), ops),
        tokenizer=None,
        dtype=dtype,
        device=target.device,
    )
    args = EngineArgs(
        model_path="parity", skip_tokenizer_init=True, page_size=16, max_running_requests=8,
        chunked_prefill_size=16, max_total_tokens=512,
    )  # fmt: skip
    prompts = [list(p) for p in problem.prompts for _ in ENGINE_PARAMS]
    params = [
        {**p, "max_new_tokens": ENGINE_TOKENS, "ignore_eos": True}
        for _ in problem.prompts
        for p in ENGINE_PARAMS
    ]
    with Engine(args, parts=parts) as engine:
        found = engine.generate(input_ids=prompts, sampling_params=params)
    return [result["output_ids"] for result in found]
