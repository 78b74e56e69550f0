"""Short convolution over a ring of raw inputs: the part attention_prologue and residual_conv_norm
share.

    y[t, c] = x[t, c] + sum_{d=0..W-1} weight[c, W-1-d] * x[t-d, c]        (d = distance back in
    time)

fp32 accumulation, the residual x[t] added last, one rounding to the model dtype. Inputs at negative
positions are zero. An input at position p that lies before this forward's chunk is read from the
ring row p % R; the ring stores inputs as they were rounded, so a result does not depend on where a
chunk began.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_rocm.host import BatchMeta, ConvStateView


@dataclass(frozen=True)
class ConvPlan:
    """Indices of one forward, the same for every layer and stream with equal R, W and slots.

    Attributes:
        source: int64 [T, W-1], for distances W-1 .. 1 the row of concat(x [T], ring rows [B * R],
            zero [1]).
        ring_rows: int64 [B * R], flat ring rows slot * R + r that the concatenation reads.
        write_from, write_to: int64 [n], chunk rows to store and the flat ring rows they go to.
    """

    source: Tensor
    ring_rows: Tensor
    write_from: Tensor
    write_to: Tensor


def _plan(meta: BatchMeta, ring: ConvStateView, taps: int) -> ConvPlan:
    ring_len = ring.state.shape[1]
    device = ring.state.device
    T, B = meta.num_tokens, meta.num_rows
    row = meta.token_row.long()
    position = meta.positions.long()
    in_chunk = position - meta.q_start.long()[row]  # tokens of this chunk before the token
    distance = torch.arange(taps - 1, 0, -1, device=device)  # [W-1]

    from_chunk = torch.arange(T, device=device)[:, None] - distance
    from_ring = T + row[:, None] * ring_len + (position[:, None] - distance) % ring_len
    before_chunk = distance - in_chunk[:, None]  # 1 = the last input before the chunk
    known = (before_chunk <= ring.history.long()[row][:, None]) & (position[:, None] >= distance)
    zero = torch.full_like(from_ring, T + B * ring_len)
    source = torch.where(before_chunk <= 0, from_chunk, torch.where(known, from_ring, zero))

    slot = ring.slot.long()
    ring_rows = (slot[:, None] * ring_len + torch.arange(ring_len, device=device)).flatten()
    is_last = position >= meta.kv_len.long()[row] - ring_len  # older ones would be overwritten
    write_from = (is_last & (ring.token_slot != 0) & (slot[row] != 0)).nonzero()[:, 0]
    write_to = slot[row[write_from]] * ring_len + position[write_from] % ring_len
    return ConvPlan(source, ring_rows, write_from, write_to)


def _snapshot(meta: BatchMeta, ring: ConvStateView, taps: int) -> None:
    """Copy rows P-(W-1) .. P-1 of each row that asks for it to its snapshot slot."""
    if ring.snapshot_slot is None or ring.snapshot_position is None:
        return
    ring_len = ring.state.shape[1]
    rows = (ring.snapshot_slot > 0).nonzero()[:, 0]
    back = torch.arange(taps - 1, 0, -1, device=ring.state.device)
    at = (ring.snapshot_position.long()[rows][:, None] - back) % ring_len
    source, target = ring.slot.long()[rows][:, None], ring.snapshot_slot.long()[rows][:, None]
    ring.state[target, at] = ring.state[source, at]


def short_conv(x_TC: Tensor, weight_CW: Tensor, meta: BatchMeta, ring: ConvStateView) -> Tensor:
    """Convolve a chunk, then store its last inputs in the ring (and snapshots, where asked for).

    Args:
        x_TC: [T, C] raw inputs in the ring's dtype, rows may be strided.
        weight_CW: fp32 [C, W]; column W-1 weighs the current token.
    Returns: [T, C] in x's dtype.
    In place: ring.state rows of tokens whose token_slot is not 0.
    """
    C, taps = weight_CW.shape
    key = ("conv", ring.state.shape[1], taps, ring.slot.data_ptr(), ring.token_slot.data_ptr())
    plan = meta.memo.get(key)
    if plan is None:
        plan = meta.memo[key] = _plan(meta, ring, taps)
    flat_ring = ring.state.view(-1, C)
    wide = torch.float64 if x_TC.dtype == torch.float64 else torch.float32
    inputs = torch.cat((x_TC, flat_ring[plan.ring_rows], x_TC.new_zeros(1, C)))
    window_TWC = torch.cat((inputs[plan.source], x_TC[:, None]), dim=1).to(wide)  # oldest first
    y_TC = (window_TWC * weight_CW.t().to(wide)).sum(1) + x_TC.to(wide)
    flat_ring[plan.write_to] = x_TC[plan.write_from]
    _snapshot(meta, ring, taps)
    return y_TC.to(x_TC.dtype)
