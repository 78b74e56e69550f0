"""Recorded graphs of forwards from fixed buffers (buckets.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from tqdm import tqdm

from inkling_rocm.engine.collection import collection_paused

# Of a bucket: rows, or tokens and rows, or rows and drafts.
Size = TypeVar("Size", int, tuple[int, int])


class RecordedGraphs(Generic[Size]):
    """The graphs of one runner, by bucket; none before `record`, nor where nothing is captured. A
    bucket's graphs leave their results where they did while they were recorded."""

    def __init__(self) -> None:
        self._graphs: dict[Size, list[torch.cuda.CUDAGraph]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def record(
        self,
        buckets: Iterable[Size],
        stages: Callable[[Size], Sequence[Callable[[], None]]],
        *,
        progress: bool = True,
    ) -> None:
        """Record the buckets' graphs instead of those there are, the largest bucket first, so that
        the smaller ones reuse its memory.

        Args: stages: of a bucket, each recorded as one graph after having run once, which compiles
            its kernels; to be replayed in order. progress: show a bar.
        """
        self.release()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        sizes = tqdm(
            sorted(buckets, reverse=True),
            desc="capturing graphs",
            unit="graph",
            disable=not progress,
        )
        for size in sizes:
            sizes.set_postfix(size=size)
            parts = stages(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for part in parts:
                    part()
            stream.synchronize()
            self._graphs[size] = [_record(part, pool, stream) for part in parts]

    def replay(self, size: Size) -> bool:
        """Start a bucket's graphs in order. Returns: whether it has any."""
        graphs = self._graphs.get(size, ())
        for graph in graphs:
            graph.replay()
        return bool(graphs)

    def release(self) -> None:
        """Destroy the graphs."""
        for graphs in self._graphs.values():
            for graph in graphs:
                graph.reset()
        self._graphs.clear()


def _record(part: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Other threads (a server's) may use the GPU meanwhile.
    mode = "thread_local"
    with (
        collection_paused(),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode),
    ):
        part()
    return graph
