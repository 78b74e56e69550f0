"""Device times of captured graphs, and the two ceilings a floor is made of.

Nothing here uses a profiler: once CUPTI is attached to a process, every graph it replays is slower
(an H200: 42.7 us became 47.4 us for three launches), for good.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

QUANTILES = (0.2, 0.5, 0.8)
# Seconds of rest that let the clocks recover from the case before (an H200's multiprocessors were
# at 1450 of 1900 MHz after 0.5 s of matrix products, and back after 0.3 s), seconds that wake them,
# and seconds of a case's own load after which they are those it has in the long run.
REST_S, WAKE_S, LOAD_S = 0.3, 0.02, 1.0


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


def settle(load: Callable[[], object]) -> None:
    """Rest from the case before, then run `load` until the clocks are up."""
    torch.cuda.synchronize()
    time.sleep(REST_S)
    keep_busy(load, WAKE_S)


def keep_busy(load: Callable[[], object], seconds: float) -> None:
    """Repeat `load` for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        load()
        torch.cuda.synchronize()


def time_calls(
    call: Callable[[int], object],
    calls: int,
    repeats: int = 15,
    *,
    steady: bool = False,
    sustained: bool = False,
) -> dict[str, float]:
    """p20, p50, p80 us of one call in a captured graph of `calls` of them.

    Args:
        steady: only after `settle`.
        sustained: also sustained_p50_us, the median after LOAD_S of these calls: on a GPU at its
            power limit the clocks fall meanwhile.
    """
    graph = capture(call, calls)
    if steady:
        settle(graph.replay)
    values = torch.quantile(_replays(graph, calls, repeats), torch.tensor(QUANTILES)).tolist()
    found = {f"p{int(q * 100)}_us": round(v, 2) for q, v in zip(QUANTILES, values, strict=True)}
    if sustained:
        keep_busy(graph.replay, LOAD_S)
        found["sustained_p50_us"] = round(float(_replays(graph, calls, repeats).median()), 2)
    return found


def _replays(graph: torch.cuda.CUDAGraph, calls: int, repeats: int) -> torch.Tensor:
    """us of a call, one value a replay."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return torch.tensor(times)


def count_launches(call: Callable[[], object]) -> int:
    """Kernels and memory operations one call puts on the device: the nodes of its graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    if torch.version.hip:
        count = ctypes.CDLL("libamdhip64.so").hipGraphGetNodes
    else:
        count = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    nodes = ctypes.c_size_t()
    error = count(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes))
    if error:
        raise RuntimeError(f"count_launches: {count.__name__} returned error {error}, wanted 0")
    return nodes.value


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
    settle(lambda: target.copy_(source))  # a GPU just woken read half of its rate
    copy = time_eager(lambda: target.copy_(source), 2)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    torch.cuda.synchronize()
    time.sleep(REST_S)
    product = time_eager(lambda: torch.mm(a, a, out=out), 4)
    return 2 * source.numel() / copy * 1e6, 2 * 8192**3 / product * 1e6
