"""attention_prologue: packed [q | k | v | r] rows to normed q, and K/V in their pages.

    q = cast(rms_norm(q) * tau)          tau(p) = 1 + alpha ln(max((p + 1) / floor, 1))
    k = rms_norm(cast(short_conv(k)))    to the token's page slot
    v = cast(short_conv(v))              to the token's page slot

A program takes ROWS (token, head) pairs of q, k or v: a row is head_dim wide, so each norm stays
inside it. r is not touched: its rows are a strided view of the packed ones. Contract and reference:
ops/attention_prologue.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import BatchMeta, ConvStateView, KVCacheView
from inkling_rocm.kernels.checks import (
    check_pages,
    check_ring,
    check_rows,
    check_vector,
    request_arch,
    require,
    writes_in_place,
)
from inkling_rocm.kernels.conv import in_snapshot, past_source, store_tails
from inkling_rocm.kernels.norm import normed
from inkling_rocm.kernels.tuning import ATTENTION_PROLOGUE
from inkling_rocm.ops.attention_prologue import tau_key
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow


@triton.jit
def _q_rows(
    block, q_out_ptr, tau_ptr, x_ptr, norm_ptr, positions_ptr, num_tokens, stride_x_t, eps,
    log_floor, log_alpha,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = block * ROWS + tl.arange(0, ROWS)
    token, head = rows // HEADS, rows % HEADS
    offs_d = tl.arange(0, BLOCK_D)
    mask_rows = token < num_tokens
    mask = mask_rows[:, None] & (offs_d < D)[None, :]
    start = token.to(tl.int64) * stride_x_t + head * D
    x = tl.load(x_ptr + start[:, None] + offs_d[None, :], mask=mask, other=0.0)
    norm = tl.load(norm_ptr + offs_d, mask=offs_d < D, other=0.0)
    q = normed(x, norm[None, :], eps, D, 1)
    if tau_ptr is not None:
        length = tl.load(positions_ptr + token, mask=mask_rows, other=0) + 1
        tau = 1.0 + log_alpha * tl.log(tl.maximum(length.to(tl.float32) / log_floor, 1.0))
        tl.store(tau_ptr + token, tau, mask=mask_rows & (head == 0))
        q = q.to(x.dtype).to(tl.float32) * tau[:, None]
    out = q_out_ptr + rows.to(tl.int64)[:, None] * D + offs_d[None, :]
    tl.store(out, q.to(x.dtype), mask=mask)


@triton.jit
def _kv_rows(
    block, x_ptr, pages_ptr, conv_ptr, norm_ptr, ring_ptr, positions_ptr, token_row_ptr,
    q_start_ptr, kv_slot_ptr, ring_slot_ptr, token_slot_ptr, history_ptr, snapshot_slot_ptr,
    snapshot_position_ptr, num_tokens, stride_x_t, stride_pages_t, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TAPS: tl.constexpr,
    RING: tl.constexpr, DECODE: tl.constexpr, WRITE_RING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = HEADS * D
    rows = block * ROWS + tl.arange(0, ROWS)
    token, head = rows // HEADS, rows % HEADS
    offs_d = tl.arange(0, BLOCK_D)
    mask_rows = token < num_tokens
    mask_d = (offs_d < D)[None, :]
    mask = mask_rows[:, None] & mask_d
    columns = head[:, None] * D + offs_d[None, :]
    position = tl.load(positions_ptr + token, mask=mask_rows, other=0)
    if DECODE:  # row = token, and it is the only one of its chunk
        request = token
        in_chunk = token * 0
    else:
        request = tl.load(token_row_ptr + token, mask=mask_rows, other=0)
        in_chunk = position - tl.load(q_start_ptr + request, mask=mask_rows, other=0)
    history = tl.load(history_ptr + request, mask=mask_rows, other=0)
    ring_slot = tl.load(ring_slot_ptr + request, mask=mask_rows, other=0).to(tl.int64)
    slot_ptrs = ring_ptr + (ring_slot * (RING * C))[:, None] + columns
    if WRITE_RING and snapshot_slot_ptr is not None:
        target = tl.load(snapshot_slot_ptr + request, mask=mask_rows, other=0).to(tl.int64)
        boundary = tl.load(snapshot_position_ptr + request, mask=mask_rows, other=0)
        wanted = mask_rows & (target > 0) & (ring_slot != 0)
        target_ptrs = ring_ptr + (tl.maximum(target, 0) * (RING * C))[:, None] + columns
    wide_token = token.to(tl.int64)
    x = tl.load(x_ptr + (wide_token * stride_x_t)[:, None] + columns, mask=mask, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for j in tl.static_range(TAPS - 1):
        distance = TAPS - 1 - j
        in_x, in_ring, ring_row = past_source(position, in_chunk, history, distance, RING)
        past = tl.load(slot_ptrs + (ring_row * C)[:, None], mask=mask & in_ring[:, None], other=0.0)
        if not DECODE:
            # Masked rows keep their own address: none lies before the first token.
            at = (wide_token - tl.where(in_x, distance, 0)) * stride_x_t
            ours = tl.load(x_ptr + at[:, None] + columns, mask=mask & in_x[:, None], other=0.0)
            past = tl.where(in_x[:, None], ours, past)
        weight = tl.load(conv_ptr + j * C + columns, mask=mask, other=0.0)
        acc += past.to(tl.float32) * weight
        if WRITE_RING and snapshot_slot_ptr is not None:
            keep = wanted & (in_chunk == 0) & in_snapshot(position - distance, boundary, TAPS)
            tl.store(target_ptrs + (ring_row * C)[:, None], past, mask=keep[:, None] & mask_d)
    weight = tl.load(conv_ptr + (TAPS - 1) * C + columns, mask=mask, other=0.0)
    acc += x.to(tl.float32) * weight
    y = (acc + x.to(tl.float32)).to(x.dtype)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + offs_d, mask=offs_d < D, other=0.0)
        y = normed(y, norm[None, :], eps, D, 1).to(x.dtype)
    page_slot = tl.load(kv_slot_ptr + token, mask=mask_rows, other=0)
    page_ptrs = pages_ptr + (page_slot * stride_pages_t)[:, None] + columns
    tl.store(page_ptrs, y, mask=(page_slot != 0)[:, None] & mask_d)
    if WRITE_RING:
        live = tl.load(token_slot_ptr + token, mask=mask_rows, other=0) != 0
        ring_row = position % RING
        tl.store(
            slot_ptrs + (ring_row * C)[:, None],
            x,
            mask=(live & (ring_slot != 0))[:, None] & mask_d,
        )
        if snapshot_slot_ptr is not None:
            keep = wanted & live & in_snapshot(position, boundary, TAPS)
            tl.store(target_ptrs + (ring_row * C)[:, None], x, mask=keep[:, None] & mask_d)


@triton.jit(do_not_specialize=("num_tokens",))
def _attention_prologue_kernel(
    q_out_ptr, tau_ptr, x_ptr, k_pages_ptr, v_pages_ptr, k_conv_ptr, v_conv_ptr, q_norm_ptr,
    k_norm_ptr, k_ring_ptr, v_ring_ptr, positions_ptr, token_row_ptr, q_start_ptr, kv_slot_ptr,
    ring_slot_ptr, token_slot_ptr, history_ptr, snapshot_slot_ptr, snapshot_position_ptr,
    num_tokens, stride_x_t, stride_k_t, stride_v_t, eps, log_floor, log_alpha,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TAPS: tl.constexpr, RING: tl.constexpr, DECODE: tl.constexpr, WRITE_RING: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    kv_blocks = tl.cdiv(num_tokens * KV_HEADS, ROWS)
    # K and V first: they wait longest.
    if program < kv_blocks:
        _kv_rows(
            program, x_ptr + HEADS * D, k_pages_ptr, k_conv_ptr, k_norm_ptr, k_ring_ptr,
            positions_ptr, token_row_ptr, q_start_ptr, kv_slot_ptr, ring_slot_ptr, token_slot_ptr,
            history_ptr, snapshot_slot_ptr, snapshot_position_ptr, num_tokens, stride_x_t,
            stride_k_t, eps, KV_HEADS, D, BLOCK_D, TAPS, RING, DECODE, WRITE_RING, ROWS,
        )  # fmt: skip
    elif program < 2 * kv_blocks:
        _kv_rows(
            program - kv_blocks, x_ptr + (HEADS + KV_HEADS) * D, v_pages_ptr, v_conv_ptr, None,
            v_ring_ptr, positions_ptr, token_row_ptr, q_start_ptr, kv_slot_ptr, ring_slot_ptr,
            token_slot_ptr, history_ptr, snapshot_slot_ptr, snapshot_position_ptr, num_tokens,
            stride_x_t, stride_v_t, eps, KV_HEADS, D, BLOCK_D, TAPS, RING, DECODE, WRITE_RING, ROWS,
        )  # fmt: skip
    else:
        _q_rows(
            program - 2 * kv_blocks, q_out_ptr, tau_ptr, x_ptr, q_norm_ptr, positions_ptr,
            num_tokens, stride_x_t, eps, log_floor, log_alpha, HEADS, D, BLOCK_D, ROWS,
        )  # fmt: skip


def attention_prologue(
    qkvr: torch.Tensor,
    *,
    attention: AttentionConfig,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    meta: BatchMeta,
    kv: KVCacheView,
    k_ring: ConvStateView,
    v_ring: ConvStateView,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
    tail_row: TuningRow | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `inkling_rocm.ops.attention_prologue`; capturable, no host synchronisation.

    One launch where `writes_in_place` holds (decode, verify), else two. Global layers also leave
    tau [T] in `meta.memo` for rel_attention.

    Args:
        qkvr: rows of any pitch.
        row, tail_row: launch configurations; None = the tables'.
    Returns: q [T, h, D], contiguous and new, and r [T, h, R], a view of qkvr.
    Raises: ValueError: an argument does not fit, the two rings have different slots, or no tuning
        row.
    """
    op = "attention_prologue"
    arch = request_arch(arch, qkvr)
    h, g, D, R = attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.d_rel
    T, taps = qkvr.shape[0], k_conv.shape[0]
    require(op, meta.num_tokens == T, "qkvr's rows", T, meta.num_tokens)
    check_rows(op, "qkvr", qkvr, (h + 2 * g) * D + h * R, qkvr)
    for name, conv, ring in (("k", k_conv, k_ring), ("v", v_conv, v_ring)):
        check_vector(op, f"{name}_conv", conv, (taps, g * D), torch.float32)
        check_ring(op, f"{name}_ring", ring, g * D, taps, qkvr.dtype)
    check_vector(op, "q_norm", q_norm, (D,), qkvr.dtype)
    check_vector(op, "k_norm", k_norm, (D,), qkvr.dtype)
    check_pages(op, "kv.k", kv.k, (g, D), qkvr.dtype)
    check_pages(op, "kv.v", kv.v, (g, D), qkvr.dtype)
    same = all(
        getattr(k_ring, name).data_ptr() == getattr(v_ring, name).data_ptr()
        for name in ("slot", "token_slot", "history")
    )
    same = same and k_ring.state.shape == v_ring.state.shape
    require(op, same, "k_ring and v_ring", "different", "of equal length, on the same slots")

    end = (h + 2 * g) * D
    r_ThR = qkvr[:, end:].view(T, h, R)
    q_ThD = torch.empty(T, h, D, dtype=qkvr.dtype, device=qkvr.device)
    tau = None
    if attention.log_floor is not None:
        key = tau_key(attention)
        if key not in meta.memo:
            meta.memo[key] = torch.empty(T, dtype=torch.float32, device=qkvr.device)
        tau = meta.memo[key]
    if T == 0:
        return q_ThD, r_ThR
    ring_len = k_ring.state.shape[1]
    in_place = writes_in_place(meta, ring_len, taps)
    row = row or ATTENTION_PROLOGUE.select(arch.name, tokens=T, decode=meta.q_uniform == 1)
    if in_place and ring_len < meta.max_q + taps - 1:
        require(op, row.options["num_warps"] == 1, "num_warps", row.options["num_warps"], 1)
    rows = row.constexprs["ROWS"]
    programs = 2 * triton.cdiv(T * g, rows) + triton.cdiv(T * h, rows)
    _attention_prologue_kernel[(programs,)](
        q_ThD, tau, qkvr, kv.k, kv.v, k_conv, v_conv, q_norm, k_norm, k_ring.state, v_ring.state,
        meta.positions, meta.token_row, meta.q_start, kv.slot, k_ring.slot, k_ring.token_slot,
        k_ring.history, k_ring.snapshot_slot, k_ring.snapshot_position, T, qkvr.stride(0),
        kv.k.stride(1), kv.v.stride(1), eps, float(attention.log_floor or 1),
        attention.log_alpha,
        HEADS=h,
        KV_HEADS=g,
        D=D,
        BLOCK_D=triton.next_power_of_2(D),
        TAPS=taps,
        RING=ring_len,
        DECODE=meta.q_uniform == 1,
        WRITE_RING=in_place,
        **row.launch_kwargs(),
    )  # fmt: skip
    if not in_place:
        k_TC, v_TC = qkvr[:, h * D : end].chunk(2, dim=1)
        store_tails(((k_TC, k_ring), (v_TC, v_ring)), meta, taps, arch=arch, row=tail_row)
    return q_ThD, r_ThR
