"""The fixed buffers of rounds (round_runner.py): those of a bucket are the first rows of what all
share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from inkling_rocm.engine.buckets import BucketHost, DeviceTables, bucket_host
from inkling_rocm.engine.host import EmbeddedHost, Paging
from inkling_rocm.engine.speculative.mtp import MTPDrafter
from inkling_rocm.host import BatchMeta
from inkling_rocm.host.decode import PoolTensors
from inkling_rocm.host.round import FIRST, SLOT, LayoutTensors, RoundTensors, round_fields


@dataclass(kw_only=True)
class RoundBucket:
    """Buffers of one batch size and number of drafts, and what a round leaves in them: `verified`
    are the hidden states that the tokens were drawn from. Logits are not kept: of every bucket they
    would be gigabytes."""

    tensors: RoundTensors
    verify_host: BucketHost
    draft_host: BucketHost
    drafts: Tensor
    verified: Tensor = field(init=False, repr=False)
    tokens: Tensor = field(init=False, repr=False)
    hidden: Tensor = field(init=False, repr=False)


class RoundBuffers:
    """Makes the buckets of rounds.

    Args:
        host: whose pools, rings and communication the forwards use.
        drafter: whose drafts by slot they read.
        tables: the pools' page tables. most_rows: of a bucket. max_kv: most keys of a row.

    Attributes:
        length: int32 [slots], start of each slot's next round.
    """

    def __init__(
        self,
        host: EmbeddedHost,
        drafter: MTPDrafter,
        tables: DeviceTables,
        *,
        most_rows: int,
        max_kv: int,
    ):
        self._host = host
        self._drafter = drafter
        self._tables = tables
        self._most_rows = most_rows
        self._max_kv = max_kv
        self._depths = drafter.depths
        self._device = host.last_tokens.device
        slots = len(host.last_tokens)
        self.length = torch.zeros(slots, dtype=torch.int32, device=self._device)
        self._recent = torch.zeros(slots, self._depths, dtype=torch.int64, device=self._device)
        self._shared: dict[tuple, Tensor] = {}

    def make(self, rows: int, k: int) -> RoundBucket:
        """Of so many rows, each with k drafts."""
        N = self._depths
        int32, int64 = (partial(self._buffer, dtype) for dtype in (torch.int32, torch.int64))
        staged = int32("staged", rows, round_fields(len(self._host.pools), N))
        tensors = RoundTensors(
            staged=staged.view(-1, rows),
            length=self.length,
            recent=self._recent,
            drafts=self._drafter.tokens,
            verify=self._layout("verify", rows, k + 1),
            slot=int64("slot", rows),
            input_ids=int64("input_ids", rows, k + 1).flatten(),
            row_drafts=int64("row_drafts", rows, k),
            position=int64("position", rows),
            hidden_to=int64("hidden_to", rows, k + 1).flatten(),
            known=int64("known", rows, N + k + 1),
            draft=self._layout("draft", rows, 2 * N),
            window_ids=int64("window_ids", rows, 3 * N),
            hidden_from=int64("hidden_from", rows, 2 * N).flatten(),
            tip=int64("tip", rows),
            column=int64("column", rows),
            draft_position=int64("draft_position", rows),
        )
        drafts = torch.full((rows, N), -1, dtype=torch.int64, device=self._device)
        return RoundBucket(
            tensors=tensors,
            verify_host=self._host_of(tensors, tensors.verify, k + 1),
            draft_host=self._host_of(tensors, tensors.draft, 2 * N),
            drafts=drafts,
        )

    def _layout(self, name: str, rows: int, length: int) -> LayoutTensors:
        int32, int64 = (partial(self._buffer, dtype) for dtype in (torch.int32, torch.int64))
        pools = [
            PoolTensors(
                table=table,
                rows=int32(f"{name} {pool.name} rows", rows, pool.columns_for(self._depths)),
                write=int64(f"{name} {pool.name} write", rows, length).flatten(),
            )
            for pool, table in zip(self._host.pools, self._tables.tensors, strict=True)
        ]
        return LayoutTensors(
            positions=int32(f"{name} positions", rows, length).flatten(),
            q_start=int32(f"{name} q_start", rows),
            kv_len=int32(f"{name} kv_len", rows),
            history=int32(f"{name} history", rows),
            pools=tuple(pools),
        )

    def _host_of(self, t: RoundTensors, layout: LayoutTensors, length: int) -> BucketHost:
        paging = [
            Paging(tensors.rows, t.staged[FIRST + index], tensors.write)
            for index, tensors in enumerate(layout.pools)
        ]
        counting = torch.arange(t.rows + 1, dtype=torch.int32, device=self._device)
        meta = BatchMeta(
            kind="decode" if length == 1 else "verify",
            num_rows=t.rows,
            num_tokens=t.rows * length,
            q_uniform=length,
            max_q=length,
            max_kv=self._max_kv,
            positions=layout.positions,
            cu_seqlens_q=counting * length,
            q_start=layout.q_start,
            kv_len=layout.kv_len,
            token_row=counting[:-1].repeat_interleave(length),
        )
        return bucket_host(self._host, meta, paging, slot=t.staged[SLOT], history=layout.history)

    def _buffer(self, dtype: torch.dtype, name: str, rows: int, *shape: int) -> Tensor:
        """The first rows of what all buckets share, [rows, *shape]."""
        key = (name, shape)
        if key not in self._shared:
            most = self._most_rows
            self._shared[key] = torch.zeros(most, *shape, dtype=dtype, device=self._device)
        return self._shared[key][:rows]
