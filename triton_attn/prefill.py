"""Ragged prefill and extend over paged K/V: FlashAttention-2 (arXiv:2307.08691) with a modified
score.

The relative bias arrives as an ordinary strided tile (profile.py). The key loop is cut where the
work changes, since
a condition inside it would stop software pipelining:

    [lo, plain_end) beyond the extent: no modification    [plain_end, full_lo) window or extent
    edge: masked
    [full_lo, diag) every key visible                     [diag, end)          causal edge: masked
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from triton_attn.checks import check_paged, padded_head_dim, request_arch
from triton_attn.profile import (
    BUFFER_PAD,
    Chunk,
    allocate_rows,
    pitch_of,
    plan_chunks,
    write_profile_rows,
)
from triton_attn.score_mod import RelativeBias, ScoreMod
from triton_attn.tiles import LOG2E, find_request, load_rows, softmax_step, visible_keys
from triton_attn.tuning import PREFILL, PROFILE_WRITER

# Kinds of score modification, as the kernels see them.
MOD_NONE, MOD_FN, MOD_RELATIVE = 0, 1, 2


@triton.jit
def _tile(
    acc, l, m, q, n0, q_pos, q_token, head, k_ptr, v_ptr, page_row_ptr, bias_ptr, aux, offs_m,
    offs_n, offs_d, first_key,
    end_key, stride_k_p, stride_k_t, stride_v_p, stride_v_t, softmax_scale,
    MOD: tl.constexpr, SCORE_MOD: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    EXTENT: tl.constexpr,
    PITCH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    n0 = tl.multiple_of(n0, BLOCK_N)
    n = n0 + offs_n
    k = load_rows(
        k_ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t,
        MASKED, PAGE_SIZE, BLOCK_N,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MOD == 1:
        s = (
            SCORE_MOD(s * softmax_scale, q_pos[:, None], n[None, :], q_token[:, None], head, aux)
            * LOG2E
        )
    else:
        s = s * (softmax_scale * LOG2E)
    if MOD == 2:
        # n0 goes to the scalar part: vector offsets must not be negative on AMD.
        bias_ptrs = (bias_ptr + n0) + offs_m[:, None] * (PITCH - 1) + offs_n[None, :]
        if MASKED:
            distance = q_pos[:, None] - n[None, :]
            inside = (distance >= 0) & (distance < EXTENT)
            if WINDOW > EXTENT:  # such tiles may lie far outside the scratch rows
                bias = tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
            else:
                bias = tl.where(inside, tl.load(bias_ptrs).to(tl.float32), 0.0)
            s += bias
        else:
            s += tl.load(bias_ptrs).to(tl.float32)
    if MASKED:
        s = tl.where(visible_keys(q_pos, n, end_key, WINDOW), s, float("-inf"))
    v = load_rows(
        v_ptr, page_row_ptr, n0, offs_n, offs_d, first_key, end_key, stride_v_p, stride_v_t,
        MASKED, PAGE_SIZE, BLOCK_N,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    return softmax_step(acc, l, m, s, v)


@triton.jit
def _prefill_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, page_table_ptr, first_page_ptr, cu_seqlens_q_ptr,
    q_start_ptr, kv_len_ptr,
    rows_ptr, aux, num_requests, head0, first_block, stride_out_t: tl.constexpr,
    stride_out_h: tl.constexpr, stride_q_t: tl.constexpr, stride_q_h: tl.constexpr,
    stride_k_p: tl.constexpr, stride_k_t: tl.constexpr, stride_k_g: tl.constexpr,
    stride_v_p: tl.constexpr, stride_v_t: tl.constexpr, stride_v_g: tl.constexpr, stride_page_b,
    softmax_scale,
    MOD: tl.constexpr, SCORE_MOD: tl.constexpr, MAY_MASK: tl.constexpr, EXTENT: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PITCH: tl.constexpr, PAD: tl.constexpr, XCDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest (they share K/V); long blocks start first.
    heads, blocks = tl.num_programs(0), tl.num_programs(1)
    chunk_head = tl.program_id(0)
    chunk_block = blocks - 1 - tl.program_id(1)
    # Neighbouring programs start on different XCDs, each with an L2 of its own: give it its
    # own K/V heads.
    if XCDS > 1 and H % XCDS == 0 and heads % XCDS == 0:
        chunk_head = (chunk_head % XCDS) * (heads // XCDS) + chunk_head // XCDS
    block, head = first_block + chunk_block, head0 + chunk_head
    request = find_request(block, cu_seqlens_q_ptr, num_requests, BLOCK_M)
    first_token = tl.load(cu_seqlens_q_ptr + request)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1) - first_token
    m0 = (block - first_token // BLOCK_M - request) * BLOCK_M
    if m0 >= q_len:
        return
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    t0 = tl.load(q_start_ptr + request) + m0  # position of row 0
    q_pos = t0 + offs_m
    row_token = (first_token + m0).to(tl.int64)
    mask_m = m0 + offs_m < q_len
    q_token = tl.where(mask_m, row_token + offs_m, row_token)  # a mod may load through it
    end_key = tl.minimum(tl.load(kv_len_ptr + request), t0 + BLOCK_M)
    bias_ptr = rows_ptr
    if MOD == 2:
        row = (chunk_head * blocks + chunk_block).to(tl.int64) * BLOCK_M
        # EXTENT - 1 - t0, rounded up to a multiple of 16 by the shift of the rows.
        bias_ptr = rows_ptr + PAD + row * PITCH + ((EXTENT + 14 - t0) >> 4) * 16

    q_ptrs = (
        q_ptr
        + row_token * stride_q_t
        + head * stride_q_h
        + offs_m[:, None] * stride_q_t
        + offs_d[None, :]
    )
    mask_d = (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d, other=0.0)
    page_row_ptr = (
        page_table_ptr + request.to(tl.int64) * stride_page_b - tl.load(first_page_ptr + request)
    )
    k_head_ptr = k_ptr + (head // GROUP) * stride_k_g
    v_head_ptr = v_ptr + (head // GROUP) * stride_v_g
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -1e30, tl.float32)

    diag = (t0 + 1) // BLOCK_N * BLOCK_N
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(t0 - WINDOW + 1, 0)
    lo = first_key // BLOCK_N * BLOCK_N
    plain_end = lo
    full_lo = lo
    if MOD != 0 and EXTENT > 0 and WINDOW == 0:
        plain_end = tl.maximum(t0 - EXTENT + 1, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.minimum(tl.cdiv(tl.maximum(t0 + BLOCK_M - EXTENT, 0), BLOCK_N) * BLOCK_N, diag)
        for n0 in tl.range(lo, plain_end, BLOCK_N, num_stages=STAGES):
            acc, l, m = _tile(
                acc, l, m, q, n0, q_pos, q_token, head, k_head_ptr, v_head_ptr, page_row_ptr,
                bias_ptr, aux,
                offs_m, offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t, stride_v_p,
                stride_v_t,
                softmax_scale, 0, SCORE_MOD, False, WINDOW, EXTENT, PITCH, PAGE_SIZE, BLOCK_N,
                HEAD_DIM, BLOCK_D,
            )  # fmt: skip
    if WINDOW > 0:
        full_lo = tl.minimum(tl.cdiv(tl.maximum(t0 + BLOCK_M - WINDOW, 0), BLOCK_N) * BLOCK_N, diag)
        if MOD == 2 and WINDOW > EXTENT:
            full_lo = diag
    for n0 in tl.range(plain_end, full_lo, BLOCK_N, num_stages=STAGES):
        acc, l, m = _tile(
            acc, l, m, q, n0, q_pos, q_token, head, k_head_ptr, v_head_ptr, page_row_ptr,
            bias_ptr, aux, offs_m,
            offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t, stride_v_p, stride_v_t,
            softmax_scale,
            MOD, SCORE_MOD, True, WINDOW, EXTENT, PITCH, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    for n0 in tl.range(full_lo, diag, BLOCK_N, num_stages=STAGES):
        acc, l, m = _tile(
            acc, l, m, q, n0, q_pos, q_token, head, k_head_ptr, v_head_ptr, page_row_ptr,
            bias_ptr, aux, offs_m,
            offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t, stride_v_p, stride_v_t,
            softmax_scale,
            MOD, SCORE_MOD, False, WINDOW, EXTENT, PITCH, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    for n0 in tl.range(diag, end_key, BLOCK_N, num_stages=STAGES):
        acc, l, m = _tile(
            acc, l, m, q, n0, q_pos, q_token, head, k_head_ptr, v_head_ptr, page_row_ptr,
            bias_ptr, aux, offs_m,
            offs_n, offs_d, first_key, end_key, stride_k_p, stride_k_t, stride_v_p, stride_v_t,
            softmax_scale,
            MOD, SCORE_MOD, True, WINDOW, EXTENT, PITCH, PAGE_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D,
        )  # fmt: skip

    if MAY_MASK:
        acc = acc / tl.where(l > 0, l, 1.0)[:, None]
    else:
        acc = acc / l[:, None]
    out_ptrs = out_ptr + row_token * stride_out_t + head * stride_out_h
    out_ptrs = out_ptrs + offs_m[:, None] * stride_out_t + offs_d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d)
    if lse_ptr is not None:
        lse = tl.where(l > 0, m + tl.log2(l), float("-inf")) / LOG2E
        tl.store(lse_ptr + q_token * H + head, lse, mask=mask_m)


def attention_prefill(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    page_table: torch.Tensor,
    first_page: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    softmax_scale: float,
    window: int = 0,
    score_mod: ScoreMod | RelativeBias | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
    writer_row: TuningRow | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a ragged batch of query chunks, each on top of its own prefix in the
    pages.

    The keys of the chunk itself must already be in the pages. No host synchronisation; the grid
    depends only on
    T, B and h, so a captured graph serves any lengths with the same T and B.

    Args:
        q: [T, h, D] bf16, fp16 or fp32; rows and heads may be strided, last dim contiguous.
        k_pages, v_pages: [pages, page_size, g, D], q's dtype; g divides h; inner dim contiguous.
        page_table: [B, P] int32; row b lists the pages from number first_page[b] of the request on.
        first_page: [B] int32, number of the first listed page (pages below the window may be gone).
        cu_seqlens_q: [B + 1] int32; request b owns rows cu[b] .. cu[b+1] - 1 of q; rows past cu[B]
        are ignored.
        q_start: [B] int32, position of the request's first query row.
        kv_len: [B] int32, keys the request's last row sees: q_start + q_len.
        softmax_scale: multiplies q.k.
        window: visible keys, the current one included; 0 = all.
        score_mod: None, a `ScoreMod`, or a `RelativeBias` (r then has T rows).
        out: [T, h, D] to write to; default a new tensor. Rows of no request keep what they hold.
        return_lse: also return the log-sum-exp of the scores, [T, h] fp32, natural log.
        arch: architecture (facts or name); default that of q's device.
        row, writer_row: tuning rows to use instead of the tables' choices.
    Returns: out, or (out, lse).
    Raises: ValueError: shapes, dtypes or strides disagree; no tuning row for the architecture.
    """
    T, h, D = q.shape
    arch = request_arch(arch, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_paged(
        "attention_prefill",
        q,
        k_pages,
        v_pages,
        page_table,
        first_page,
        kv_len,
        window,
        score_mod,
        out,
    )
    B = kv_len.shape[0]
    if cu_seqlens_q.shape != (B + 1,) or q_start.shape != (B,):
        raise ValueError(
            f"attention_prefill: cu_seqlens_q {tuple(cu_seqlens_q.shape)} and q_start "
            f"{tuple(q_start.shape)} do not "
            f"fit {B} requests; wanted ({B + 1},) and ({B},)"
        )
    lse = torch.empty(T, h, dtype=torch.float32, device=q.device) if return_lse else None
    if T == 0 or B == 0:
        return out if lse is None else (out, lse)

    mod, extent = mod_facts(score_mod, window)
    row = row or PREFILL.select(
        arch.name,
        head_dim=D,
        window=window,
        mod=mod,
        bits=q.element_size() * 8,
        page_size=k_pages.shape[1],
    )
    tiles = dict(row.constexprs)
    variant = tiles.pop("VARIANT")
    block_m = int(tiles["BLOCK_M"])
    num_blocks = T // block_m + B
    chunks, rows = [Chunk(head0=0, heads=h, first_block=0, blocks=num_blocks)], q
    if mod == MOD_RELATIVE:
        chunks = plan_chunks(num_blocks, h, block_m, extent, q.element_size())
        rows = allocate_rows(chunks, block_m, extent, q)
    for chunk in chunks:
        if isinstance(score_mod, RelativeBias):
            # The first writer follows a launch of the caller's, which it must not overtake.
            chained = bool(row.options.get("launch_pdl"))
            writer = writer_row or PROFILE_WRITER.select(arch.name, bits=q.element_size() * 8)
            if chained and chunk is not chunks[0]:
                writer = replace(writer, options={**writer.options, "launch_pdl": True})
            write_profile_rows(
                rows, score_mod, chunk=chunk, block_m=block_m, extent=extent,
                cu_seqlens_q=cu_seqlens_q, q_start=q_start, row=writer, chained=chained,
                # The Hopper variant adds the bias to q.k, before the scale.
                factor=1 / softmax_scale if variant == "hopper" else LOG2E.value,
            )  # fmt: skip
        tensors = (
            out,
            lse,
            q,
            k_pages,
            v_pages,
            page_table,
            first_page,
            cu_seqlens_q,
            q_start,
            kv_len,
            rows,
        )
        strides = (
            out.stride(0), out.stride(1), q.stride(0), q.stride(1),
            k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
            v_pages.stride(0), v_pages.stride(1), v_pages.stride(2), page_table.stride(0),
        )  # fmt: skip
        constants = {
            "MOD": mod,
            "EXTENT": extent,
            "WINDOW": window,
            "H": h,
            "GROUP": h // k_pages.shape[2],
            "PAGE_SIZE": k_pages.shape[1],
            "HEAD_DIM": D,
            "PITCH": pitch_of(extent),
            "PAD": BUFFER_PAD,
            **tiles,
            **row.launch_options(waits=variant == "hopper" and mod == MOD_RELATIVE),
        }
        if variant == "hopper":
            from triton_attn.hopper import launch_hopper  # Gluon: only where it is used

            launch_hopper(tensors, strides, constants, chunk, B, softmax_scale, arch.compute_units)
            continue
        _prefill_kernel[(chunk.heads, chunk.blocks)](
            *tensors,
            score_mod.aux if isinstance(score_mod, ScoreMod) else (),
            B, chunk.head0, chunk.first_block, *strides, softmax_scale,
            SCORE_MOD=score_mod.fn if isinstance(score_mod, ScoreMod) else None,
            MAY_MASK=isinstance(score_mod, ScoreMod) and score_mod.may_mask,
            BLOCK_D=padded_head_dim(D),
            XCDS=arch.xcds,
            **constants,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def mod_facts(score_mod, window: int) -> tuple[int, int]:
    """Kind of modification, and its extent in distances that can occur (0 = unbounded)."""
    if score_mod is None:
        return MOD_NONE, 0
    if isinstance(score_mod, ScoreMod):
        return MOD_FN, score_mod.extent or 0
    return MOD_RELATIVE, min(score_mod.extent, window) if window else score_mod.extent
