"""The embedded host: turns a batch of (slot, start, length) rows into what the model reads.

All indices of a step are computed with numpy in fixed buffers. On a CPU the tensors are those
buffers; on a GPU each is copied once to a tensor whose address never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.config import TextConfig
from inkling_rocm.engine.host_checks import check_step
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.rings import ConvRings
from inkling_rocm.engine.upload import upload
from inkling_rocm.host import (
    CONV_STREAMS,
    BatchMeta,
    Comm,
    ConvStateView,
    ConvStream,
    KVCacheView,
    SingleRank,
)

MAX_CACHED_VIEWS = 64


class Paging(NamedTuple):
    """Where the keys of a batch lie in the layers of one pool; see KVCacheView."""

    page_table: Tensor
    first_page: Tensor
    slot: Tensor


class _Buffer:
    """A fixed integer buffer: of the device, and on a CPU also seen as a numpy array."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        self._device = torch.zeros(size, dtype=dtype, device=device)
        self._host = self._device.numpy() if device.type == "cpu" else None

    def put(self, values: NDArray) -> Tensor:
        """Store values (any shape); the device tensor over them, same shape."""
        return self.view(values.shape, self.store(values))

    def store(self, values: NDArray) -> int:
        size = values.size
        if self._host is not None:
            self._host[:size].reshape(values.shape)[...] = values
        else:
            staged = torch.empty(values.shape, dtype=self._device.dtype, pin_memory=True)
            staged.numpy()[...] = values
            self._device[:size].view(values.shape).copy_(staged, non_blocking=True)
        return size

    def view(self, shape: tuple[int, ...], size: int) -> Tensor:
        return self._device[:size].view(shape)

    def rows(self, pitch: int, shape: tuple[int, int]) -> Tensor:
        """The beginnings of the first rows of a table of this pitch: Triton compiles kernels again
        for another stride, so page tables keep theirs."""
        return self._device.view(-1, pitch)[: shape[0], : shape[1]]

    def store_rows(self, pitch: int, values: NDArray) -> None:
        target = self.rows(pitch, values.shape)
        if self._host is not None:
            target.numpy()[...] = values
        else:
            target.copy_(upload(values, target.device))


