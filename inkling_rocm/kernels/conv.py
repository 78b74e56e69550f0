"""Short convolution over the ring of raw inputs: what the fused kernels share, and the second
launch that stores a prefill's last inputs.

    y[t] = x[t] + sum_{d=0..W-1} weight[W-1-d] * x[t-d]

Contract and reference: ops/short_conv.py. A launch that both reads histories and writes the ring is
right only if no program writes a row that another one still reads (`checks.writes_in_place`);
otherwise `store_tails` follows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rocm.host import BatchMeta, ConvStateView
from inkling_rocm.kernels.tuning import RING_TAIL
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow


@triton.jit
def past_source(position, in_chunk, history, distance, RING: tl.constexpr):
    """Where the input `distance` tokens back is: in this chunk, in the ring, and in which row of
    it. Neither: it is zero. `in_chunk` counts the tokens of the chunk before this one."""
    past = position - distance
    in_ring = (in_chunk < distance) & (distance - in_chunk <= history) & (past >= 0)
    return in_chunk >= distance, in_ring, tl.maximum(past, 0) % RING


@triton.jit
def in_snapshot(position, boundary, TAPS: tl.constexpr):
    """Whether a snapshot at `boundary` keeps the input of this position."""
    return (position >= 0) & (position < boundary) & (position >= boundary - (TAPS - 1))


@triton.jit
def _tail_of_row(
    x_ptr, second_ptr, ring_ptr, ring_slot_ptr, token_slot_ptr, history_ptr, snapshot_slot_ptr,
    snapshot_position_ptr, cu_seqlens_q_ptr, q_start_ptr, stride_x_t, stride_second_t,
    C: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.load(cu_seqlens_q_ptr + row)
    q_len = tl.load(cu_seqlens_q_ptr + row + 1) - first
    ring_slot = tl.load(ring_slot_ptr + row).to(tl.int64)
    if (q_len > 0) & (ring_slot != 0):
        q_start = tl.load(q_start_ptr + row)
        offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        x_ptr += first.to(tl.int64) * stride_x_t
        if second_ptr is not None:
            second_ptr += first.to(tl.int64) * stride_second_t
        dtype = ring_ptr.dtype.element_ty
        source_ptr = ring_ptr + ring_slot * (RING * C)
        if snapshot_slot_ptr is not None:
            # Before the ring is written: its oldest rows may be part of the snapshot.
            target = tl.load(snapshot_slot_ptr + row).to(tl.int64)
            boundary = tl.load(snapshot_position_ptr + row)
            history = tl.load(history_ptr + row)
            if target > 0:
                target_ptr = ring_ptr + target * (RING * C)
                for d in tl.static_range(1, TAPS):
                    position = boundary - d
                    i = position - q_start
                    in_chunk = (i >= 0) & (i < q_len)
                    before = (i < 0) & (i > -TAPS) & (position >= 0)
                    at = tl.maximum(i, 0).to(tl.int64)
                    value = tl.load(
                        x_ptr + at * stride_x_t + offs_c, mask=mask_c & in_chunk, other=0.0
                    )
                    if second_ptr is not None:
                        second = tl.load(
                            second_ptr + at * stride_second_t + offs_c,
                            mask=mask_c & in_chunk,
                            other=0.0,
                        )
                        value = (value.to(tl.float32) + second.to(tl.float32)).to(dtype)
                    ring_row = (tl.maximum(position, 0) % RING) * C
                    old = tl.load(
                        source_ptr + ring_row + offs_c,
                        mask=mask_c & before & (-i <= history),
                        other=0.0,
                    )
                    live = tl.load(token_slot_ptr + first + at, mask=in_chunk, other=0) != 0
                    tl.store(
                        target_ptr + ring_row + offs_c,
                        tl.where(in_chunk, value, old),
                        mask=mask_c & (before | live),
                    )
        for back in tl.static_range(RING):
            i = q_len - 1 - back
            at = tl.maximum(i, 0).to(tl.int64)
            live = (i >= 0) & (tl.load(token_slot_ptr + first + at) != 0)
            value = tl.load(x_ptr + at * stride_x_t + offs_c, mask=mask_c & live, other=0.0)
            if second_ptr is not None:
                second = tl.load(
                    second_ptr + at * stride_second_t + offs_c, mask=mask_c & live, other=0.0
                )
                value = (value.to(tl.float32) + second.to(tl.float32)).to(dtype)
            ring_row = ((q_start + tl.maximum(i, 0)) % RING) * C
            tl.store(source_ptr + ring_row + offs_c, value, mask=mask_c & live)


@triton.jit
def _ring_tail_kernel(
    x_ptr, x2_ptr, second_ptr, ring_ptr, ring2_ptr, ring_slot_ptr, token_slot_ptr, history_ptr,
    snapshot_slot_ptr, snapshot_position_ptr, cu_seqlens_q_ptr, q_start_ptr, stride_x_t,
    stride_second_t,
    C: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program a row, BLOCK_C channels and stream (the second stream shares slots and strides
    with the first)."""
    if tl.program_id(2) == 0:
        _tail_of_row(
            x_ptr, second_ptr, ring_ptr, ring_slot_ptr, token_slot_ptr, history_ptr,
            snapshot_slot_ptr, snapshot_position_ptr, cu_seqlens_q_ptr, q_start_ptr, stride_x_t,
            stride_second_t, C, TAPS, RING, BLOCK_C,
        )  # fmt: skip
    elif ring2_ptr is not None:
        _tail_of_row(
            x2_ptr, None, ring2_ptr, ring_slot_ptr, token_slot_ptr, history_ptr,
            snapshot_slot_ptr, snapshot_position_ptr, cu_seqlens_q_ptr, q_start_ptr, stride_x_t,
            stride_second_t, C, TAPS, RING, BLOCK_C,
        )  # fmt: skip


def store_tails(
    streams: tuple[tuple[torch.Tensor, ConvStateView], ...],
    meta: BatchMeta,
    taps: int,
    *,
    arch: Arch,
    second_TC: torch.Tensor | None = None,
    row: TuningRow | None = None,
) -> None:
    """Store the last min(q_len, R) inputs of every row in its ring, and its snapshot: one launch.

    Args:
        streams: one or two (x [T, C] raw inputs, ring), of equal C, pitch, R and slots.
        second_TC: added to the first stream's inputs (fp32, rounded once), or None.
    """
    (x, ring), (x2, ring2) = streams[0], streams[-1]
    C = x.shape[1]
    row = row or RING_TAIL.select(arch.name, channels=C)
    blocks = triton.cdiv(C, row.constexprs["BLOCK_C"])
    two = len(streams) == 2
    _ring_tail_kernel[(meta.num_rows, blocks, len(streams))](
        x, x2 if two else None, second_TC, ring.state, ring2.state if two else None, ring.slot,
        ring.token_slot, ring.history, ring.snapshot_slot, ring.snapshot_position,
        meta.cu_seqlens_q, meta.q_start, x.stride(0),
        0 if second_TC is None else second_TC.stride(0),
        C=C,
        TAPS=taps,
        RING=ring.state.shape[1],
        **row.launch_kwargs(),
    )  # fmt: skip
