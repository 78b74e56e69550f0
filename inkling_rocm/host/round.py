"""What the two forwards of a speculative round read about their batch, from a few numbers a row.

A round of B rows, k drafts each, in front of N draft blocks. A row's last known token is at
position n, its `start`: everything before is computed. The first forward verifies: positions
n .. n + k. Once its tokens are drawn, the first `count` of them real, the next start is
n' = n + count, and every draft block runs over the window s .. s + 2N - 1 with
s = max(0, n - (N - 1)): what was not final in the blocks before, and the new positions up to the
tip n' - 1. What lies behind them in the window
is padding that leads nowhere: it is written again by the next round before anything reads it.

All of that follows on the device from state by sequence slot, which a round leaves for the next
one, so that it can be started before its predecessor has been read. A position whose page is not
allocated (`limit`) has no write slot, and reads the sink. Padded rows are all zero: slot 0.

A GPU derives it with kernels/round_metadata.py; the functions here are its specification, and what
a CPU runs. They ask the device for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_rocm.host.decode import MAX_POOLS, PoolTensors

# Rows of RoundTensors.staged; FIRST + p is that of pool p, and the recent tokens follow.
SLOT, START, LIMIT, FIRST = range(4)


def round_fields(pools: int, depths: int) -> int:
    """Rows of RoundTensors.staged."""
    return FIRST + pools + depths


@dataclass(frozen=True, kw_only=True)
class LayoutTensors:
    """A forward of B rows with Q tokens each.

    Attributes:
        positions: int32 [B Q]. q_start, kv_len, history: int32 [B].
        pools: of each the live pages of the rows int32 [B, width], each from its first (more is
            undefined), and the write slots int64 [B Q].
    """

    positions: Tensor
    q_start: Tensor
    kv_len: Tensor
    history: Tensor
    pools: tuple[PoolTensors, ...]


@dataclass(frozen=True, kw_only=True)
class RoundTensors:
    """Buffers of B rows.

    Attributes:
        staged: int32 [fields, B], from the host: sequence slot, start or -1 = as the round before
            left it, end of the allocated pages, first live page index of each pool, and, where the
            start is given, the tokens at start - N + 1 .. start.
        length: int32 [slots], start of each slot's next round. recent: int64 [slots, N], the last
            tokens, the newest at the end. drafts: int64 [slots, N]. All by sequence slot.
        slot, input_ids, row_drafts, position, hidden_to: what `verify_metadata` adds to its layout:
            int64 [B]; [B (k + 1)]; [B, k]; [B], position of the first token to draw; [B (k + 1)],
            rows of the hidden states' ring (2N rows a slot) to keep the forward's result in.
        known: int64 [B, N + k + 1], the recent tokens and, behind them, those just drawn.
        window_ids: int64 [B, 3N], tokens at s + 1 ..; depth m reads 2N of them from m on. 0 where
            they are yet to be drafted: that of depth m comes to column + m.
        hidden_from: int64 [B 2N], ring rows to read. tip: int64 [B], token of the window at
            n' - 1. column: int64 [B]. draft_position: int64 [B], n' + 1.
    """

    staged: Tensor
    length: Tensor
    recent: Tensor
    drafts: Tensor
    verify: LayoutTensors
    slot: Tensor
    input_ids: Tensor
    row_drafts: Tensor
    position: Tensor
    hidden_to: Tensor
    known: Tensor
    draft: LayoutTensors
    window_ids: Tensor
    hidden_from: Tensor
    tip: Tensor
    column: Tensor
    draft_position: Tensor

    @property
    def rows(self) -> int:
        return self.staged.shape[1]

    @property
    def depths(self) -> int:
        return self.recent.shape[1]

    @property
    def offered(self) -> int:
        """k."""
        return self.row_drafts.shape[1]


def verify_metadata_reference(tensors: RoundTensors, *, page_size: int, taps: int) -> None:
    """Fill `verify` and what goes with it, and the first N columns of `known`."""
    check_round_tensors(tensors)
    t, N = tensors, tensors.depths
    staged = t.staged.long()
    slot, given = staged[SLOT], staged[START]
    start = torch.where(given < 0, t.length.long()[slot], given)
    staged_recent = staged[FIRST + len(t.verify.pools) :].T
    recent = torch.where(given[:, None] < 0, t.recent[slot], staged_recent)
    t.slot.copy_(slot)
    t.known[:, :N] = recent
    t.row_drafts.copy_(t.drafts[slot, : t.offered])
    ids = torch.cat([recent[:, -1:], t.row_drafts], 1)
    t.input_ids.copy_(ids.clamp(min=0).flatten())
    t.position.copy_(start + 1)
    _lay_out(t, t.verify, start, page_size, taps)
    ring = 2 * N
    positions = t.verify.positions.long().view(t.rows, -1)
    t.hidden_to.copy_((slot[:, None] * ring + positions % ring).flatten())


def draft_metadata_reference(
    tensors: RoundTensors, tokens_BM: Tensor, *, page_size: int, taps: int
) -> None:
    """Fill `draft` and what goes with it, and the state of the rows' slots.

    Args: tokens_BM: int64 [B, k + 1], -1 from where there is no token; a row without any has ended,
        and goes on as if token 0 had been drawn.
    """
    t, N = tensors, tensors.depths
    slot, start = t.slot, t.verify.q_start.long()
    t.known[:, N:] = tokens_BM.clamp(min=0)
    count = (tokens_BM >= 0).sum(1).clamp(min=1)
    tip = start + count  # n'
    first = (start - (N - 1)).clamp(min=0)
    column = torch.arange(3 * N, device=slot.device)
    after = (first + 1 - start)[:, None] + column  # of the last known token before this round
    ids = t.known.gather(1, (after + N - 1).clamp(max=t.known.shape[1] - 1))
    t.window_ids.copy_(torch.where(after <= count[:, None], ids, 0))
    _lay_out(t, t.draft, first, page_size, taps)
    ring = 2 * N
    positions = t.draft.positions.long().view(t.rows, -1)
    kept = slot[:, None] * ring + positions % ring
    t.hidden_from.copy_(torch.where(positions < tip[:, None], kept, 0).flatten())
    row = torch.arange(t.rows, device=slot.device)
    t.tip.copy_(row * ring + tip - 1 - first)
    t.column.copy_(tip - first)
    t.draft_position.copy_(tip + 1)
    live = slot > 0  # the sink has no state
    t.length[slot] = torch.where(live, tip.int(), t.length[slot])
    newest = t.known.gather(1, count[:, None] + torch.arange(N, device=slot.device))
    t.recent[slot] = torch.where(live[:, None], newest, t.recent[slot])


def _lay_out(
    t: RoundTensors, layout: LayoutTensors, start: Tensor, page_size: int, taps: int
) -> None:
    """A forward from position `start` [B] of each row on."""
    rows = t.rows
    length = layout.positions.shape[0] // rows
    staged = t.staged.long()
    slot, limit = staged[SLOT], staged[LIMIT]
    positions = start[:, None] + torch.arange(length, device=slot.device)
    layout.positions.copy_(positions.flatten())
    layout.q_start.copy_(start)
    layout.kv_len.copy_(start + length)
    layout.history.copy_(start.clamp(max=taps - 1))
    for index, pool in enumerate(layout.pools):
        last_column = pool.table.shape[1] - 1
        at = (positions // page_size).clamp(max=last_column)
        write = pool.table[slot[:, None], at] * page_size + positions % page_size
        pool.write.copy_(torch.where(positions < limit[:, None], write, 0).flatten())
        columns = torch.arange(pool.rows.shape[1], device=slot.device)
        at = staged[FIRST + index][:, None] + columns
        pages = pool.table[slot[:, None], at.clamp(max=last_column)]
        pool.rows.copy_(torch.where(at * page_size < limit[:, None], pages, 0))


def check_round_tensors(tensors: RoundTensors) -> None:
    """Raises: ValueError: a tensor has another shape or type than promised."""
    t, pools = tensors, len(tensors.verify.pools)
    B, N, k = t.rows, t.depths, t.offered

    def require(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        got = (tuple(x.shape), x.dtype, x.is_contiguous())
        if got != (shape, dtype, True):
            raise ValueError(
                f"round metadata: {name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; "
                f"wanted contiguous {dtype} {shape}"
            )

    if not (1 <= pools <= MAX_POOLS and len(t.draft.pools) == pools and 0 <= k <= N):
        raise ValueError(
            f"round metadata: {pools} and {len(t.draft.pools)} pools, {k} drafts of {N} depths; "
            "wanted 1 or 2 pools, and no more drafts than depths"
        )
    require("staged", t.staged, (round_fields(pools, N), B), torch.int32)
    slots = len(t.length)
    require("length", t.length, (slots,), torch.int32)
    require("recent", t.recent, (slots, N), torch.int64)
    require("drafts", t.drafts, (slots, N), torch.int64)
    for name, shape in {
        "slot": (B,), "input_ids": (B * (k + 1),), "row_drafts": (B, k), "position": (B,),
        "hidden_to": (B * (k + 1),), "known": (B, N + k + 1), "window_ids": (B, 3 * N),
        "hidden_from": (B * 2 * N,), "tip": (B,), "column": (B,), "draft_position": (B,),
    }.items():  # fmt: skip
        require(name, getattr(t, name), shape, torch.int64)
    for name, layout, length in (("verify", t.verify, k + 1), ("draft", t.draft, 2 * N)):
        require(f"{name}.positions", layout.positions, (B * length,), torch.int32)
        for field in ("q_start", "kv_len", "history"):
            require(f"{name}.{field}", getattr(layout, field), (B,), torch.int32)
        for pool in layout.pools:
            require("a pool's write", pool.write, (B * length,), torch.int64)
            require("a pool's table", pool.table, tuple(pool.table.shape), torch.int32)
            require("a pool's rows", pool.rows, (B, pool.rows.shape[1]), torch.int32)
