"""Speculative rounds from fixed buffers, by batch bucket: on a GPU one graph a bucket.

A round verifies every row's drafts in one forward, decides what is accepted, runs all draft blocks
and draws the next drafts (host/round.py has the layout). Nothing in it waits for the device or
needs the host, so that the next round can be started before this one has been read: where its rows
begin and what their tokens are is state on the device. Without capture (on a CPU) the same function
over the same buffers is called directly.

Tested on CPUs, its metadata kernels on emulated AMD code, and captured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.buckets import (
    BucketHost,
    DeviceTables,
    RecordedGraphs,
    bucket_host,
    to_pinned,
)
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.host_checks import check_step
from inkling_rocm.engine.speculative.mtp import MTPDrafter
from inkling_rocm.engine.speculative.round_sampler import RoundSampler
from inkling_rocm.engine.speculative.simulation import simulate_acceptance
from inkling_rocm.host import BatchMeta, Host
from inkling_rocm.host.decode import PoolTensors
from inkling_rocm.host.round import (
    FIRST,
    LIMIT,
    SLOT,
    START,
    LayoutTensors,
    RoundTensors,
    draft_metadata_reference,
    round_fields,
    verify_metadata_reference,
)
from inkling_rocm.model.mtp import DraftBlocks


@dataclass(kw_only=True)
class _Bucket:
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


class RoundRunner:
    """Runs rounds of decoding rows, which verify the same number of drafts and get as many.

    Args:
        host: whose pools, rings and communication the forwards use.
        drafter: whose blocks, drafts and hidden states by slot a round reads and writes, as the
            steps between rounds do.
        buckets: batch sizes, ascending. drafts: numbers of drafts it takes, and then makes.
        max_kv: most keys of a row.
        simulated: see Speculation.
    """

    def __init__(
        self,
        blocks: DraftBlocks,
        host: EmbeddedHost,
        drafter: MTPDrafter,
        sampler: RoundSampler,
        *,
        buckets: tuple[int, ...],
        drafts: tuple[int, ...],
        max_kv: int,
        simulated: Tensor | None = None,
    ):
        self.buckets = buckets
        self.drafts = drafts
        self._blocks, self._model, self._depths = blocks, blocks.model, blocks.depths
        self._host = host
        self._drafter = drafter
        self._sampler = sampler
        self._max_kv = max_kv + 2 * blocks.depths
        self._simulated = simulated
        self._tables = DeviceTables(host)
        self.device = host.last_tokens.device
        slots = len(host.last_tokens)
        self._length = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self._recent = torch.zeros(slots, self._depths, dtype=torch.int64, device=self.device)
        self._flat: dict[tuple, Tensor] = {}
        self._made: dict[tuple[int, int], _Bucket] = {}
        self.graphs: RecordedGraphs[tuple[int, int]] = RecordedGraphs()

    @property
    def largest(self) -> str:
        """Of the buckets."""
        return f"{self.buckets[-1]} rows"

    def takes(self, rows: int, drafts: int) -> bool:
        """Whether a batch of so many rows can be run, each with so many drafts."""
        return rows <= self.buckets[-1] and drafts in self.drafts

    def follow_tables(self, step: StepInput) -> None:
        """Bring the tables on the device up to a step that is not a round."""
        self._tables.follow(step)

    def run(self, step: StepInput) -> tuple[Tensor, Tensor, Host]:
        """Start a round.

        Returns: tokens [B, k + 1] of the real rows, -1 from where there is none; hidden
            [R (k + 1), H] with R >= B, whose logits they were drawn from; both to be used before
            the next call; and the host for those.
        """
        begin = step.round
        assert begin is not None
        self._tables.follow(step)
        n, pools = len(step.slots), len(self._host.pools)
        bucket = self._bucket(n, begin.drafts)
        t = bucket.tensors
        staged = np.zeros(tuple(t.staged.shape), np.int32)
        staged[SLOT, :n], staged[START, :n] = step.slots, begin.start
        staged[LIMIT, :n] = step.tables[0].end * self._host.pools[0].page_size
        for index, changes in enumerate(step.tables):
            staged[FIRST + index, :n] = changes.first
        staged[FIRST + pools :, :n] = begin.recent.T
        t.staged.copy_(to_pinned(staged, self.device), non_blocking=True)
        self._sampler.prepare(step)
        if not self.graphs.replay((t.rows, t.offered)):
            self._round(bucket)
        if self._host.check:
            check_step(bucket.verify_host)
            check_step(bucket.draft_host)
        return bucket.tokens[:n], bucket.verified, bucket.verify_host

    def capture(self, *, one_graph: bool = True) -> None:
        """Record the rounds of every bucket and number of drafts.

        Args: one_graph: a round is one graph; else the verification and every depth are graphs of
            their own, to compare with.
        """

        def stages(size: tuple[int, int]) -> list[Callable[[], None]]:
            bucket = self._bucket(*size)
            return [partial(self._round, bucket)] if one_graph else self._stages(bucket)

        sizes = [(rows, drafts) for rows in self.buckets for drafts in self.drafts]
        self.graphs.record(sizes, stages, progress=self._host.comm.tp_rank == 0)

    def release(self) -> None:
        """Destroy the graphs; rounds cannot be run any more."""
        self.graphs.release()

    def _round(self, bucket: _Bucket) -> None:
        for stage in self._stages(bucket):
            stage()

    def _stages(self, bucket: _Bucket) -> list[Callable[[], None]]:
        """A round in its parts."""
        depths = [partial(self._draft, bucket, depth) for depth in range(self._depths)]
        return [partial(self._verify, bucket), *depths]

    def _verify(self, bucket: _Bucket) -> None:
        """Compute the rows' drafts, decide, and lay out the draft blocks' window."""
        t, host, drafter = bucket.tensors, bucket.verify_host, self._drafter
        pool = self._host.pools[0]
        verify_metadata, draft_metadata = _derive(self.device)
        shape = {"page_size": pool.page_size, "taps": self._host.taps}
        for each in (bucket.verify_host, bucket.draft_host):
            each.meta = replace(each.meta, memo={})
        verify_metadata(t, **shape)
        hidden_TH = self._model.forward(t.input_ids, host)
        kept = drafter.hidden.view(-1, hidden_TH.shape[1])
        kept.index_copy_(0, t.hidden_to, hidden_TH)
        bucket.verified = hidden_TH
        logits_BMV = self._model.logits(hidden_TH, host).unflatten(0, (t.rows, -1))
        stash = None if drafter.logits is None else drafter.logits[t.slot, : t.offered]
        tokens_BM = self._sampler.verify(logits_BMV, t.row_drafts, stash, t.position)
        if self._simulated is not None:
            keys_B = t.position * len(self._length) + t.slot
            tokens_BM = simulate_acceptance(
                tokens_BM, t.row_drafts, keys_B, probability=self._simulated
            )[0]
        bucket.tokens = tokens_BM
        draft_metadata(t, tokens_BM, **shape)
        bucket.hidden = kept.index_select(0, t.hidden_from)

    def _draft(self, bucket: _Bucket, depth: int) -> None:
        """Run one draft block over the window, and draw its draft."""
        t, host, drafter = bucket.tensors, bucket.draft_host, self._drafter
        N, k = self._depths, t.offered
        ids = t.window_ids[:, depth : depth + 2 * N].reshape(-1)
        bucket.hidden = self._blocks.forward(depth, ids, bucket.hidden, host)
        if depth < k:
            logits_BV = self._model.logits(bucket.hidden.index_select(0, t.tip), host)
            drafts_B = self._sampler.draft(logits_BV, depth, t.draft_position)
            bucket.drafts[:, depth] = drafts_B
            at = (t.column + depth)[:, None]
            t.window_ids.scatter_(1, at, drafts_B.clamp(min=0)[:, None])
            if drafter.logits is not None:
                drafter.logits[t.slot, depth] = logits_BV
        if depth == N - 1:
            drafter.tokens[t.slot] = bucket.drafts

    def _bucket(self, rows: int, drafts: int) -> _Bucket:
        size = next(size for size in self.buckets if size >= rows)
        if (size, drafts) not in self._made:
            self._made[size, drafts] = self._make(size, drafts)
        return self._made[size, drafts]

    def _buffer(self, dtype: torch.dtype, name: str, rows: int, *shape: int) -> Tensor:
        """The first rows of what all buckets share, [rows, *shape]."""
        key = (name, shape)
        if key not in self._flat:
            most = self.buckets[-1]
            self._flat[key] = torch.zeros(most, *shape, dtype=dtype, device=self.device)
        return self._flat[key][:rows]

    def _make(self, rows: int, k: int) -> _Bucket:
        N = self._depths
        int32, int64 = (partial(self._buffer, dtype) for dtype in (torch.int32, torch.int64))
        staged = int32("staged", rows, round_fields(len(self._host.pools), N))
        tensors = RoundTensors(
            staged=staged.view(-1, rows),
            length=self._length,
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
        drafts = torch.full((rows, N), -1, dtype=torch.int64, device=self.device)
        return _Bucket(
            tensors=tensors,
            verify_host=self._host_of(tensors, tensors.verify, k + 1),
            draft_host=self._host_of(tensors, tensors.draft, 2 * N),
            drafts=drafts,
        )

    def _layout(self, name: str, rows: int, length: int) -> LayoutTensors:
        int32 = partial(self._buffer, torch.int32)
        pools = []
        for pool, table in zip(self._host.pools, self._tables.tensors, strict=True):
            columns = pool.columns_for(self._depths)
            pools.append(
                PoolTensors(
                    table=table,
                    rows=int32(f"{name} {pool.name} rows", rows, columns),
                    write=self._buffer(
                        torch.int64, f"{name} {pool.name} write", rows, length
                    ).flatten(),
                )
            )
        return LayoutTensors(
            positions=int32(f"{name} positions", rows, length).flatten(),
            q_start=int32(f"{name} q_start", rows),
            kv_len=int32(f"{name} kv_len", rows),
            history=int32(f"{name} history", rows),
            pools=tuple(pools),
        )

    def _host_of(self, t: RoundTensors, layout: LayoutTensors, length: int) -> BucketHost:
        shared = [
            {
                "page_size": pool.page_size,
                "page_table": tensors.rows,
                "first_page": t.staged[FIRST + index],
                "slot": tensors.write,
                "window": pool.window,
            }
            for index, (pool, tensors) in enumerate(
                zip(self._host.pools, layout.pools, strict=True)
            )
        ]
        counting = torch.arange(t.rows + 1, dtype=torch.int32, device=self.device)
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
        return bucket_host(self._host, meta, shared, slot=t.staged[SLOT], history=layout.history)


def _derive(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
    """What derives the metadata there; Triton is imported only where it runs."""
    if device.type == "cpu":
        return verify_metadata_reference, draft_metadata_reference
    from inkling_rocm.kernels.round_metadata import draft_metadata, verify_metadata

    return verify_metadata, draft_metadata