class EmbeddedHost:
    """Host of one forward after `prepare`.

    Args:
        max_tokens, max_rows: most tokens and rows of one forward, padding included.
        check: assert the host invariants on every step.

    Attributes:
        last_tokens: int64 [slots], the token sampled last for each sequence slot.
    """

    meta: BatchMeta

    def __init__(
        self,
        text: TextConfig,
        pools: tuple[PagePool, ...],
        rings: ConvRings,
        *,
        max_tokens: int,
        max_rows: int,
        device: torch.device,
        comm: Comm | None = None,
        check: bool = False,
    ):
        self.comm = comm or SingleRank()
        self.pools = pools
        self.rings = rings
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.taps = text.conv_taps
        self.check = check
        self._layers = {layer: index for index, pool in enumerate(pools) for layer in pool.layers}
        self.num_layers = text.num_layers

        def int32(size: int) -> _Buffer:
            return _Buffer(size, torch.int32, device)

        def int64(size: int) -> _Buffer:
            return _Buffer(size, torch.int64, device)

        self._positions, self._token_row = int32(max_tokens), int32(max_tokens)
        self._cu_seqlens = int32(max_rows + 1)
        self._q_start, self._kv_len = int32(max_rows), int32(max_rows)
        self._conv_slot, self._history = int32(max_rows), int32(max_rows)
        # Each has its own memory: Triton compiles kernels again for arguments that are not aligned.
        self._snapshots = int32(max_rows), int32(max_rows)
        self._tables = [int32(max_rows * pool.table.shape[1]) for pool in pools]
        self._first_page = [int32(max_rows) for _ in pools]
        self._slots = [int64(max_tokens) for _ in pools]
        self._input_ids = int64(max_tokens)
        self.last_tokens = torch.zeros(rings.total + 1, dtype=torch.int64, device=device)
        self._views: dict[tuple, tuple[list, dict]] = {}

    def prepare(
        self,
        slots: NDArray,
        q_start: NDArray,
        q_len: NDArray,
        *,
        pad_tokens: int = 0,
        pad_rows: int = 0,
        snapshots: NDArray | None = None,
    ) -> None:
        """Lay out one forward; pages up to q_start + q_len are allocated.

        Args:
            slots, q_start, q_len: int64 [B], sequence slot, absolute first position, tokens.
            pad_tokens: tokens without effect to append, in rows of at most a page.
            pad_rows: empty rows to append after those.
            snapshots: int32 [B, 2], see StepInput.
        """
        real_tokens = int(q_len.sum())
        uniform = len(q_len) > 0 and bool((q_len == q_len[0]).all())
        if pad_tokens or pad_rows:
            page = int(q_len[0]) if uniform else self.pools[0].page_size
            page = min(page, self.pools[0].page_size)
            lengths = [min(page, pad_tokens - at) for at in range(0, pad_tokens, page)]
            padding = np.array(lengths + [0] * pad_rows, np.int64)
            nothing = np.zeros(len(padding), np.int64)
            slots, q_start = np.append(slots, nothing), np.append(q_start, nothing)
            q_len = np.append(q_len, padding)
            uniform = uniform and bool((q_len == q_len[0]).all())
        rows, kv_len = len(slots), q_start + q_len
        cu_seqlens = np.zeros(rows + 1, np.int64)
        np.cumsum(q_len, out=cu_seqlens[1:])
        tokens = int(cu_seqlens[-1])
        if rows == tokens and uniform:
            token_row, positions = np.arange(rows), q_start
        else:
            token_row = np.repeat(np.arange(rows), q_len)
            positions = np.arange(tokens) + (q_start - cu_seqlens[:-1])[token_row]
        max_q = int(q_len.max(initial=0))
        self.meta = BatchMeta(
            kind="decode" if uniform and max_q == 1 else "prefill",
            num_rows=rows,
            num_tokens=tokens,
            q_uniform=max_q if uniform else 0,
            max_q=max_q,
            max_kv=int(kv_len.max(initial=0)),
            positions=self._positions.put(positions),
            cu_seqlens_q=self._cu_seqlens.put(cu_seqlens),
            q_start=self._q_start.put(q_start),
            kv_len=self._kv_len.put(kv_len),
            token_row=self._token_row.put(token_row),
        )
        if snapshots is not None:
            for buffer, values in zip(self._snapshots, snapshots.T, strict=True):
                kept = np.zeros(rows, np.int32)
                kept[: len(snapshots)] = values
                buffer.store(kept)
        self._conv_slot.store(slots)
        self._history.store(np.minimum(q_start, self.taps - 1))
        shape = [rows, tokens]
        token_slots = slots[token_row]
        for index, pool in enumerate(self.pools):
            table = pool.batch_table(slots)
            shape.append(table.shape[1])
            self._tables[index].store_rows(pool.table.shape[1], table)
            self._first_page[index].store(pool.first[slots])
            # Padding rows have sequence slot 0, whose page table is all sink; their offset in the
            # page must go too.
            write = pool.write_slots(token_slots, positions)
            write[real_tokens:] = 0
            self._slots[index].store(write)
        self._kv_views, self._conv_views = self._views_of(snapshots is not None, tuple(shape))
        if self.check:
            check_step(self)

    def input_ids(self, ids: NDArray) -> Tensor:
        """The step's token ids (padding gets id 0), int64 [T]."""
        padded = np.zeros(self.meta.num_tokens, np.int64)
        padded[: len(ids)] = ids
        return self._input_ids.put(padded)

    def kv(self, layer: int) -> KVCacheView:
        return self._kv_views[layer]

    def conv(self, layer: int, stream: ConvStream) -> ConvStateView:
        return self._conv_views[layer, stream]

    def capture_routing(self, layer: int, topk_ids: Tensor) -> None:
        pass

    def _views_of(self, snapshots: bool, shape: tuple[int, ...]) -> tuple[list, dict]:
        """Views of a batch of this shape, with snapshots or without: they lie over fixed buffers,
        so steps of equal shape share them."""
        found = self._views.get((snapshots, shape))
        if found is None:
            if len(self._views) >= MAX_CACHED_VIEWS:
                self._views.clear()
            found = self._views[snapshots, shape] = self._make_views(snapshots, *shape)
        return found

    def _make_views(
        self, snapshots: bool, rows: int, tokens: int, *columns: int
    ) -> tuple[list, dict]:
        paging = [
            Paging(
                self._tables[index].rows(pool.table.shape[1], (rows, columns[index])),
                self._first_page[index].view((rows,), rows),
                self._slots[index].view((tokens,), tokens),
            )
            for index, pool in enumerate(self.pools)
        ]
        ring: dict[str, Any] = {
            "slot": self._conv_slot.view((rows,), rows),
            # A token has slot 0 in one pool exactly when it has in the other.
            "token_slot": paging[0].slot,
            "history": self._history.view((rows,), rows),
        }
        if snapshots:
            slot, position = (buffer.view((rows,), rows) for buffer in self._snapshots)
            ring |= {"snapshot_slot": slot, "snapshot_position": position}
        conv_views = {
            (layer, stream): ConvStateView(state=self.rings.state(layer, stream), **ring)
            for layer in range(self.num_layers)
            for stream in CONV_STREAMS
        }
        return self.kv_views(paging), conv_views

    def kv_views(self, paging: Sequence[Paging]) -> list[KVCacheView]:
        """One view a layer, over what all layers of its pool share."""
        views = []
        for layer in range(self.num_layers):
            index = self._layers[layer]
            pool = self.pools[index]
            k, v = pool.layer_tensors(layer)
            shared = paging[index]._asdict()
            views.append(
                KVCacheView(k=k, v=v, page_size=pool.page_size, window=pool.window, **shared)
            )
        return views
