"""K/V page pools: storage, reference-counted allocation, page tables.

One pool serves the global layers, one the window layers. A sequence is known by its slot (the same
number as its convolution-ring slot). Row `slot` of the page table maps page index (position //
page_size) to page; entries outside [first, end) are 0, the sink page that nobody owns.

Allocation only books: what changed is collected (`take_changes`) for the step that will run next,
whose executor copies pages and keeps the tables of other devices and ranks equal.

The prefix cache holds pages too (`hold`, `let_go`). Those that it alone holds count as free: when
no other page is left, `reclaim` asks it to give some up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.executor import TableChanges


class PagePool:
    """Pages of the layers that share one visibility rule.

    Args:
        layers: the model's layer numbers served. window: visible keys, current one included; 0 =
            all.
        lag: positions before the first uncomputed one that may be computed again.
        pages: number of pages, the sink included.
        slots: sequence slots, slot 0 (the dummy) included.
        context_length: most positions of one sequence.

    Attributes:
        references: of each page, by sequences and by the prefix cache. held: those of the cache.
        cached: pages that the cache refers to; reclaimable: those that only it does.
        reclaim: makes it give up at least one of them; there is one when this is called.
    """

    def __init__(
        self,
        *,
        layers: tuple[int, ...],
        window: int,
        pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        slots: int,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
        lag: int = 0,
    ):
        self.layers = layers
        self.window = window
        self.lag = lag
        self.page_size = page_size
        self.total = pages - 1
        shape = (len(layers), 2, pages, page_size, num_kv_heads, head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.beside: list[Tensor] = []
        self.table = np.zeros((slots, -(-context_length // page_size)), np.int32)
        self.first = np.zeros(slots, np.int32)
        self.end = np.zeros(slots, np.int32)
        self.references = [0] * pages
        self.held = [0] * pages
        self.cached = self.reclaimable = 0
        self.reclaim: Callable[[], None] = _nothing_to_reclaim
        self._free = list(range(pages - 1, 0, -1))
        self._entries: list[tuple[int, int, int]] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def name(self) -> str:
        return "window" if self.window else "global"

    @property
    def free(self) -> int:
        """Pages that can be had, those of the prefix cache alone included."""
        return len(self._free) + self.reclaimable

    @property
    def unused(self) -> int:
        """Pages that can be had without taking one from the prefix cache."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages of sequences."""
        return self.total - self.free

    @property
    def live_columns(self) -> int:
        """Most page table entries that one decoding sequence has in use."""
        return self.columns_of(1)

    def columns_of(self, tokens: int) -> int:
        """Most page table entries that a sequence has in use in a step of so many of its tokens."""
        columns = self.table.shape[1]
        if not self.window:
            return columns
        return min(columns, (self.window - 1 + self.lag + tokens - 1) // self.page_size + 2)

    def columns_for(self, depths: int) -> int:
        """Most page table entries that a sequence may have in use in a round in front of so many
        draft blocks (host/round.py), which may begin a round later than the host knows of."""
        columns = self.table.shape[1] + 2 * depths // self.page_size + 2
        if not self.window:
            return columns
        return min(columns, (self.window + 4 * depths) // self.page_size + 2)

    def layer_tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one of the model's layers, each [pages, page_size, g, D]."""
        k, v = self.storage[self.layers.index(layer)]
        return k, v

    def add_layers(self, layers: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """Keys and values of other layers at the same positions: of another shape, in the same
        pages, and copied with them.

        Returns: zeros [layers, 2, pages, page_size, g, D].
        """
        shape = (layers, 2, self.total + 1, self.page_size, num_kv_heads, head_dim)
        self.beside.append(self.storage.new_zeros(shape))
        return self.beside[-1]

    def pages_for(self, tokens: int, chunk: int) -> int:
        """Most pages a sequence of `tokens` tokens holds at once when it is computed at most
        `chunk` at a time."""
        pages = -(-tokens // self.page_size)
        if self.window:
            # A span of n positions touches at most (n - 2) // page_size + 2 pages.
            span = self.window - 1 + self.lag + min(chunk, tokens)
            pages = min(pages, max(span - 2, 0) // self.page_size + 2)
        return pages

    def missing(self, slot: int, length: int) -> int:
        """Pages to allocate before positions below `length` can be written."""
        return max(-(-length // self.page_size) - int(self.end[slot]), 0)

    def room(self, slot: int) -> int:
        """Positions the sequence could cover if it took every free page."""
        return (int(self.end[slot]) + self.free) * self.page_size

    def extend(self, slot: int, length: int) -> None:
        """Allocate up to position `length`; the caller has checked `missing`."""
        end = int(self.end[slot])
        for index in range(end, end + self.missing(slot, length)):
            self.end[slot] = index + 1
            self._enter(slot, index, self.take())

    def take(self) -> int:
        """A page with one reference, the caller's; there is one `free`."""
        if not self._free:
            self.reclaim()
        page = self._free.pop()
        self.references[page] = 1
        return page

    def share(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Give an empty row of the table these pages, from page index `first` on."""
        for index, page in enumerate(pages, first):
            self._count(page, 1, 0)
            self._enter(slot, index, page)
        self.first[slot], self.end[slot] = first, first + len(pages)

    def refer(self, pages: Iterable[int]) -> None:
        """Refer to pages as a sequence does, so that they stay."""
        for page in pages:
            self._count(page, 1, 0)

    def unrefer(self, pages: Iterable[int]) -> None:
        """Take back as many `refer`s or `take`s."""
        for page in pages:
            self._count(page, -1, 0)

    def hold(self, pages: Iterable[int]) -> None:
        """Let the prefix cache refer to pages."""
        for page in pages:
            self._count(page, 1, 1)

    def let_go(self, pages: Iterable[int]) -> None:
        """Take back as many `hold`s."""
        for page in pages:
            self._count(page, -1, -1)

    def only_cached(self, page: int) -> bool:
        """Whether the prefix cache is alone in referring to a page."""
        return 0 < self.references[page] == self.held[page]

    def trim(self, slot: int, q_start: int) -> None:
        """Free the pages that no query at or after position q_start can see."""
        if not self.window:
            return
        first = int(self.first[slot])
        target = (q_start - (self.window - 1)) // self.page_size
        if target <= first:
            return
        target = min(target, int(self.end[slot]))
        self._drop(slot, first, target)
        self.first[slot] = target

    def release(self, slot: int) -> None:
        """Free everything the sequence holds."""
        self._drop(slot, int(self.first[slot]), int(self.end[slot]))
        self.first[slot] = self.end[slot] = 0

    def unshared(self, length: int, settled: int) -> int:
        """Pages that a fork copies."""
        return -(-length // self.page_size) - settled // self.page_size

    def fork(self, source: int, target: int, length: int, settled: int) -> None:
        """Let slot `target` continue from the first `length` positions of `source`.

        Pages wholly below `settled` are shared. The others will be copied, because both will write
        to them; the caller has checked that so many (`unshared`) are free.
        """
        first, full = int(self.first[source]), settled // self.page_size
        self.share(target, first, self.table[source, first:full].tolist())
        self.extend(target, length)
        for index in range(full, int(self.end[target])):
            self._copies.append((int(self.table[source, index]), int(self.table[target, index])))

    def take_changes(self, slots: NDArray) -> TableChanges:
        """What changed since the last call, with the live pages of a step's rows.

        Args:    slots: int64 [B].
        """
        entries = np.array(self._entries, np.int32).reshape(-1, 3)
        self._entries = []
        return TableChanges(
            entries=entries,
            first=self.first[slots],
            end=self.end[slots],
            copies=self.take_copies(),
        )

    def take_copies(self) -> NDArray:
        """The pages to copy since the last call, int32 [c, 2]."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies = []
        return copies

    def follow(self, slots: NDArray, changes: TableChanges) -> None:
        """Take over another rank's changes; the rows of a step have these slots."""
        slot, column, page = changes.entries.T
        self.table[slot, column] = page
        self.first[slots], self.end[slots] = changes.first, changes.end

    def copy_pages(self, copies: NDArray) -> None:
        """Copy K/V of (source, target) pages, int32 [c, 2], in order."""
        for source, target in copies.tolist():
            for storage in (self.storage, *self.beside):
                storage[:, :, target] = storage[:, :, source]

    def _drop(self, slot: int, first: int, end: int) -> None:
        for page in self.table[slot, first:end].tolist():
            self._count(page, -1, 0)
        self.table[slot, first:end] = 0

    def _enter(self, slot: int, index: int, page: int) -> None:
        self.table[slot, index] = page
        self._entries.append((slot, index, page))

    def _count(self, page: int, references: int, held: int) -> None:
        """Change what is counted of a page; it is free when nobody refers to it any more."""
        self.reclaimable -= self.only_cached(page)
        self.cached -= self.held[page] > 0
        self.references[page] += references
        self.held[page] += held
        self.cached += self.held[page] > 0
        self.reclaimable += self.only_cached(page)
        if self.references[page] == 0:
            self._free.append(page)

    def batch_table(self, slots: NDArray) -> NDArray:
        """Page tables of a batch, int32 [B, P], each row from its first live page on."""
        first, end = self.first[slots], self.end[slots]
        columns = max(int((end - first).max(initial=0)), 1)
        if not self.window:
            return self.table[slots, :columns]
        index = first[:, None] + np.arange(columns, dtype=np.int32)
        in_table = np.minimum(index, self.table.shape[1] - 1)
        return np.where(index < end[:, None], self.table[slots[:, None], in_table], 0)

    def write_slots(self, slots: NDArray, positions: NDArray) -> NDArray:
        """Flat write slot of each token, int64 [T], from its sequence slot and position, both
        [T]."""
        page, offset = np.divmod(positions, self.page_size)
        return self.table[slots, page].astype(np.int64) * self.page_size + offset


def _nothing_to_reclaim() -> None:
    raise AssertionError("a page was taken from an empty pool; the caller looks at `free` first")
