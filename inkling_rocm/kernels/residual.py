"""residual_conv_norm: short convolution, residual and RMSNorm of whole rows in one launch.

    y        = cast(partial [+ second])            the reduced sum, rounded before taps and ring
    residual = residual + cast(short_conv(y))      rounded
    normed   = rms_norm(residual)
    tap      = cast(y + the residual argument)     only where a block drafter asks for it

One program takes TOKENS consecutive rows, because the norm needs the row and the fp32 convolution
weights (16 bytes a channel, more than a row's other data) then serve all of them: from registers
(KEEP), or from the L1 where that holds them and registers are better spent on more programs.
Contract and reference: ops/residual_conv_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rocm.host import BatchMeta, Comm, ConvStateView
from inkling_rocm.kernels.checks import (
    check_ring,
    check_rows,
    check_vector,
    request_arch,
    require,
    writes_in_place,
)
from inkling_rocm.kernels.conv import in_snapshot, past_source, store_tails
from inkling_rocm.kernels.norm import normed
from inkling_rocm.kernels.tuning import RESIDUAL_CONV_NORM
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow


@triton.jit
def _raw_input(x_ptr, second_ptr, at, second_at, offs, mask):
    """The convolution's input: partial sums added in fp32, rounded to the model dtype."""
    x = tl.load(x_ptr + at + offs, mask=mask, other=0.0)
    if second_ptr is not None:
        second = tl.load(second_ptr + second_at + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + second.to(tl.float32)).to(x.dtype)
    return x


