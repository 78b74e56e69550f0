"""Forwards from fixed buffers, by bucket: what decode steps, prompt steps and rounds share.

A step of n rows runs in the smallest bucket of at least n rows; the rest is padding on slot 0. On a
GPU each bucket is recorded as a graph (graphs.py); page tables live on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.host import EmbeddedHost, Paging
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.upload import upload
from inkling_rocm.host import (
    CONV_STREAMS,
    BatchMeta,
    Comm,
    ConvStateView,
    ConvStream,
    KVCacheView,
)

SHORT_ROW = 16  # the most tokens of a row that is verified (ops/rel_attention_triton.py)
SMALLEST_PROMPT, LARGEST_PROMPT = 32, 1024  # tokens; the latter unless told otherwise
SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32)
BUCKET_STEP = 16


def decode_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes to run: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, ... and `most`."""
    steps = range(SMALL_BUCKETS[-1] + BUCKET_STEP, most, BUCKET_STEP)
    return (*(size for size in SMALL_BUCKETS if size < most), *steps, most)


def captured_sizes(args: EngineArgs, max_running: int) -> tuple[int, ...]:
    """Batch sizes that get a graph, ascending, where anything is captured."""
    most = min(args.cuda_graph_max_bs or max_running, max_running)
    if args.cuda_graph_bs is not None:
        return tuple(size for size in args.cuda_graph_bs if size <= most) or (most,)
    return decode_buckets(most)


def captured_prompts(args: EngineArgs, *, chunk: int, max_running: int) -> tuple[int, ...]:
    """Tokens of the prompt steps that get a graph, ascending, where decode steps have some; empty =
    none has. Args: chunk: most prompt tokens of a step."""
    if args.disable_prefill_cuda_graph or args.speculative_algorithm is not None:
        return ()
    most = min(args.cuda_graph_max_bs_prefill or LARGEST_PROMPT, chunk + max_running)
    if min(chunk, most) <= SHORT_ROW:
        return ()
    sizes = [SMALLEST_PROMPT]
    while sizes[-1] < most:  # a step is never padded to more than twice its tokens
        sizes.append(2 * sizes[-1])
    return (*sizes[:-1], most)


@dataclass(kw_only=True)
class BucketHost:
    """Host of the forwards of one bucket."""

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


def bucket_host(
    host: EmbeddedHost,
    meta: BatchMeta,
    paging: Sequence[Paging],
    *,
    slot: Tensor,
    history: Tensor,
    snapshots: tuple[Tensor, Tensor] | None = None,
) -> BucketHost:
    """A host over fixed buffers.

    Args:
        host: whose pools, rings and communication it uses.
        paging: of each pool.
        slot, history: int32 [B], the rows' ring slots and usable history. snapshots: int32 [B]
            each, where their rings are kept and as of which position; None = no forward keeps any.
    """
    return BucketHost(
        meta=meta,
        comm=host.comm,
        pools=host.pools,
        kv_views=host.kv_views(paging),
        conv_views={
            (layer, stream): ConvStateView(
                state=host.rings.state(layer, stream),
                slot=slot,
                # A token has slot 0 in one pool exactly when it has in the other.
                token_slot=paging[0].slot,
                history=history,
                snapshot_slot=None if snapshots is None else snapshots[0],
                snapshot_position=None if snapshots is None else snapshots[1],
            )
            for layer in range(host.num_layers)
            for stream in CONV_STREAMS
        },
    )


class DeviceTables:
    """The pools' page tables on the device, brought up to each step."""

    def __init__(self, host: EmbeddedHost):
        self._host = host
        self.device = host.last_tokens.device
        self.tensors = [
            torch.zeros(pool.table.shape, dtype=torch.int32, device=self.device)
            for pool in host.pools
        ]
        assert all(len(table) == len(host.last_tokens) for table in self.tensors)

    def follow(self, step: StepInput, written: Mapping[int, int] | None = None) -> None:
        """Take over a step's changes.

        Args: written: by slot, a column that the step's metadata kernel will set.
        """
        written = written or {}
        for pool, table, changes in zip(self._host.pools, self.tensors, step.tables, strict=True):
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
