"""Decode steps from fixed buffers, by batch bucket: on a GPU one graph a bucket.

A step of n rows runs in the smallest bucket of at least n rows; the rest is padding on slot 0. The
host sends one small array; a metadata kernel inside the graph derives everything else from it and
from page tables that live on the device. Without capture (on a CPU, or with --disable-cuda-graph)
the same function over the same buffers is called directly.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.host import EmbeddedHost, upload
from inkling_rocm.engine.host_checks import check_step
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.host import (
    CONV_STREAMS,
    BatchMeta,
    Comm,
    ConvStateView,
    ConvStream,
    Host,
    KVCacheView,
)
from inkling_rocm.host.decode import (
    FIRST,
    PAGE,
    POOL_FIELDS,
    SLOT,
    START,
    DecodeTensors,
    PoolTensors,
    decode_metadata_reference,
    fields,
)

logger = logging.getLogger(__name__)

SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32)
BUCKET_STEP = 16


class _Model(Protocol):
    def forward(self, input_ids: Tensor, host: Host) -> Tensor: ...


def decode_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes to run: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, ... and `most`."""
    steps = range(SMALL_BUCKETS[-1] + BUCKET_STEP, most, BUCKET_STEP)
    return (*(size for size in SMALL_BUCKETS if size < most), *steps, most)


@dataclass(kw_only=True)
class _BucketHost:
    """Host of one bucket's forwards."""

    meta: BatchMeta
    comm: Comm
    pools: tuple[PagePool, ...]
    kv_views: list[KVCacheView]
    conv_views: dict[tuple[int, ConvStream], ConvStateView]

    def kv(self, layer: int) -> KVCacheView:
        return self.kv_views[layer]

    def conv(self, layer: int, stream: ConvStream) -> ConvStateView:
        return self.conv_views[layer, stream]

    def capture_routing(self, layer: int, topk_ids: Tensor) -> None:
        pass


@dataclass(kw_only=True)
class _Bucket:
    """Buffers of one batch size: the first rows of those shared by all."""

    rows: int
    staged: Tensor
    tensors: Any
    host: _BucketHost
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = field(default=None, repr=False)


