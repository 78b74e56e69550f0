"""Small prompt steps from fixed buffers, by bucket: on a GPU one graph a bucket.

A step of few tokens spends more time in launches than on the device. It runs in the smallest bucket
of at least its tokens and rows; the rest is padding on slot 0. The host lays the step out and sends
it in one copy, and the page tables in another a pool. Larger steps are laid out afresh, as are
steps whose rows are all short: those are verified, split along the keys, by other kernels.
Without capture (on a CPU) the same function over the same buffers is called directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.buckets import SHORT_ROW, BucketHost, bucket_host
from inkling_rocm.engine.executor import LAST_TOKEN, StepInput
from inkling_rocm.engine.graphs import RecordedGraphs
from inkling_rocm.engine.host import EmbeddedHost, Paging
from inkling_rocm.engine.host_checks import check_step
from inkling_rocm.engine.packed import Integer, Packed
from inkling_rocm.engine.upload import upload
from inkling_rocm.host import BatchMeta, Host

FEW_ROWS = 8  # a prompt or a few run among so many rows, others among all there may be


class _Model(Protocol):
    def forward(self, input_ids: Tensor, host: Host) -> Tensor: ...


@dataclass(kw_only=True)
class _Bucket:
    """Buffers of one number of tokens and rows."""

    tokens: int
    rows: int
    fields: Packed
    tables: list[Tensor]
    host: BucketHost
    hidden: Tensor = field(init=False, repr=False)


class PrefillRunner:
    """Runs steps of few tokens, some of them prompts'.

    Args:
        host: whose pools, rings and communication the forwards use.
        tokens: bucket sizes, ascending. max_rows: rows of any step. max_kv: most keys of a row.
        short_row: steps of rows up to this long are not taken.
    """

    def __init__(
        self,
        model: _Model,
        host: EmbeddedHost,
        *,
        tokens: tuple[int, ...],
        max_rows: int,
        max_kv: int,
        short_row: int = SHORT_ROW,
    ):
        self._model = model
        self._host = host
        self._max_kv = max_kv
        self._short_row = short_row
        self._page_size = host.pools[0].page_size
        self.device = host.last_tokens.device
        # Ascending; every bucket has rows for padding alone beside those of a step.
        rows = sorted({min(FEW_ROWS, max_rows), max_rows})
        self.buckets = tuple(
            (size, most) for size in tokens for most in sorted({min(n, size) for n in rows})
        )
        self._made: dict[tuple[int, int], _Bucket] = {}
        self.graphs: RecordedGraphs[tuple[int, int]] = RecordedGraphs()

    @property
    def largest(self) -> str:
        """Of the buckets."""
        return "{} tokens in {} rows".format(*self.buckets[-1])

    def fits(self, step: StepInput) -> bool:
        """Whether `run` takes a step."""
        return (
            int(step.q_len.max(initial=0)) > self._short_row
            and self._size(len(step.token_ids), len(step.slots)) is not None
        )

    def run(self, step: StepInput) -> tuple[Tensor, Host]:
        """Start a step that fits.

        Returns: hidden [T, H] of its tokens, to be used before the next call; and the host.
        """
        size = self._size(len(step.token_ids), len(step.slots))
        assert size is not None
        bucket = self._bucket(size)
        self._lay_out(bucket, step.slots, step.q_start, step.q_len, step.token_ids, step.snapshots)
        if not self.graphs.replay(size):
            self._forward(bucket)
        if self._host.check:
            check_step(bucket.host)
        return bucket.hidden[: len(step.token_ids)], bucket.host

    def capture(self) -> None:
        """Record one graph a bucket."""

        def stages(size: tuple[int, int]) -> list[Callable[[], None]]:
            bucket, nothing = self._bucket(size), np.zeros(0, np.int64)
            # Padding alone: what it computes is finite, and it changes no state.
            self._lay_out(bucket, nothing, nothing, nothing, nothing, None)
            return [lambda: self._forward(bucket)]

        self.graphs.record(self.buckets, stages, progress=self._host.comm.tp_rank == 0)

    def release(self) -> None:
        """Destroy the graphs; steps cannot be run any more."""
        self.graphs.release()

    def _size(self, tokens: int, rows: int) -> tuple[int, int] | None:
        return next((size for size in self.buckets if size[0] >= tokens and size[1] >= rows), None)

    def _lay_out(
        self,
        bucket: _Bucket,
        slots: NDArray,
        q_start: NDArray,
        q_len: NDArray,
        token_ids: NDArray,
        snapshots: NDArray | None,
    ) -> None:
        """Send a step, filled up with rows of at most a page of padding."""
        real_rows, real_tokens = len(slots), len(token_ids)
        missing = bucket.tokens - real_tokens
        page = self._page_size
        padding = np.array([min(page, missing - at) for at in range(0, missing, page)], np.int64)
        nothing = np.zeros(len(padding), np.int64)
        slots, q_start = np.append(slots, nothing), np.append(q_start, nothing)
        q_len = np.append(q_len, padding)
        cu_seqlens = np.full(bucket.rows + 1, bucket.tokens)
        cu_seqlens[0] = 0
        np.cumsum(q_len, out=cu_seqlens[1 : len(q_len) + 1])
        token_row = np.repeat(np.arange(len(q_len)), q_len)
        positions = np.arange(bucket.tokens) + (q_start - cu_seqlens[: len(q_len)])[token_row]
        values = {
            "positions": positions,
            "token_row": token_row,
            "cu_seqlens_q": cu_seqlens,
            "q_start": q_start,
            "kv_len": q_start + q_len,
            "slot": slots,
            "history": np.minimum(q_start, self._host.taps - 1),
            "token_ids": token_ids,
        }
        if snapshots is not None:
            values |= {"snapshot_slot": snapshots[:, 0], "snapshot_position": snapshots[:, 1]}
        for index, pool in enumerate(self._host.pools):
            write = pool.write_slots(slots[token_row], positions)
            write[real_tokens:] = 0
            values |= {f"write{index}": write, f"first_page{index}": pool.first[slots]}
            table = np.zeros((len(slots), 1), np.int32)  # padding reads the sink's page
            if real_rows:
                real = pool.batch_table(slots[:real_rows])
                table = np.zeros((len(slots), real.shape[1]), np.int32)
                table[:real_rows] = real
            bucket.tables[index][: len(slots), : table.shape[1]].copy_(upload(table, self.device))
        bucket.fields.send(values)

    def _forward(self, bucket: _Bucket) -> None:
        """The model over a bucket's buffers."""
        bucket.host.meta = replace(bucket.host.meta, memo={})
        t = bucket.fields.tensors
        row_slots_T = t["slot"].index_select(0, t["token_row"])
        last_T = self._host.last_tokens.index_select(0, row_slots_T).clamp(min=0)
        input_ids = torch.where(t["token_ids"] == LAST_TOKEN, last_T, t["token_ids"])
        bucket.hidden = self._model.forward(input_ids, bucket.host)

    def _bucket(self, size: tuple[int, int]) -> _Bucket:
        if size not in self._made:
            self._made[size] = self._make(*size)
        return self._made[size]

    def _make(self, tokens: int, rows: int) -> _Bucket:
        pools = self._host.pools
        rows += math.ceil(tokens / self._page_size)
        sizes: dict[str, tuple[Integer, int]] = {"token_ids": (np.int64, tokens)}
        sizes |= {f"write{index}": (np.int64, tokens) for index in range(len(pools))}
        sizes |= dict.fromkeys(("positions", "token_row"), (np.int32, tokens))
        sizes |= dict.fromkeys(("q_start", "kv_len", "slot", "history"), (np.int32, rows))
        sizes |= dict.fromkeys(("snapshot_slot", "snapshot_position"), (np.int32, rows))
        sizes |= {f"first_page{index}": (np.int32, rows) for index in range(len(pools))}
        sizes["cu_seqlens_q"] = (np.int32, rows + 1)
        fields = Packed(sizes, self.device)
        t = fields.tensors
        tables = [
            torch.zeros(rows, pool.columns_of(tokens), dtype=torch.int32, device=self.device)
            for pool in pools
        ]
        paging = [
            Paging(table, t[f"first_page{index}"], t[f"write{index}"])
            for index, table in enumerate(tables)
        ]
        meta = BatchMeta(
            kind="prefill",
            num_rows=rows,
            num_tokens=tokens,
            q_uniform=0,
            max_q=tokens,
            max_kv=self._max_kv,
            positions=t["positions"],
            cu_seqlens_q=t["cu_seqlens_q"],
            q_start=t["q_start"],
            kv_len=t["kv_len"],
            token_row=t["token_row"],
        )
        host = bucket_host(
            self._host,
            meta,
            paging,
            slot=t["slot"],
            history=t["history"],
            snapshots=(t["snapshot_slot"], t["snapshot_position"]),
        )
        return _Bucket(tokens=tokens, rows=rows, fields=fields, tables=tables, host=host)
