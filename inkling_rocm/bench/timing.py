"""Median times of calls, launched one by one or as a captured graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

REPEATS = 15


def call_us(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of one of ten calls in a row: launches are waited for once."""

    def ten() -> None:
        for _ in range(10):
            call()

    call()
    return eager_us(ten, on_gpu=device.type == "cuda") / 10


def eager_us(call: Callable[[], Any], *, on_gpu: bool) -> float:
    """Median time of a call, launched op by op."""

    def timed() -> Iterator[float]:
        for _ in range(REPEATS if on_gpu else 3):
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            if on_gpu:
                torch.cuda.synchronize()
            yield (time.perf_counter() - began) * 1e6

    return statistics.median(timed())


def graph_us(call: Callable[[], Any]) -> float:
    """Median time of a replay of the call, captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(REPEATS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[3:])
