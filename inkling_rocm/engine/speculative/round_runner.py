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
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.buckets import DeviceTables
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.graphs import RecordedGraphs
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.host_checks import check_step
from inkling_rocm.engine.speculative.mtp import MTPDrafter
from inkling_rocm.engine.speculative.round_buffers import RoundBucket, RoundBuffers
from inkling_rocm.engine.speculative.round_sampler import RoundSampler
from inkling_rocm.engine.speculative.simulation import simulate_acceptance
from inkling_rocm.engine.upload import to_pinned
from inkling_rocm.host import Host
from inkling_rocm.host.round import (
    FIRST,
    LIMIT,
    SLOT,
    START,
    draft_metadata_reference,
    verify_metadata_reference,
)
from inkling_rocm.model.mtp import DraftBlocks


class RoundRunner:
    """Runs rounds of decoding rows, which verify the same number of drafts and get as many.

    Args:
        host: whose pools, rings and communication the forwards use.
        drafter: whose blocks, drafts and hidden states by slot a round reads and writes, as the
            steps between rounds do.
        buckets: batch sizes, ascending. drafts: numbers of drafts it takes, and then makes.
        max_kv: most keys of a row.
        simulated: see Speculation.

    Attributes:
        length: int32 [slots], start of each slot's next round.
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
        self._simulated = simulated
        self._tables = DeviceTables(host)
        self.device = host.last_tokens.device
        self._buffers = RoundBuffers(
            host,
            drafter,
            self._tables,
            most_rows=buckets[-1],
            max_kv=max_kv + 2 * blocks.depths,
        )
        self.length = self._buffers.length
        self._made: dict[tuple[int, int], RoundBucket] = {}
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

    def _round(self, bucket: RoundBucket) -> None:
        for stage in self._stages(bucket):
            stage()

    def _stages(self, bucket: RoundBucket) -> list[Callable[[], None]]:
        """A round in its parts."""
        depths = [partial(self._draft, bucket, depth) for depth in range(self._depths)]
        return [partial(self._verify, bucket), *depths]

    def _verify(self, bucket: RoundBucket) -> None:
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
            keys_B = t.position * len(self.length) + t.slot
            tokens_BM = simulate_acceptance(
                tokens_BM, t.row_drafts, keys_B, probability=self._simulated
            )[0]
        bucket.tokens = tokens_BM
        draft_metadata(t, tokens_BM, **shape)
        bucket.hidden = kept.index_select(0, t.hidden_from)

    def _draft(self, bucket: RoundBucket, depth: int) -> None:
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

    def _bucket(self, rows: int, drafts: int) -> RoundBucket:
        size = next(size for size in self.buckets if size >= rows)
        if (size, drafts) not in self._made:
            self._made[size, drafts] = self._buffers.make(size, drafts)
        return self._made[size, drafts]


def _derive(device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
    """What derives the metadata there; Triton is imported only where it runs."""
    if device.type == "cpu":
        return verify_metadata_reference, draft_metadata_reference
    from inkling_rocm.kernels.round_metadata import draft_metadata, verify_metadata

    return verify_metadata, draft_metadata
