"""What a decode forward reads, from a host that keeps a token slot for every position.

SGLang's tables name the slot of each token, not its page, and count the current token in the
lengths. A graph's first launch turns them into what kernels read; the function here is its
specification, and what a CPU runs. Rows whose token has slot 0 are padding: everything of them is
slot 0, page 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Inputs; integers of any width except where one is named.

    Attributes:
        lengths: [B], tokens of each row, the current one included. requests: [B], its row of
            `token_slots` and `ring_of_request`. slots: [B], of the current token.
        token_slots: [requests, context], slot of each position.
        window_slots: [slots], where the window layers keep a token of this slot.
        ring_of_request: [requests].
        track: bool [B], whose convolution state is to be copied after this step, and
            track_slots [B], where to; None = nobody's.
    """

    lengths: Tensor
    requests: Tensor
    slots: Tensor
    token_slots: Tensor
    window_slots: Tensor
    ring_of_request: Tensor
    track: Tensor | None = None
    track_slots: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class TokenTableOutputs:
    """Outputs, int32 except `write` and `window_write`.

    Attributes:
        q_start, kv_len, history, ring, snapshot: [B], see BatchMeta and ConvStateView.
        write, window_write: int64 [B], slots of the current token.
        pages: [B, columns]; window_pages: [B, window columns], from page index window_first [B]
            on; entries past the current token are undefined.
    """

    q_start: Tensor
    kv_len: Tensor
    history: Tensor
    ring: Tensor
    snapshot: Tensor
    write: Tensor
    window_write: Tensor
    pages: Tensor
    window_first: Tensor
    window_pages: Tensor

    @classmethod
    def allocate(
        cls, rows: int, context: int, *, page_size: int, window: int, device: torch.device
    ) -> TokenTableOutputs:
        """For batches of up to `rows` rows of up to `context` tokens."""

        def made(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            **{name: made(rows) for name in ("q_start", "kv_len", "history", "ring", "snapshot")},
            **{name: made(rows, dtype=torch.int64) for name in ("write", "window_write")},
            pages=made(rows, -(-context // page_size)),
            window_first=made(rows),
            window_pages=made(rows, (window - 1) // page_size + 2),
        )

    def first_rows(self, rows: int) -> TokenTableOutputs:
        """Views of the first `rows` rows."""
        return TokenTableOutputs(**{name: x[:rows] for name, x in vars(self).items()})


def token_table_reference(
    inputs: TokenTable, out: TokenTableOutputs, *, page_size: int, window: int, taps: int
) -> None:
    """Fill `out`."""
    real = inputs.slots > 0
    start = torch.where(real, inputs.lengths - 1, 0).long()
    request = torch.where(real, inputs.requests, 0).long()
    slots = torch.where(real, inputs.slots, 0).long()
    out.q_start.copy_(start)
    out.kv_len.copy_(start + 1)
    out.history.copy_(start.clamp(max=taps - 1))
    out.ring.copy_(torch.where(real, inputs.ring_of_request[request], 0))
    out.write.copy_(slots)
    out.window_write.copy_(torch.where(real, inputs.window_slots[slots], 0))
    out.snapshot.zero_()
    if inputs.track is not None:
        assert inputs.track_slots is not None
        out.snapshot.copy_(torch.where(inputs.track & real, inputs.track_slots, 0))
    first = (start - (window - 1)).clamp(min=0) // page_size
    out.window_first.copy_(first)
    context = inputs.token_slots.shape[1]
    for pages, begin in ((out.pages, torch.zeros_like(first)), (out.window_pages, first)):
        column = begin[:, None] + torch.arange(pages.shape[1], device=first.device)
        position = column * page_size
        live = (position <= start[:, None]) & real[:, None]
        found = inputs.token_slots[request[:, None], position.clamp(max=context - 1)].long()
        found = torch.where(live, found, 0)
        if pages is out.window_pages:
            found = inputs.window_slots[found]
        pages.copy_(torch.where(live, found // page_size, 0))
