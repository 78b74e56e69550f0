"""Decode through the engine on a GPU: time a step, host gaps between the graphs, reproducibility.

    python -m bench.engine_gpu --config tests/data/configs/NAME --layers 8 --batches 1,8,32

Weights are random. For every batch size: greedy requests of one prompt length run until a window of
decode steps has been profiled; a gap is time between two device activities of the window in which
the device has nothing to do. Rows go to stdout as JSON, one a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from inkling_rocm.engine import Engine, EngineArgs, SamplingParams


def busy_and_gaps(events: list[tuple[float, float]]) -> tuple[float, float]:
    """Microseconds with and without device activity between the first start and the last end.

    Args:    events: (start, end) in any order, possibly overlapping.
    """
    busy = gap = 0.0
    reached = None
    for start, end in sorted(events):
        if reached is None:
            reached = start
        gap += max(start - reached, 0.0)
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return busy, gap


def device_events(prof: profile) -> list[tuple[str, float, float]]:
    """(name, start, end) of kernels and copies, us."""
    found = []
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.append((event.name, event.time_range.start, event.time_range.end))
    return found


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
    events = device_events(state["prof"])
    # The first and last steps of the window start and drain the pipeline.
    events.sort(key=lambda e: e[1])
    inner = events[len(events) // 10 : -len(events) // 10]
    busy, gap = busy_and_gaps([(a, b) for _, a, b in inner])
    names = Counter(name for name, _, _ in events)
    return {
        "batch": batch,
        "prompt": prompt,
        "step_ms": round(1e3 * statistics.median(plain), 4),
        "tokens_per_s": round(batch / statistics.median(plain)),
        "device_busy_us_a_step": round((busy) / (0.8 * steps), 1),
        "gap_share": round(gap / (busy + gap), 4),
        "device_activities_a_step": round(len(events) / steps, 2),
        "activities": dict(names.most_common(30)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="folder with a config.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    options = parser.parse_args()
    batches = [int(size) for size in options.batches.split(",")]
    args = EngineArgs(
        model_path=options.config,
        load_format="dummy",
        skip_tokenizer_init=True,
        json_model_override_args=json.dumps({"num_hidden_layers": options.layers}),
        max_running_requests=max(batches),
        cuda_graph_bs=tuple(batches),
        context_length=16384,
        disable_cuda_graph=options.disable_cuda_graph,
        disable_overlap_schedule=options.disable_overlap_schedule,
    )
    started = time.perf_counter()
    with Engine(args) as engine:
        print(json.dumps({"start_s": round(time.perf_counter() - started, 1)}), flush=True)
        for batch in batches:
            row = measure(engine, batch, options.prompt, options.steps)
            row |= {"graphs": not options.disable_cuda_graph}
            row |= {"ahead": not options.disable_overlap_schedule}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level="INFO")
    main()
