"""Running an engine with a window over its steps, under the profiler of the machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine.load import EngineParts, load_parts
from inkling_rocm.parity.watch import attach
from inkling_rocm.profile import rocprof, torch_trace
from inkling_rocm.profile.table import OpRow, Profile, merged
from inkling_rocm.profile.window import Window
from kernel_base.arch import arch_of_device

Phase = Literal["decode", "prefill"]
WARMUP = 2  # forwards: compilation, first allocations


def _rounds(phase: Phase, steps: int) -> tuple[int, int]:
    """(batches of requests, tokens each generates) that outlast a window of so many steps."""
    steps += WARMUP + 2
    return (1, steps + 1) if phase == "decode" else (steps, 1)


def _window_args(args: EngineArgs, phase: Phase, input_len: int, steps: int) -> EngineArgs:
    """An engine for these requests alone: it warms up over no larger prompt steps than they make,
    each size of which may have kernels to compile. Graphs are off, so that every launch lies in its
    op's range."""
    _, new = _rounds(phase, steps)
    return replace(args, disable_cuda_graph=True, context_length=input_len + new)


def _run_engine(
    args: EngineArgs, parts: EngineParts, window: Window, phase: Phase, batch: int, input_len: int
) -> None:
    """Requests that keep the engine busy until the window is over."""
    vocabulary = parts.config.text.unpadded_vocab_size
    rounds, new = _rounds(phase, window.steps)
    with Engine(args, parts=parts) as engine:
        attach(parts.model, window)  # only now: building an engine runs forwards of its own
        for round_ in range(rounds):
            prompts = [
                [(7 * i + 13 * row + 31 * round_) % vocabulary for i in range(input_len)]
                for row in range(batch)
            ]
            params = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=params)
    window.close()
    if not window.done:
        raise ValueError(
            f"the engine never ran {WARMUP} {phase} forwards of {batch} requests; raise "
            "max_running_requests or max_total_tokens"
        )


def _is_step(phase: Phase, batch: int, input_len: int):
    """Decode forwards have a token a request, padded to a bucket; prefill ones have more."""
    if input_len <= 2 * batch:
        raise ValueError(
            f"input length {input_len}: wanted more than twice the batch of {batch}, so that "
            "prefill and decode forwards can be told apart"
        )
    return (
        (lambda tokens: tokens <= 2 * batch)
        if phase == "decode"
        else (lambda tokens: tokens > 2 * batch)
    )


def profile_with_torch(
    args: EngineArgs,
    *,
    phase: Phase,
    batch: int,
    input_len: int,
    steps: int,
    parts: EngineParts | None = None,
) -> Profile:
    """Profile under torch.profiler.

    Raises: ValueError: the arguments leave no window.
    """
    is_step = _is_step(phase, batch, input_len)
    args = _window_args(args, phase, input_len, steps)
    parts = parts or load_parts(args)
    on_device = parts.device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if on_device:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds):
        pass  # its library complains when it is first used in another thread, as the engine's
    profiler = torch.profiler.profile(activities=kinds, acc_events=True)

    window = Window(
        is_step=is_step, warmup=WARMUP, steps=steps, start=profiler.start,
        wait=_waiter(parts.device), stop=profiler.stop,
        mark=torch.profiler.record_function,
    )  # fmt: skip
    _run_engine(args, parts, window, phase, batch, input_len)
    rows = torch_trace.op_rows(profiler.events(), on_device=on_device)
    return _profile(rows, window, parts.device, "torch.profiler")


def _profile(rows: Sequence[OpRow], window: Window, device: torch.device, profiler: str) -> Profile:
    arch = arch_of_device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Profile(
        rows=merged([*rows, *window.calls.values()]),
        steps=window.measured,
        wall_us=window.wall_us,
        profiler=profiler,
        device=name,
        bytes_per_s=arch.hbm_bytes_per_s,
        ceiling=f"the datasheet's, {arch.name}",
    )


def _waiter(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


@contextmanager
def _roctx(name: str):
    torch.cuda.nvtx.range_push(name)  # roctx in a ROCm build of torch
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def run_inside_rocprof(
    args: EngineArgs, facts: Path, *, phase: Phase, batch: int, input_len: int, steps: int
) -> None:
    """What the profiled process does: run the window with roctx ranges, write its facts."""
    is_step = _is_step(phase, batch, input_len)
    args = _window_args(args, phase, input_len, steps)
    parts = load_parts(args)

    window = Window(
        is_step=is_step,
        warmup=WARMUP,
        steps=steps,
        start=lambda: torch.cuda.nvtx.range_push(rocprof.WINDOW),
        wait=_waiter(parts.device),
        stop=torch.cuda.nvtx.range_pop,
        mark=_roctx,
    )
    _run_engine(args, parts, window, phase, batch, input_len)
    found = _profile([], window, parts.device, "rocprofv3")
    facts.write_text(json.dumps(found.as_json()), encoding="utf-8")


def profile_with_rocprof(program: Sequence[str], folder: Path) -> Profile:
    """Run `program` (this command with --inside-rocprof) under rocprofv3 and read its traces.

    Raises: ValueError: rocprofv3 is not there, or it or the program failed.
    """
    if shutil.which("rocprofv3") is None:
        raise ValueError("rocprofv3 is not on PATH; it comes with ROCm (rocprofiler-sdk)")
    facts = folder / "facts.json"
    done = subprocess.run(
        rocprof.command(folder, [*program, "--inside-rocprof", str(facts)]), check=False
    )
    if done.returncode or not facts.exists():
        raise ValueError(f"rocprofv3 ended with status {done.returncode}; its output is above")
    return from_rocprof(folder, facts)


def from_rocprof(folder: Path, facts: Path) -> Profile:
    """A profile of the traces in `folder` and the facts the program wrote.

    Raises: ValueError: a trace is missing or not one of rocprofv3's.
    """
    known = json.loads(facts.read_text(encoding="utf-8"))
    calls = [
        OpRow(**{k: v for k, v in row.items() if k != "fraction"}) for row in known.pop("rows")
    ]
    return Profile(rows=merged([*rocprof.read_traces(folder), *calls]), **known)
