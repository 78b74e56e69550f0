"""Decode through the engine on a GPU: time a step, host gaps between the graphs, reproducibility.

    python -m bench.engine_gpu --config tests/data/configs/NAME --layers 8 --batches 1,8,32

Weights are random. For every batch size: greedy requests of one prompt length run until a window of
decode steps has been profiled. A host gap is time in which the device has nothing to do before a
launch; idle time between the kernels of one graph is told apart from it. Rows go to stdout as JSON,
one a line, and to --output-file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from inkling_rocm.bench.rows import append_rows, machine
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import choose_device


@dataclass(frozen=True)
class Activity:
    """A kernel or copy, us; those of one graph replay share their launch."""

    name: str
    start: float
    end: float
    launch: int


@dataclass
class Spans:
    """Microseconds between the first start and the last end: with device activity, idle between
    two activities of one graph (the device's own doing), idle before another launch (the host's
    doing, or the device's time to begin a launch that is there); and the latter by what came
    next."""

    busy: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    before: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        return self.busy + self.inside + self.between


def spans_of(activities: Iterable[Activity]) -> Spans:
    """Where the time went. Args: activities: in any order, possibly overlapping."""
    found = Spans()
    last: Activity | None = None  # the one that ends last so far
    for activity in sorted(activities, key=lambda a: a.start):
        reached = activity.start if last is None else last.end
        idle = max(activity.start - reached, 0.0)
        if last is not None and activity.launch == last.launch:
            found.inside += idle
        else:
            found.between += idle
            found.before[activity.name] += idle
        found.busy += max(activity.end - max(activity.start, reached), 0.0)
        if last is None or activity.end > last.end:
            last = activity
    return found


def device_activities(prof: profile) -> list[Activity]:
    """Kernels and copies of a finished profile."""
    return [
        Activity(event.name, event.time_range.start, event.time_range.end, event.id)
        for event in prof.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def measure(engine: Engine, batch: int, prompt: int, steps: int) -> dict:
    """Decode `batch` requests; profile `steps` steps in the middle."""
    params = SamplingParams(max_new_tokens=3 * steps + 40, temperature=0.0, ignore_eos=True)
    core = engine._core
    handles = [
        engine.submit([(7 * i + r) % 5000 + 10 for i in range(prompt)], params, stream=False)
        for r in range(batch)
    ]
    times: list[float] = []
    original, state = core.step, {"n": 0, "prof": None}

    def step():
        original()
        decoding = len(core.scheduler.running) == batch and all(
            s.remaining <= 1 for s in core.scheduler.running
        )
        if not decoding:
            return
        state["n"] += 1
        times.append(time.perf_counter())
        if state["n"] == steps + 20:
            torch.cuda.synchronize()
            state["prof"] = profile(activities=[ProfilerActivity.CUDA])
            state["prof"].start()
        elif state["n"] == 2 * steps + 20:
            torch.cuda.synchronize()
            state["prof"].stop()

    core.step = step
    for handle in handles:
        list(handle)
    core.step = original
    plain = [b - a for a, b in pairwise(times[10 : steps + 1])]
    activities = sorted(device_activities(state["prof"]), key=lambda a: a.start)
    # The first and last steps of the window start and drain the pipeline.
    spans = spans_of(activities[len(activities) // 10 : -len(activities) // 10])
    names = Counter(activity.name for activity in activities)
    return {
        "op": "engine_decode",
        "batch": batch,
        "prompt": prompt,
        "step_ms": round(1e3 * statistics.median(plain), 4),
        "tokens_per_s": round(batch / statistics.median(plain)),
        "device_busy_us_a_step": round(spans.busy / (0.8 * steps), 1),
        "host_gap_share": round(spans.between / spans.total, 4),
        "graph_gap_share": round(spans.inside / spans.total, 4),
        "host_gaps_us_a_step": {
            name: round(us / (0.8 * steps), 2) for name, us in spans.before.most_common(8)
        },
        "collectives_us_a_step": round(
            sum(a.end - a.start for a in activities if "nccl" in a.name.lower()) / steps, 1
        ),
        "device_activities_a_step": round(len(activities) / steps, 2),
        "activities": dict(names.most_common(40)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="folder with a config.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--override", help="of config.json, instead of --layers")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context-length", type=int, default=16384)
    parser.add_argument("--output-file", type=Path)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    options = parser.parse_args()
    batches = [int(size) for size in options.batches.split(",")]
    args = EngineArgs(
        model_path=options.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        json_model_override_args=options.override
        or json.dumps({"num_hidden_layers": options.layers}),
        max_running_requests=max(batches),
        cuda_graph_bs=tuple(batches),
        context_length=options.context_length,
        disable_cuda_graph=options.disable_cuda_graph,
        disable_overlap_schedule=options.disable_overlap_schedule,
    )
    started = time.perf_counter()
    with Engine(args) as engine:
        print(json.dumps({"start_s": round(time.perf_counter() - started, 1)}), flush=True)
        for batch in batches:
            row = measure(engine, batch, options.prompt, options.steps)
            row |= {"graphs": not options.disable_cuda_graph}
            layers = engine.config.text.num_layers
            row |= {"ahead": not options.disable_overlap_schedule, "layers": layers}
            row |= {"model": options.config, **machine(choose_device(None))}
            print(json.dumps(row), flush=True)
            if options.output_file is not None:
                append_rows(options.output_file, [row])


if __name__ == "__main__":
    import logging

    logging.basicConfig(level="INFO")
    main()
