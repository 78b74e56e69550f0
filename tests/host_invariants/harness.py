"""What the suite needs of a host, and a probe that writes and reads through its views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inkling_rocm.config import InklingConfig
from inkling_rocm.host import CONV_STREAMS, Host


@dataclass(frozen=True)
class Row:
    """The next `length` tokens of a request (0 = the row is there but empty)."""

    request: int
    length: int


class HostHarness(Protocol):
    """Drives one host.

    Attributes:
        config: of the model the host is for.
        page_size: of its pools. max_rewind: tokens that may be taken back; 0 = none.
    """

    config: InklingConfig
    page_size: int
    max_rewind: int

    def open(self) -> int:
        """Start a request. Returns: its number, 1 or more."""
        ...

    def close(self, request: int) -> None:
        """End a request and free its state."""
        ...

    def step(self, rows: list[Row], *, pad_tokens: int = 0, pad_rows: int = 0) -> Host:
        """Lay out one forward over these rows, in this order, and count their tokens as computed.

        pad_tokens: tokens without effect at the end; pad_rows: empty dummy rows after them.
        """
        ...

    def rewind(self, request: int, tokens: int) -> None:
        """Take back the last tokens of a request (as after rejected drafts)."""
        ...


class Probe:
    """Writes (request, position) where a model writes keys, values and conv inputs, and checks that
    what a model would read is exactly the request's own past."""

    def __init__(self, config: InklingConfig):
        self.text = config.text

    def run(self, host: Host, rows: list[Row]) -> None:
        """One forward. Raises: AssertionError: something visible is missing or foreign."""
        layers = range(self.text.num_layers)
        for layer in layers:
            self._write_kv(host, layer, rows)
        for layer in layers:
            for index, row in enumerate(rows):
                self._read_kv(host, layer, index, row)
            for stream in CONV_STREAMS:
                self._use_ring(host, layer, stream, rows)

    def _write_kv(self, host: Host, layer: int, rows: list[Row]) -> None:
        kv, meta = host.kv(layer), host.meta
        request = torch.tensor([row.request for row in rows] + [0] * (meta.num_rows - len(rows)))
        real = kv.slot > 0
        code = torch.stack((request[meta.token_row.long()], meta.positions.long()), -1)[real]
        at = kv.slot[real]
        for pool, sign in ((kv.k, 1), (kv.v, -1)):
            flat = pool.view(-1, *pool.shape[2:])
            flat[at, 0, 0] = sign * code[:, 0].to(pool.dtype)
            flat[at, -1, -1] = sign * code[:, 1].to(pool.dtype)

    def _read_kv(self, host: Host, layer: int, index: int, row: Row) -> None:
        kv, meta = host.kv(layer), host.meta
        end, start = int(meta.kv_len[index]), int(meta.q_start[index])
        if not row.length:
            return
        first = max(start - (kv.window - 1), 0) if kv.window else 0
        position = torch.arange(first, end)
        column = position // kv.page_size - int(kv.first_page[index])
        assert (column >= 0).all(), f"layer {layer} row {index}: first_page is past the window"
        assert (column < kv.page_table.shape[1]).all(), f"layer {layer}: page_table is too narrow"
        slot = kv.page_table[index].long()[column] * kv.page_size + position % kv.page_size
        for pool, sign in ((kv.k, 1), (kv.v, -1)):
            flat = pool.view(-1, *pool.shape[2:])
            owner, found = sign * flat[slot, 0, 0], sign * flat[slot, -1, -1]
            assert (owner == row.request).all(), f"layer {layer} row {index}: keys of {owner}"
            assert (found == position).all(), f"layer {layer} row {index}: found {found}"

    def _use_ring(self, host: Host, layer: int, stream, rows: list[Row]) -> None:
        ring, meta = host.conv(layer, stream), host.meta
        for index, row in enumerate(rows):
            state = ring.state[int(ring.slot[index])]
            start, end = int(meta.q_start[index]), int(meta.kv_len[index])
            for position in range(start - int(ring.history[index]), start):
                found = float(state[position % len(state), 0])
                assert found == code_of(row.request, position), (
                    f"layer {layer} {stream} row {index}: ring holds {found} at {position}"
                )
        for index, row in enumerate(rows):
            state = ring.state[int(ring.slot[index])]
            end, length = int(meta.kv_len[index]), min(row.length, ring.state.shape[1])
            for position in range(end - length, end):
                state[position % len(state)] = code_of(row.request, position)


def code_of(request: int, position: int) -> float:
    """Exact in fp32 and in bf16's range."""
    return float(request * 1000 + position)


def state_of(host: Host, config: InklingConfig) -> list[Tensor]:
    """Everything a forward may change, the sinks left out."""
    state = []
    for layer in range(config.text.num_layers):
        kv = host.kv(layer)
        state += [kv.k[1:].clone(), kv.v[1:].clone()]
        state += [host.conv(layer, stream).state[1:].clone() for stream in CONV_STREAMS]
    return state
