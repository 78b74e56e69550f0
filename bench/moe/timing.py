"""Device times of captured graphs, and the two ceilings a floor is made of."""

from __future__ import annotations

from collections.abc import Callable

import torch

QUANTILES = (0.2, 0.5, 0.8)


def capture(call: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of call(0) .. call(calls - 1), after two eager rounds (compilation, workspaces)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in (*range(calls), *range(calls)):
            call(index)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_calls(call: Callable[[int], object], calls: int, repeats: int = 15) -> dict[str, float]:
    """p20, p50, p80 us of one call in a captured graph of `calls` of them."""
    graph = capture(call, calls)
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    values = torch.quantile(torch.tensor(times), torch.tensor(QUANTILES)).tolist()
    return {f"p{int(q * 100)}_us": round(v, 2) for q, v in zip(QUANTILES, values, strict=True)}


def count_launches(call: Callable[[], object]) -> int:
    """Kernels and memory operations one call puts on the device."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(
        event.device_type.name == "CUDA" and not event.is_user_annotation
        for event in profile.events()
    )


def time_eager(call: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Median us of one of `calls` calls in a row, launched one by one: for calls long enough to
    hide their launch. (A copy captured in a graph runs at two thirds of its eager rate.)"""
    call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return float(torch.tensor(times).median())


def ceilings() -> tuple[float, float]:
    """(bytes/s of a device copy, reads and writes counted; FLOP/s of an 8192^3 bf16 product),
    measured here."""
    source = torch.randint(-128, 128, (1 << 32,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = time_eager(lambda: target.copy_(source), 2)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    product = time_eager(lambda: torch.mm(a, a, out=out), 4)
    return 2 * source.numel() / copy * 1e6, 2 * 8192**3 / product * 1e6
