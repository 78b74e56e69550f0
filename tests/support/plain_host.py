"""The smallest possible host: a few requests, pages handed out in order, nothing ever freed.

Tests run the model through it without an engine. It is also the host contract, executed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from inkling_rocm.config import InklingConfig
from inkling_rocm.host import (
    CONV_STREAMS,
    BatchMeta,
    ConvStateView,
    KVCacheView,
    SingleRank,
)


@dataclass
class Row:
    """One request row of a forward: `length` tokens from `start`; slot 0 rows are padding."""

    request: int  # 0 = padding
    start: int
    length: int


@dataclass
class PlainHost:
    """Room for requests 1 .. num_requests of up to max_len tokens each.

    Every pool starts as NaN outside the sink, so that a read of anything unwritten shows.
    """

    config: InklingConfig
    num_requests: int
    max_len: int
    page_size: int = 16
    ring_len: int | None = None
    dtype: torch.dtype = torch.float32
    comm: SingleRank = field(default_factory=SingleRank)

    def __post_init__(self):
        text = self.config.text
        self.pages_each = -(-self.max_len // self.page_size)
        pages = 1 + self.num_requests * self.pages_each
        ring = self.ring_len or max(text.conv_taps - 1, 1)
        self.k, self.v, self.rings = [], [], []
        for layer in range(text.num_layers):
            attention = text.attention(layer)
            shape = (pages, self.page_size, attention.num_kv_heads, attention.head_dim)
            self.k.append(self._poisoned(shape))
            self.v.append(self._poisoned(shape))
            kv_channels = attention.num_kv_heads * attention.head_dim
            channels = {"k": kv_channels, "v": kv_channels}
            self.rings.append(
                {
                    stream: self._poisoned(
                        (1 + self.num_requests, ring, channels.get(stream, text.hidden_size))
                    )
                    for stream in CONV_STREAMS
                }
            )
        self.routing: dict[int, torch.Tensor] = {}

    def _poisoned(self, shape):
        pool = torch.full(shape, float("nan"), dtype=self.dtype)
        pool[0] = 0
        return pool

    def prepare(self, rows: list[Row], kind: str = "prefill") -> None:
        """Lay out one forward over these rows."""
        lengths = [row.length for row in rows]
        B, T = len(rows), sum(lengths)
        start = torch.tensor([row.start for row in rows], dtype=torch.int32)
        q_len = torch.tensor(lengths, dtype=torch.int32)
        token_row = torch.arange(B, dtype=torch.int32).repeat_interleave(q_len)
        cu = torch.zeros(B + 1, dtype=torch.int32)
        cu[1:] = q_len.cumsum(0)
        offset = torch.arange(T, dtype=torch.int32) - cu[:-1][token_row]
        positions = start[token_row] + offset
        self.meta = BatchMeta(
            kind=kind,
            num_rows=B,
            num_tokens=T,
            q_uniform=lengths[0] if len(set(lengths)) == 1 else 0,
            max_q=max(lengths, default=0),
            max_kv=max((row.start + row.length for row in rows), default=0),
            positions=positions,
            cu_seqlens_q=cu,
            q_start=start,
            kv_len=start + q_len,
            token_row=token_row,
        )
        request = torch.tensor([row.request for row in rows], dtype=torch.int64)
        first = 1 + (request - 1) * self.pages_each
        table = first[:, None] + torch.arange(self.pages_each)
        table[request == 0] = 0
        self.page_table = table.int()
        page = self.page_table[token_row.long(), (positions // self.page_size).long()].long()
        slot = page * self.page_size + positions.long() % self.page_size
        self.slot = torch.where(request[token_row.long()] == 0, 0, slot)
        self.ring_slot = request.int()
        taps = self.config.text.conv_taps
        self.history = start.clamp(max=taps - 1)

    def kv(self, layer: int) -> KVCacheView:
        return KVCacheView(
            k=self.k[layer],
            v=self.v[layer],
            page_size=self.page_size,
            page_table=self.page_table,
            first_page=torch.zeros(self.meta.num_rows, dtype=torch.int32),
            slot=self.slot,
            window=self.config.text.attention(layer).window,
        )

    def conv(self, layer: int, stream: str) -> ConvStateView:
        return ConvStateView(
            state=self.rings[layer][stream],
            slot=self.ring_slot,
            token_slot=self.slot,
            history=self.history,
        )

    def capture_routing(self, layer: int, topk_ids: torch.Tensor) -> None:
        self.routing[layer] = topk_ids


def run_chunks(model, host: PlainHost, token_ids, chunks) -> torch.Tensor:
    """Logits of every position, the prompt fed in pieces of these lengths."""
    logits, start = [], 0
    for length in chunks:
        host.prepare([Row(1, start, length)])
        ids = torch.as_tensor(token_ids[start : start + length])
        logits.append(model.logits(model.forward(ids, host), host))
        start += length
    assert start == len(token_ids)
    return torch.cat(logits)
