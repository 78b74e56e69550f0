"""Decode steps from fixed buffers, by batch bucket: on a GPU one graph a bucket.

A step of n rows runs in the smallest bucket of at least n rows; the rest is padding on slot 0. The
host sends one small array; a metadata kernel inside the graph derives everything else from it and
from page tables that live on the device. The next tokens are drawn in the graph too and kept for
the next step; where logits are edited the caller draws from the hidden states instead. Without
capture (in tests on a CPU) the same functions over the same buffers are called directly; an engine
that captures nothing (on a CPU, or with --disable-cuda-graph) lays every step out afresh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.buckets import BucketHost, DeviceTables, bucket_host
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.graphs import RecordedGraphs
from inkling_rocm.engine.host import EmbeddedHost, Paging
from inkling_rocm.engine.host_checks import check_step
from inkling_rocm.engine.speculative.round_sampler import RoundSampler
from inkling_rocm.engine.upload import to_pinned
from inkling_rocm.host import BatchMeta, Host
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


class _Model(Protocol):
    def forward(self, input_ids: Tensor, host: Host) -> Tensor: ...

    def logits(self, hidden_nH: Tensor, host: Host) -> Tensor: ...


@dataclass(kw_only=True)
class _Bucket:
    """Buffers of one batch size: the first rows of those shared by all."""

    rows: int
    staged: Tensor
    tensors: Any
    host: BucketHost
    hidden: Tensor = field(init=False, repr=False)
    tokens: Tensor = field(init=False, repr=False)


class DecodeRunner:
    """Runs steps of one token a row.

    Args:
        host: whose pools, rings and communication the forwards use.
        sampler: draws where no logits are edited.
        buckets: batch sizes, ascending.
        max_kv: most keys of a row.
    """

    def __init__(
        self,
        model: _Model,
        host: EmbeddedHost,
        sampler: RoundSampler,
        *,
        buckets: tuple[int, ...],
        max_kv: int,
    ):
        self.buckets = buckets
        self._model = model
        self._host = host
        self._sampler = sampler
        self._max_kv = max_kv
        self.device = device = host.last_tokens.device
        most = buckets[-1]

        def made(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._fields = fields(len(host.pools))
        self._staged = made(torch.int32, self._fields * most)
        self.tables = DeviceTables(host)
        self._rows = [made(torch.int32, most, pool.live_columns) for pool in host.pools]
        self._writes = [made(torch.int64, most) for _ in host.pools]
        self._input_ids, self._next_position = made(torch.int64, most), made(torch.int64, most)
        self._kv_len, self._history = made(torch.int32, most), made(torch.int32, most)
        self._counting = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._made: dict[int, _Bucket] = {}
        self.graphs: RecordedGraphs[int] = RecordedGraphs()

    @property
    def largest(self) -> str:
        """Of the buckets."""
        return f"{self.buckets[-1]} rows"

    def fits(self, step: StepInput) -> bool:
        """Whether a step is of the kind and size that `run` takes."""
        return step.is_decode and len(step.slots) <= self.buckets[-1]

    def follow_tables(self, step: StepInput, *, decode: bool) -> None:
        """Bring the tables on the device up to a step. In a decode step of `run`, the metadata
        kernel adds the page each row writes to."""
        written: dict[int, int] = {}
        if decode:
            # Every pool is written at the same position, so at the same page index.
            ends = (step.tables[0].end - 1).tolist()
            written = dict(zip(step.slots.tolist(), ends, strict=True))
        self.tables.follow(step, written)

    def run(self, step: StepInput) -> tuple[Tensor, Host, Tensor | None]:
        """Start a step that fits.

        Returns: hidden [R, H] of all rows of the bucket, the real ones first, and tokens int64 [B]
            of the real rows, to be used before the next call, and the host between them. The tokens
            are None where logits are edited; else they are kept in last_tokens already.
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
        bucket.staged.copy_(to_pinned(staged, self.device), non_blocking=True)
        if not step.edited:
            self._sampler.prepare(step)
        if not self.graphs.replay(bucket.rows):
            self._forward(bucket)
            if not step.edited:
                self._draw(bucket)
        if self._host.check:
            check_step(bucket.host)
        return bucket.hidden, bucket.host, None if step.edited else bucket.tokens[:n]

    def compile(self) -> None:
        """Launch a step up to its logits over every bucket; the largest first, because scratch
        memory that was outgrown is kept."""
        for size in reversed(self.buckets):
            bucket = self._bucket(size)
            self._forward(bucket)
            self._model.logits(bucket.hidden, bucket.host)

    def capture(self) -> None:
        """Record one graph a bucket."""

        def stages(size: int) -> list[Callable[[], None]]:
            bucket = self._bucket(size)

            def whole() -> None:
                self._forward(bucket)
                self._draw(bucket)

            return [whole]

        self.graphs.record(self.buckets, stages, progress=self._host.comm.tp_rank == 0)

    def release(self) -> None:
        """Destroy the graphs; steps cannot be run any more."""
        self.graphs.release()

    def _forward(self, bucket: _Bucket) -> None:
        """Metadata and model over a bucket's buffers."""
        bucket.host.meta = replace(bucket.host.meta, memo={})
        page_size, taps = self._host.pools[0].page_size, self._host.taps
        _derive(self.device)(bucket.tensors, page_size=page_size, taps=taps)
        bucket.hidden = self._model.forward(bucket.tensors.input_ids, bucket.host)

    def _draw(self, bucket: _Bucket) -> None:
        """The next tokens, for the caller and for the next step."""
        logits_BV = self._model.logits(bucket.hidden, bucket.host)
        bucket.tokens = self._sampler.draw(logits_BV, bucket.tensors.next_position)
        self._host.last_tokens[bucket.staged[SLOT].long()] = bucket.tokens

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
            for table, pages, write in zip(
                self.tables.tensors, self._rows, self._writes, strict=True
            )
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
        paging = [
            Paging(table.rows, staged[FIRST + POOL_FIELDS * index], table.write)
            for index, table in enumerate(tables)
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
        layout = bucket_host(host, meta, paging, slot=staged[SLOT], history=tensors.history)
        return _Bucket(rows=rows, staged=staged, tensors=tensors, host=layout)


def _derive(device: torch.device):
    """What derives the metadata there; Triton is imported only where it runs."""
    if device.type == "cpu":
        return decode_metadata_reference
    from inkling_rocm.kernels.metadata import decode_metadata

    return decode_metadata
