"""Attention whose relative bias is read as an ordinary 2-D tile instead of a per-score gather.

For query t and key n the bias is rel[t, t - n]. Each query's profile is stored REVERSED in a row
of pitch L, so that column c holds distance E - c. Then the element for key n of query t sits at

    t * L + E - (t - n)  =  t * (L - 1) + n + E

and a (queries x keys) tile is a strided tile: row stride L - 1, unit column stride. Zeros around
the profile make distances outside [0, E) contribute nothing, so only boundary tiles need a mask.
The key loop is split in three (window edge | full tiles | diagonal), because a conditional inside
it would stop software pipelining. One sequence, no paging: a test kernel, not a product kernel.
"""

import torch
import triton
import triton.language as tl

PAD = 256  # columns of zeros on both sides of a profile: at least BLOCK_M + BLOCK_N


@triton.jit
def _step(
    q,
    k_ptr,
    v_ptr,
    bias_ptr,
    acc,
    l,
    m,
    start_n,
    offs_m,
    offs_d,
    offs_n,
    tokens,
    qk_scale,
    stride_kv,
    bias_pitch,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    n = start_n + offs_n
    if MASKED:
        k = tl.load(
            k_ptr + n[None, :] * stride_kv + offs_d[:, None], mask=n[None, :] < tokens, other=0.0
        )
    else:
        k = tl.load(k_ptr + n[None, :] * stride_kv + offs_d[:, None])
    s = tl.dot(q, k) * qk_scale
    if HAS_BIAS:
        s += tl.load(bias_ptr + offs_m[:, None] * bias_pitch + n[None, :]).to(tl.float32) * LOG2E
    if MASKED:
        distance = offs_m[:, None] - n[None, :]
        visible = distance >= 0
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
        s = tl.where(visible, s, -1e30)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    if MASKED:
        v = tl.load(
            v_ptr + n[:, None] * stride_kv + offs_d[None, :], mask=n[:, None] < tokens, other=0.0
        )
    else:
        v = tl.load(v_ptr + n[:, None] * stride_kv + offs_d[None, :])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, l, m_new


@triton.jit
def strided_bias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    rel_ptr,
    tokens,
    softmax_scale,
    stride_q,
    stride_qh,
    stride_kv,
    stride_kvh,
    bias_pitch,
    stride_rel_h,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    EXTENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    h = tl.program_id(1)
    start_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    offs_m, offs_n, offs_d = (
        start_m + tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_N),
        tl.arange(0, HEAD_DIM),
    )
    q_at = q_ptr + offs_m[:, None] * stride_q + h * stride_qh + offs_d[None, :]
    q = tl.load(q_at, mask=offs_m[:, None] < tokens, other=0.0)
    k_ptr += (h // GROUP) * stride_kvh
    v_ptr += (h // GROUP) * stride_kvh
    bias_ptr = rel_ptr + h * stride_rel_h + EXTENT
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    qk_scale = softmax_scale * 1.4426950408889634
    diagonal = start_m // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(start_m - (WINDOW - 1), 0) // BLOCK_N * BLOCK_N
        full = tl.maximum(start_m + BLOCK_M - WINDOW + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        full = tl.minimum(full, diagonal)
    else:
        first = 0
        full = (
            tl.maximum(start_m - EXTENT - BLOCK_N + 2, 0) // BLOCK_N * BLOCK_N
        )  # before it there is no bias
    for start_n in tl.range(first, full, BLOCK_N, num_stages=STAGES):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l, m = _step(
            q,
            k_ptr,
            v_ptr,
            bias_ptr,
            acc,
            l,
            m,
            start_n,
            offs_m,
            offs_d,
            offs_n,
            tokens,
            qk_scale,
            stride_kv,
            bias_pitch,
            WINDOW,
            WINDOW > 0,
            WINDOW > 0,
        )
    for start_n in tl.range(full, diagonal, BLOCK_N, num_stages=STAGES):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l, m = _step(
            q,
            k_ptr,
            v_ptr,
            bias_ptr,
            acc,
            l,
            m,
            start_n,
            offs_m,
            offs_d,
            offs_n,
            tokens,
            qk_scale,
            stride_kv,
            bias_pitch,
            WINDOW,
            True,
            False,
        )
    for start_n in tl.range(
        diagonal, tl.minimum(start_m + BLOCK_M, tokens), BLOCK_N, num_stages=STAGES
    ):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        acc, l, m = _step(
            q,
            k_ptr,
            v_ptr,
            bias_ptr,
            acc,
            l,
            m,
            start_n,
            offs_m,
            offs_d,
            offs_n,
            tokens,
            qk_scale,
            stride_kv,
            bias_pitch,
            WINDOW,
            True,
            True,
        )
    out_at = out_ptr + offs_m[:, None] * stride_q + h * stride_qh + offs_d[None, :]
    tl.store(out_at, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < tokens)


def reversed_rows(rel_ThE):
    """rel [T, h, E] -> (buffer, row pitch - 1, head stride); zeros outside the profile."""
    tokens, heads, extent = rel_ThE.shape
    pitch = extent + 2 * PAD + 1
    padded = -(-tokens // PAD) * PAD  # the last query tile reads rows past the last token
    head = (padded * pitch + 4096 + 15) // 16 * 16
    buffer = torch.zeros(heads * head + 16384, dtype=rel_ThE.dtype)
    rows = torch.as_strided(buffer, (heads, tokens, extent), (head, pitch, 1), 8192 + 1)
    rows.copy_(rel_ThE.permute(1, 0, 2).flip(-1))
    return buffer[8192:], pitch - 1, head


def strided_bias(
    q_ThD, k_TgD, v_TgD, rel_ThE, *, window=0, block_m=64, block_n=64, num_warps=4, stages=2
):
    """Causal attention with a relative bias; `window` counts the current key, 0 = no window."""
    tokens, heads, head_dim = q_ThD.shape
    rel, bias_pitch, stride_rel_h = reversed_rows(rel_ThE)
    out = torch.full_like(q_ThD, float("nan"))
    strided_bias_kernel[(triton.cdiv(tokens, block_m), heads)](
        q_ThD,
        k_TgD,
        v_TgD,
        out,
        rel,
        tokens,
        1 / head_dim,
        q_ThD.stride(0),
        q_ThD.stride(1),
        k_TgD.stride(0),
        k_TgD.stride(1),
        bias_pitch,
        stride_rel_h,
        GROUP=heads // k_TgD.shape[1],
        WINDOW=window,
        EXTENT=rel_ThE.shape[-1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HEAD_DIM=head_dim,
        STAGES=stages,
        num_warps=num_warps,
        matrix_instr_nonkdim=16,
    )
    return out


def reference(q_ThD, k_TgD, v_TgD, rel_ThE, window, dtype=torch.float64):
    """The same attention with plain torch in `dtype`."""
    tokens, heads, head_dim = q_ThD.shape
    extent = rel_ThE.shape[-1]
    position = torch.arange(tokens)
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (window or tokens))
    out = torch.empty(q_ThD.shape, dtype=dtype)
    for h in range(heads):
        g = h // (heads // k_TgD.shape[1])
        bias = rel_ThE[:, h].to(dtype).gather(1, distance.clamp(0, extent - 1))
        bias = bias.masked_fill((distance < 0) | (distance >= extent), 0.0)
        s = q_ThD[:, h].to(dtype) @ k_TgD[:, g].to(dtype).T / head_dim + bias
        out[:, h] = s.masked_fill(~visible, float("-inf")).softmax(-1) @ v_TgD[:, g].to(dtype)
    return out