class DecodeRunner:
    """Runs steps of one token a row.

    Args:
        host: whose pools, rings and communication the forwards use.
        buckets: batch sizes, ascending.
        max_kv: most keys of a row.
    """

    def __init__(self, model: _Model, host: EmbeddedHost, *, buckets: tuple[int, ...], max_kv: int):
        self.buckets = buckets
        self._model = model
        self._host = host
        self._max_kv = max_kv
        self.device = device = host.last_tokens.device
        most = buckets[-1]

        def made(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        slots = len(host.last_tokens)
        self._fields = fields(len(host.pools))
        self._staged = made(torch.int32, self._fields * most)
        self._tables = [made(torch.int32, *pool.table.shape) for pool in host.pools]
        assert all(len(table) == slots for table in self._tables)
        self._rows = [made(torch.int32, most, pool.live_columns) for pool in host.pools]
        self._writes = [made(torch.int64, most) for _ in host.pools]
        self._input_ids, self._next_position = made(torch.int64, most), made(torch.int64, most)
        self._kv_len, self._history = made(torch.int32, most), made(torch.int32, most)
        self._counting = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._made: dict[int, _Bucket] = {}
        self._pool: Any = None

    def fits(self, step: StepInput) -> bool:
        """Whether a step is of the kind and size that `run` takes."""
        return step.is_decode and len(step.slots) <= self.buckets[-1]

    def follow_tables(self, step: StepInput, *, decode: bool) -> None:
        """Bring the tables on the device up to a step. In a decode step of `run`, the metadata
        kernel adds the page each row writes to."""
        written: dict[int, int] = {}
        for pool, table, changes in zip(self._host.pools, self._tables, step.tables, strict=True):
            if not len(changes.entries):
                continue
            if decode:
                written = dict(zip(step.slots.tolist(), (changes.end - 1).tolist(), strict=True))
            columns = pool.table.shape[1]
            entries = {  # of equal ones the last counts
                slot * columns + column: page
                for slot, column, page in changes.entries.tolist()
                if written.get(slot) != column
            }
            if not entries:
                continue
            at = upload(np.fromiter(entries, np.int64, len(entries)), self.device)
            pages = upload(np.fromiter(entries.values(), np.int32, len(entries)), self.device)
            table.view(-1).scatter_(0, at, pages)

    def run(self, step: StepInput) -> tuple[Tensor, Host]:
        """Start a step that fits.

        Returns: hidden [B, H] of the real rows, to be used before the next call; and the host.
        """
        self.follow_tables(step, decode=True)
        n = len(step.slots)
        bucket = self._bucket(n)
        staged = np.zeros((self._fields, bucket.rows), np.int32)
        staged[:FIRST, :n] = step.slots, step.q_start, step.token_ids
        for index, (pool, changes) in enumerate(zip(self._host.pools, step.tables, strict=True)):
            staged[FIRST + POOL_FIELDS * index, :n] = changes.first
            page = pool.table[step.slots, step.q_start // pool.page_size]
            staged[PAGE + POOL_FIELDS * index, :n] = page
        bucket.staged.copy_(_pinned(staged, self.device), non_blocking=True)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.hidden = self._forward(bucket)
        if self._host.check:
            check_step(bucket.host)
        assert bucket.hidden is not None
        return bucket.hidden[:n], bucket.host

    def capture(self) -> None:
        """Record one graph a bucket, largest first, so that the smaller ones reuse its memory; each
        is run once before, which compiles its kernels."""
        self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        sizes = tqdm(self.buckets[::-1], desc="capturing graphs", unit="graph")
        for size in sizes:
            sizes.set_postfix(batch=size)
            bucket = self._bucket(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._forward(bucket)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads (a server's) may use the GPU meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                bucket.hidden = self._forward(bucket)
            bucket.graph = graph

    def _forward(self, bucket: _Bucket) -> Tensor:
        """Metadata and model over a bucket's buffers."""
        bucket.host.meta = replace(bucket.host.meta, memo={})
        page_size, taps = self._host.pools[0].page_size, self._host.taps
        _derive(self.device)(bucket.tensors, page_size=page_size, taps=taps)
        return self._model.forward(bucket.tensors.input_ids, bucket.host)

    def _bucket(self, rows: int) -> _Bucket:
        size = next(size for size in self.buckets if size >= rows)
        if size not in self._made:
            self._made[size] = self._make(size)
        return self._made[size]

    def _make(self, rows: int) -> _Bucket:
        host = self._host
        staged = self._staged[: self._fields * rows].view(self._fields, rows)
        tables = tuple(
            PoolTensors(table=table, rows=pages[:rows], write=write[:rows])
            for table, pages, write in zip(self._tables, self._rows, self._writes, strict=True)
        )
        tensors = DecodeTensors(
            staged=staged,
            last_tokens=host.last_tokens,
            input_ids=self._input_ids[:rows],
            kv_len=self._kv_len[:rows],
            history=self._history[:rows],
            next_position=self._next_position[:rows],
            pools=tables,
        )
        shared = [
            {
                "page_size": pool.page_size,
                "page_table": table.rows,
                "first_page": staged[FIRST + POOL_FIELDS * index],
                "slot": table.write,
                "window": pool.window,
            }
            for index, (pool, table) in enumerate(zip(host.pools, tables, strict=True))
        ]
        meta = BatchMeta(
            kind="decode",
            num_rows=rows,
            num_tokens=rows,
            q_uniform=1,
            max_q=1,
            max_kv=self._max_kv,
            positions=staged[START],
            cu_seqlens_q=self._counting[: rows + 1],
            q_start=staged[START],
            kv_len=tensors.kv_len,
            token_row=self._counting[:rows],
        )
        conv_views = {
            (layer, stream): ConvStateView(
                state=host.rings.state(layer, stream),
                slot=staged[SLOT],
                token_slot=tables[0].write,
                history=tensors.history,
            )
            for layer in range(host.num_layers)
            for stream in CONV_STREAMS
        }
        bucket_host = _BucketHost(
            meta=meta,
            comm=host.comm,
            pools=host.pools,
            kv_views=host.kv_views(shared),
            conv_views=conv_views,
        )
        return _Bucket(rows=rows, staged=staged, tensors=tensors, host=bucket_host)


def _derive(device: torch.device):
    """What derives the metadata there; Triton is imported only where it runs."""
    if device.type == "cpu":
        return decode_metadata_reference
    from inkling_rocm.kernels.metadata import decode_metadata

    return decode_metadata


def _pinned(values: np.ndarray, device: torch.device) -> Tensor:
    source = torch.from_numpy(values)
    if device.type == "cpu":
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)