@triton.jit(do_not_specialize=("num_tokens",))
def _residual_conv_norm_kernel(
    normed_ptr, residual_out_ptr, x_ptr, second_ptr, residual_ptr, conv_ptr, norm_ptr, ring_ptr,
    positions_ptr, token_row_ptr, q_start_ptr, ring_slot_ptr, token_slot_ptr, history_ptr,
    snapshot_slot_ptr, snapshot_position_ptr, tap_ptr, num_tokens, stride_x_t, stride_second_t,
    stride_residual_t, stride_tap_t, eps,
    H: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr, DECODE: tl.constexpr,
    WRITE_RING: tl.constexpr, TOKENS: tl.constexpr, KEEP: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    first_token = tl.program_id(0) * TOKENS
    offs = tl.arange(0, BLOCK_H)
    mask = offs < H
    taps = ()
    if KEEP:
        norm = tl.load(norm_ptr + offs, mask=mask, other=0.0)
        for j in tl.static_range(TAPS):
            weight = tl.load(conv_ptr + j * H + offs, mask=mask, other=0.0)
            taps = taps + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    for token32 in range(first_token, tl.minimum(first_token + TOKENS, num_tokens)):
        token = tl.cast(token32, tl.int64)
        position = tl.load(positions_ptr + token)
        if DECODE:  # row = token, and it is the only one of its chunk
            request = token
            in_chunk = 0
        else:
            request = tl.load(token_row_ptr + token)
            in_chunk = position - tl.load(q_start_ptr + request)
        history = tl.load(history_ptr + request)
        ring_slot = tl.load(ring_slot_ptr + request).to(tl.int64)
        slot_ptr = ring_ptr + ring_slot * (RING * H)
        if WRITE_RING and snapshot_slot_ptr is not None:
            target = tl.load(snapshot_slot_ptr + request).to(tl.int64)
            boundary = tl.load(snapshot_position_ptr + request)
            target_ptr = ring_ptr + target * (RING * H)
            wanted = (target > 0) & (ring_slot != 0)
        x_at, second_at = token * stride_x_t, token * stride_second_t
        x = _raw_input(x_ptr, second_ptr, x_at, second_at, offs, mask)
        residual = tl.load(residual_ptr + token * stride_residual_t + offs, mask=mask, other=0.0)
        if tap_ptr is not None:
            tap = residual.to(tl.float32) + x.to(tl.float32)
            tl.store(tap_ptr + token * stride_tap_t + offs, tap.to(x.dtype), mask=mask)
        acc = tl.zeros([BLOCK_H], tl.float32)
        for j in tl.static_range(TAPS - 1):
            distance = TAPS - 1 - j
            in_x, in_ring, ring_row = past_source(position, in_chunk, history, distance, RING)
            past = tl.load(slot_ptr + ring_row * H + offs, mask=mask & in_ring, other=0.0)
            if not DECODE:
                back = tl.where(in_x, distance, 0)  # no address before the first token
                ours = _raw_input(
                    x_ptr, second_ptr, x_at - back * stride_x_t,
                    second_at - back * stride_second_t, offs, mask & in_x,
                )  # fmt: skip
                past = tl.where(in_x, ours, past)
            if KEEP:
                weight = taps[j]
            else:
                weight = tl.load(conv_ptr + j * H + offs, mask=mask, other=0.0)
            acc += past.to(tl.float32) * weight
            if WRITE_RING and snapshot_slot_ptr is not None:
                keep = wanted & (in_chunk == 0) & in_snapshot(position - distance, boundary, TAPS)
                tl.store(target_ptr + ring_row * H + offs, past, mask=mask & keep)
        if KEEP:
            weight = taps[TAPS - 1]
        else:
            weight = tl.load(conv_ptr + (TAPS - 1) * H + offs, mask=mask, other=0.0)
            norm = tl.load(norm_ptr + offs, mask=mask, other=0.0)
        acc += x.to(tl.float32) * weight
        acc += x.to(tl.float32)
        total = residual.to(tl.float32) + acc.to(x.dtype).to(tl.float32)
        total = total.to(residual.dtype)
        tl.store(residual_out_ptr + token * H + offs, total, mask=mask)
        y = normed(total, norm, eps, H, 0)
        tl.store(normed_ptr + token * H + offs, y.to(normed_ptr.dtype.element_ty), mask=mask)
        if WRITE_RING:
            # After the norm's sum, which every warp contributed to only with its history read.
            ring_row = position % RING
            live = tl.load(token_slot_ptr + token) != 0
            tl.store(slot_ptr + ring_row * H + offs, x, mask=mask & live & (ring_slot != 0))
            if snapshot_slot_ptr is not None:
                keep = wanted & live & in_snapshot(position, boundary, TAPS)
                tl.store(target_ptr + ring_row * H + offs, x, mask=mask & keep)


def residual_conv_norm(
    partial_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    *,
    conv_WH: torch.Tensor,
    norm_H: torch.Tensor,
    eps: float,
    meta: BatchMeta,
    ring: ConvStateView,
    comm: Comm,
    second_partial_TH: torch.Tensor | None = None,
    tap_TH: torch.Tensor | None = None,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
    tail_row: TuningRow | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `inkling_rocm.ops.residual_conv_norm`; capturable, no host synchronisation.

    One launch where `writes_in_place` holds (decode, verify), else two; the all-reduce of several
    ranks comes before, through `comm`.

    Args:
        partial_TH, second_partial_TH, residual_TH, tap_TH: rows of any pitch.
        row, tail_row: launch configurations; None = the tables'.
    Returns: (normed, residual), both contiguous and new.
    Raises: ValueError: an argument does not fit, or no tuning row.
    """
    op = "residual_conv_norm"
    arch = request_arch(arch, residual_TH)
    (T, H), taps = residual_TH.shape, conv_WH.shape[0]
    require(op, meta.num_tokens == T, "the residual's rows", T, meta.num_tokens)
    check_rows(op, "residual", residual_TH, H, residual_TH)
    check_rows(op, "partial", partial_TH, H, residual_TH)
    check_vector(op, "conv", conv_WH, (taps, H), torch.float32)
    check_vector(op, "norm", norm_H, (H,), residual_TH.dtype)
    check_ring(op, "ring", ring, H, taps, residual_TH.dtype)
    if second_partial_TH is not None:
        check_rows(op, "second_partial", second_partial_TH, H, residual_TH)
    if tap_TH is not None:
        check_rows(op, "tap", tap_TH, H, residual_TH)
    if comm.tp_size > 1:
        if second_partial_TH is not None:
            partial_TH = partial_TH + second_partial_TH
        partial_TH, second_partial_TH = comm.all_reduce(partial_TH), None
    normed_TH, out_TH = (
        torch.empty(T, H, dtype=residual_TH.dtype, device=residual_TH.device) for _ in range(2)
    )
    if T == 0:
        return normed_TH, out_TH
    ring_len = ring.state.shape[1]
    in_place = writes_in_place(meta, ring_len, taps)
    row = row or RESIDUAL_CONV_NORM.select(arch.name, hidden=H, tokens=T)
    second = second_partial_TH
    _residual_conv_norm_kernel[(triton.cdiv(T, row.constexprs["TOKENS"]),)](
        normed_TH, out_TH, partial_TH, second, residual_TH, conv_WH, norm_H, ring.state,
        meta.positions, meta.token_row, meta.q_start, ring.slot, ring.token_slot, ring.history,
        ring.snapshot_slot, ring.snapshot_position, tap_TH, T, partial_TH.stride(0),
        0 if second is None else second.stride(0), residual_TH.stride(0),
        0 if tap_TH is None else tap_TH.stride(0), eps,
        H=H,
        TAPS=taps,
        RING=ring_len,
        DECODE=meta.q_uniform == 1,
        WRITE_RING=in_place,
        BLOCK_H=triton.next_power_of_2(H),
        **row.launch_kwargs(),
    )  # fmt: skip
    if not in_place:
        store_tails(((partial_TH, ring),), meta, taps, arch=arch, second_TC=second, row=tail_row)
    return normed_TH, out_TH
