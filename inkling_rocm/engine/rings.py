"""Convolution rings: `state[slot, p % R]` holds the raw input of position p.

A slot is taken when a sequence starts to run and given back when it stops. Nothing is cleared in
between: a reader trusts only the `history` rows before its chunk, which its own sequence wrote or
which were copied from a snapshot: a slot beyond those of sequences, which the prefix cache fills.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.config import TextConfig
from inkling_rocm.engine.upload import upload
from inkling_rocm.host import CONV_STREAMS, ConvStream

COPIES_AT_ONCE = 16  # bounds what is held in between


def ring_channels(text: TextConfig, layer: int, stream: ConvStream) -> int:
    """C of one ring (one rank)."""
    attention = text.attention(layer)
    if stream in ("k", "v"):
        return attention.num_kv_heads * attention.head_dim
    return text.hidden_size


class ConvRings:
    """The rings of every layer and stream.

    Args:
        slots: ring slots, slot 0 (the dummy) included.
        draft_tokens: most tokens of a forward that may be rolled back; rings hold
            conv_taps - 1 + draft_tokens rows.
        snapshots: slots that the prefix cache owns, beyond the others.

    Attributes:
        total: slots of sequences, slot 0 excluded. snapshot_slots: those of the prefix cache.
        slots: all of them.
    """

    def __init__(
        self,
        text: TextConfig,
        *,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        draft_tokens: int = 0,
        snapshots: int = 0,
    ):
        self.total = slots - 1
        self.snapshot_slots = range(slots, slots + snapshots)
        self.rows = max(text.conv_taps - 1 + draft_tokens, 1)
        self._free = list(range(slots - 1, 0, -1))
        self._copies: list[tuple[int, int]] = []
        by_channels: dict[int, list[tuple[int, ConvStream]]] = {}
        for layer in range(text.num_layers):
            for stream in CONV_STREAMS:
                channels = ring_channels(text, layer, stream)
                by_channels.setdefault(channels, []).append((layer, stream))
        # Rings of equal width share one tensor, so that a fork is one copy for each width.
        self.storage: list[Tensor] = []  # each [rings, slots, R, C]
        self._rings: dict[tuple[int, ConvStream], Tensor] = {}
        self.slots = slots + snapshots
        for channels, keys in by_channels.items():
            shape = (len(keys), self.slots, self.rows, channels)
            storage = torch.zeros(shape, dtype=dtype, device=device)
            self.storage.append(storage)
            self._rings.update(zip(keys, storage.unbind(0), strict=True))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def state(self, layer: int, stream: ConvStream) -> Tensor:
        """The ring of one layer and stream, [slots, R, C]."""
        return self._rings[layer, stream]

    def add_storage(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Something else that belongs to a slot and is copied with its rings.

        Returns: zeros [slots, *shape].
        """
        storage = torch.zeros(1, self.slots, *shape, dtype=dtype, device=device)
        self.storage.append(storage)
        return storage[0]

    def take(self) -> int:
        """A free slot; the caller has checked that there is one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def fork(self, source: int, target: int) -> None:
        """Let every ring of `target` be copied from `source` before the next step."""
        self._copies.append((source, target))

    def take_copies(self) -> NDArray:
        """The copies to make since the last call, int32 [c, 2]."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies = []
        return copies

    def copy(self, copies: NDArray) -> None:
        """Copy every ring of (source, target) slots, int32 [c, 2], in order."""
        wide = copies.astype(np.int64)
        if set(wide[:, 0].tolist()) & set(wide[:, 1].tolist()) or len(wide) <= 2:
            for source, target in wide.tolist():
                for storage in self.storage:
                    storage[:, target] = storage[:, source]
            return
        # None is read after it was written: many at once, the last where one is written twice.
        last = np.array(list({target: source for source, target in wide.tolist()}.items()))
        for some in np.array_split(last, -(-len(last) // COPIES_AT_ONCE)):
            for storage in self.storage:
                target, source = (upload(column, storage.device) for column in some.T.copy())
                storage.index_copy_(1, target, storage.index_select(1, source))
