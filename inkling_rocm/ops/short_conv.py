"""Short convolution over a ring of raw inputs: the part attention_prologue and residual_conv_norm
share.

    y[t, c] = x[t, c] + sum_{d=0..W-1} weight[W-1-d, c] * x[t-d, c]        (d = distance back in
    time)

fp32 accumulation, the residual x[t] added last, one rounding to the model dtype. Inputs at negative
positions are zero. An input at position p that lies before this forward's chunk is read from the
ring row p % R; the ring stores inputs as they were rounded, so a result does not depend on where a
chunk began.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_rocm.host import BatchMeta, ConvStateView


@dataclass(frozen=True)
class ConvPlan:
    """Indices of one forward, the same for every layer and stream with equal R, W and slots.

    Attributes:
        past: int64 [T * (W-1)], where each token's inputs at distances W-1 .. 1 are. Without
            ring_rows all lie in the ring (decode with full history) and these are its flat rows
            slot * R + p % R; else they are rows of concat(x [T], ring[ring_rows], zero [1]).
        ring_rows: int64 [B * R], all flat ring rows of the B requests, or None.
        write_from, write_to: int64 [n], chunk rows to store and the flat ring rows they go to;
            write_from is None when every row of the chunk is stored.
    """

    past: Tensor
    ring_rows: Tensor | None
    write_from: Tensor | None
    write_to: Tensor


def _plan(meta: BatchMeta, ring: ConvStateView, taps: int) -> ConvPlan:
    ring_len = ring.state.shape[1]
    device = ring.state.device
    T, B = meta.num_tokens, meta.num_rows
    position = meta.positions.long()
    row: Tensor | slice = slice(None) if meta.q_uniform == 1 else meta.token_row.long()
    slot = ring.slot.long()
    token_ring = slot[row]  # ring of each token
    in_chunk = position - meta.q_start[row]  # tokens of this chunk before the token
    distance = torch.arange(taps - 1, 0, -1, device=device)  # [W-1]
    before_chunk = distance - in_chunk[:, None]  # 1 = the last input before the chunk
    past_position = position[:, None] - distance
    at = past_position % ring_len  # ring rows, [T, W-1]
    known = (before_chunk <= ring.history[row][:, None]) & (past_position >= 0)

    ring_rows = None
    if bool((known & (before_chunk > 0)).all()):
        past = token_ring[:, None] * ring_len + at
    else:
        from_chunk = torch.arange(T, device=device)[:, None] - distance
        from_ring = T + torch.arange(B, device=device)[row][:, None] * ring_len + at
        from_past = torch.where(known, from_ring, T + B * ring_len)
        past = torch.where(before_chunk <= 0, from_chunk, from_past)
        ring_rows = (slot[:, None] * ring_len + torch.arange(ring_len, device=device)).flatten()
    past = past.flatten()

    is_last = position >= meta.kv_len[row] - ring_len  # older ones would be overwritten
    stored = is_last & (ring.token_slot != 0) & (token_ring != 0)
    write_to = token_ring * ring_len + position % ring_len
    write_from = None
    if not bool(stored.all()):
        write_from = stored.nonzero()[:, 0]
        write_to = write_to[write_from]
    return ConvPlan(past, ring_rows, write_from, write_to)


@dataclass(frozen=True)
class SnapshotPlan:
    """Where a forward's snapshots come from and go to, for every layer and stream: rows of the
    chunk, and flat ring rows; int64.

    Attributes:
        chunk_from, chunk_to: inputs of the chunk. ring_from, ring_to: inputs before it.
        zero_to: inputs before it that the history does not reach.
    """

    chunk_from: Tensor
    chunk_to: Tensor
    ring_from: Tensor
    ring_to: Tensor
    zero_to: Tensor


def _plan_snapshots(meta: BatchMeta, ring: ConvStateView, taps: int) -> SnapshotPlan:
    """The inputs P-(W-1) .. P-1 of each row that asks for them.

    Those in the chunk come from it; those before it from the ring, as zeros where the history does
    not reach; those after it are not known yet and are left out, as are tokens without a slot.
    """
    assert ring.snapshot_slot is not None
    assert ring.snapshot_position is not None
    ring_len, device = ring.state.shape[1], ring.state.device
    q_len = meta.cu_seqlens_q.diff()
    rows = ((ring.snapshot_slot > 0) & (ring.slot > 0) & (q_len > 0)).nonzero()[:, 0]
    chunk: list[tuple[int, int]] = []
    past: list[tuple[int, int]] = []
    zero: list[int] = []
    for row, distance in itertools.product(rows.tolist(), range(1, taps)):
        position = int(ring.snapshot_position[row]) - distance
        token = position - int(meta.q_start[row])
        ring_row = position % ring_len
        if position < 0 or token >= q_len[row] or token <= -taps:
            continue
        target = int(ring.snapshot_slot[row]) * ring_len + ring_row
        if token >= 0:
            token += int(meta.cu_seqlens_q[row])
            if ring.token_slot[token] != 0:
                chunk.append((token, target))
        elif -token <= ring.history[row]:
            past.append((int(ring.slot[row]) * ring_len + ring_row, target))
        else:
            zero.append(target)
    chunk_from, chunk_to = torch.tensor(chunk, dtype=torch.int64, device=device).view(-1, 2).T
    ring_from, ring_to = torch.tensor(past, dtype=torch.int64, device=device).view(-1, 2).T
    zero_to = torch.tensor(zero, dtype=torch.int64, device=device)
    return SnapshotPlan(chunk_from, chunk_to, ring_from, ring_to, zero_to)


def _snapshot(x_TC: Tensor, meta: BatchMeta, ring: ConvStateView, taps: int) -> None:
    """Make the snapshots; to be called before the chunk is stored, which may overwrite the oldest
    of their inputs."""
    assert ring.snapshot_slot is not None
    key = ("snapshot", ring.state.shape[1], taps, ring.snapshot_slot.data_ptr())
    if key not in meta.memo:
        meta.memo[key] = _plan_snapshots(meta, ring, taps)
    plan: SnapshotPlan = meta.memo[key]
    flat_ring = ring.state.view(-1, x_TC.shape[1])
    flat_ring[plan.ring_to] = flat_ring[plan.ring_from]
    flat_ring[plan.zero_to] = 0
    flat_ring[plan.chunk_to] = x_TC[plan.chunk_from]


def short_conv(x_TC: Tensor, weight_WC: Tensor, meta: BatchMeta, ring: ConvStateView) -> Tensor:
    """Convolve a chunk, then store its last inputs in the ring (and snapshots, where asked for).

    Args:
        x_TC: [T, C] raw inputs in the ring's dtype, rows may be strided.
        weight_WC: fp32 [W, C]; row W-1 weighs the current token.
    Returns: [T, C] in x's dtype.
    In place: ring.state rows of tokens whose token_slot is not 0.
    """
    (T, C), taps = x_TC.shape, weight_WC.shape[0]
    key = ("conv", ring.state.shape[1], taps, ring.slot.data_ptr(), ring.token_slot.data_ptr())
    if key not in meta.memo:
        meta.memo[key] = _plan(meta, ring, taps)
    plan: ConvPlan = meta.memo[key]
    flat_ring = ring.state.view(-1, C)
    inputs = flat_ring
    if plan.ring_rows is not None:
        ring_rows = flat_ring.index_select(0, plan.ring_rows)
        inputs = torch.cat((x_TC, ring_rows, x_TC.new_zeros(1, C)))
    past_TwC = inputs.index_select(0, plan.past).view(T, taps - 1, C)
    # A product with the fp32 weights is at least fp32 whatever the inputs' dtype.
    y_TC = (past_TwC * weight_WC[:-1]).sum(1)
    y_TC = torch.addcmul(y_TC, x_TC.to(y_TC.dtype), weight_WC[-1]).add_(x_TC)
    stored = x_TC if plan.write_from is None else x_TC.index_select(0, plan.write_from)
    if ring.snapshot_slot is not None:
        _snapshot(x_TC, meta, ring, taps)
    flat_ring.index_copy_(0, plan.write_to, stored)
    return y_TC.to(x_TC.dtype)
