"""Device times: medians of events, the host kept ahead so that launch overhead is not measured."""

from __future__ import annotations

import torch

QUANTILES = (0.2, 0.5, 0.8)


def _quantiles_us(times_ms, calls=1):
    ordered = torch.tensor(times_ms).mul(1e3 / calls)
    return tuple(round(float(x), 2) for x in torch.quantile(ordered, torch.tensor(QUANTILES)))


def time_stream(fn, *, repeats=20, warmup=3):
    """(p20, p50, p80) us of one call, L2 flushed before each; a spin keeps the device busy while
    the host enqueues."""
    flush = torch.empty(256 * 1024 * 1024, dtype=torch.int8, device="cuda")
    for _ in range(warmup):
        fn()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, stop in events:
        flush.zero_()
        torch.cuda._sleep(500_000)
        start.record()
        fn()
        stop.record()
    torch.cuda.synchronize()
    return _quantiles_us([a.elapsed_time(b) for a, b in events])


def time_graph(fn, *, calls=20, repeats=15):
    """(p20, p50, p80) us of one of `calls` calls captured in a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return _quantiles_us(times, calls)
