"""Decode through the engine on a GPU: time a step, host gaps between the graphs, reproducibility.

    python -m bench.engine_gpu --config tests/data/configs/NAME --layers 8 --batches 1,8,32

Weights are random. For every batch size: greedy requests of one prompt length run until windows of
decode steps have been profiled. A host gap is time in which the device has nothing to do before a
launch; idle time between the kernels of one graph is told apart from it. Of the longest gap the row
says what the host did meanwhile. Rows go to stdout as JSON, one a line, and to --output-file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from bench.engine.gaps import Window, collections_noted, meanwhile, spans_of
from inkling_rocm.bench.rows import append_rows, machine
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import choose_device


def new_tokens(steps: int, windows: int = 1) -> int:
    """What a request generates while it is measured: plain steps, then the profiled ones."""
    return steps + 60 + windows * (steps + 10)


def measure(engine: Engine, batch: int, prompt: int, steps: int, windows: int = 1) -> dict:
    """Decode `batch` requests: time `steps` steps, then profile `windows` times as many; with 0
    windows the row says nothing of gaps."""
    params = SamplingParams(
        max_new_tokens=new_tokens(steps, windows), temperature=0.0, ignore_eos=True
    )
    core = engine._core
    handles = [
        engine.submit([(7 * i + r) % 5000 + 10 for i in range(prompt)], params, stream=False)
        for r in range(batch)
    ]
    times: list[float] = []
    done: list[Window] = []
    noted: list[tuple[str, int, int]] = []
    starts = {steps + 20 + index * (steps + 10) for index in range(windows)}
    original = core.step

    def step():
        began = time.time_ns()
        original()
        noted.append(("step", began, time.time_ns()))
        decoding = len(core.scheduler.running) == batch and all(
            s.remaining <= 1 for s in core.scheduler.running
        )
        if not decoding:
            return
        times.append(time.perf_counter())
        if len(times) in starts:
            torch.cuda.synchronize()
            done.append(Window(profile(activities=[ProfilerActivity.CUDA])))
            done[-1].profile.start()
            noted.clear()
        elif len(times) - steps in starts:
            torch.cuda.synchronize()
            done[-1].profile.stop()
            done[-1].doings = noted.copy()

    core.step = step
    with collections_noted(noted):
        for handle in handles:
            list(handle)
    core.step = original
    plain = [b - a for a, b in pairwise(times[10 : steps + 1])]
    timed = {
        "op": "engine_decode",
        "batch": batch,
        "prompt": prompt,
        "step_ms": round(1e3 * statistics.median(plain), 4),
        "tokens_per_s": round(batch / statistics.median(plain)),
    }
    return timed | (gaps_of(done, steps) if done else {})


def gaps_of(done: list[Window], steps: int) -> dict:
    """What the windows of so many steps each say of the device's time."""
    activities = [window.activities() for window in done]
    spans = [spans_of(found) for found in activities]
    worst = max(range(len(done)), key=lambda i: spans[i].longest[1] - spans[i].longest[0])
    start, end, before = spans[worst].longest
    total, profiled = sum(each.total for each in spans), 0.8 * steps * len(done)
    gaps: Counter[str] = sum((each.before for each in spans), Counter())
    whole = [activity for found in activities for activity in found]
    return {
        "device_busy_us_a_step": round(sum(each.busy for each in spans) / profiled, 1),
        "host_gap_share": round(sum(each.between for each in spans) / total, 4),
        "graph_gap_share": round(sum(each.inside for each in spans) / total, 4),
        "host_gap_shares": [round(each.host_share, 4) for each in spans],
        "longest_gap_us": round(end - start, 1),
        "longest_gap_before": before[:80],
        "longest_gap_meanwhile": meanwhile(done[worst].host(), start, end),
        "host_gaps_us_a_step": {name: round(us / profiled, 2) for name, us in gaps.most_common(8)},
        "collectives_us_a_step": round(
            sum(a.end - a.start for a in whole if "nccl" in a.name.lower()) / profiled, 1
        ),
        "device_activities_a_step": round(len(whole) / profiled, 2),
        "activities": dict(Counter(activity.name for activity in whole).most_common(40)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="folder with a config.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--override", help="of config.json, instead of --layers")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60, help="of a window")
    parser.add_argument("--windows", type=int, default=3, help="profiled for each batch")
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
        # All times first: graphs are slower in a process in which a profiler has run.
        timed = {
            batch: measure(engine, batch, options.prompt, options.steps, 0)
            for batch in tqdm(batches, desc="timing", unit="batch")
        }
        bar = tqdm(batches, desc="profiling", unit="batch")
        for batch in bar:
            row = measure(engine, batch, options.prompt, options.steps, options.windows)
            row |= timed[batch]
            row |= {"graphs": not options.disable_cuda_graph}
            layers = engine.config.text.num_layers
            row |= {"ahead": not options.disable_overlap_schedule, "layers": layers}
            row |= {"model": options.config, **machine(choose_device(None))}
            bar.clear()  # the row begins a line
            print(json.dumps(row), flush=True)
            if options.output_file is not None:
                append_rows(options.output_file, [row])


if __name__ == "__main__":
    import logging

    logging.basicConfig(level="INFO")
    main()
