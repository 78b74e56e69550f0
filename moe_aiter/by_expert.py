"""Experts over the choices of a decode batch: two launches, nothing is sorted.

A program of the first launch owns an expert and a tile of its inner columns. It finds the expert's
choices itself, among all T * K, and walks them BLOCK_M at a time; the expert's first program leaves
the list for the second launch. Rows of `act` and `partial` are choice numbers (token * K + k), then
those of the shared experts, which come as further experts with a row block of tokens each.

    act[c, :]     = gamma[c] * silu(x[t] G_e^T) * (x[t] U_e^T)     first launch
    partial[c, :] = act[c, :] D_e^T                                second launch, in x's dtype
    out[t, :]     = sum over the choices c of t, then over the shared experts, fp32, one rounding

The sum is made, for a tile of columns, by the program of that tile that ends last (an integer
ticket). Which one that is does not show in the result: the order of the sum is fixed. Programs are
numbered so that a tile's end together, early tiles' sums beside later tiles' products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.device import drain_stores
from kernel_base.tuning import TuningRow
from moe_aiter.routing import parts
from moe_aiter.tiles import down_step, expert_weights, gate_up_tile
from moe_aiter.tuning import DOWN_BY_EXPERT, SWIGLU_BY_EXPERT

# All choices are looked through at a time, and all experts' counts.
MAX_CHOICES = MAX_EXPERTS = 1024
# Arguments whose value must not make another kernel: every new batch size would be compiled.
COUNTS = ("tokens", "choices", "first_expert", "stride_gamma")


@triton.jit
def _shared_block(e, num_experts, tokens, BLOCK_M: tl.constexpr):
    """(shared expert, first token) of a program behind the routed experts'; else shared < 0."""
    blocks = tl.cdiv(tokens, BLOCK_M)
    behind = e - num_experts
    shared = tl.where(behind >= 0, behind // blocks, -1)
    return shared, tl.maximum(behind, 0) % blocks * BLOCK_M


@triton.jit(do_not_specialize=COUNTS)
def _swiglu_by_expert_kernel(
    act_ptr, list_ptr, count_ptr, tickets_ptr, x_ptr, ids_ptr, gamma_ptr, w13_ptr, shared_ptr,
    tokens, choices, first_expert, num_experts, hidden, width, stride_x, stride_gamma,
    TOP_K: tl.constexpr, FOLD: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_P: tl.constexpr,
    TICKETS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n0 = tl.program_id(0) * BLOCK_N
    e = tl.program_id(1)
    shared, t0 = _shared_block(e, num_experts, tokens, BLOCK_M)
    first_tile = tl.program_id(0) == 0
    if first_tile & (e == 0):
        tl.store(tickets_ptr + tl.arange(0, TICKETS), tl.zeros([TICKETS], tl.int32))
    p = tl.arange(0, BLOCK_P)
    local = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
    mine = (local == e) & (p < choices) & (shared < 0)
    count = tl.sum(mine.to(tl.int32), 0)
    if first_tile & (e < num_experts):
        tl.store(count_ptr + e, count)
    if FOLD:
        count = tl.where(shared >= 0, tl.minimum(tokens - t0, BLOCK_M), count)
    m = tl.arange(0, BLOCK_M)
    offs_n = n0 + tl.arange(0, BLOCK_N)
    size = 2 * width * hidden
    if FOLD:
        w_ptr = expert_weights(w13_ptr, shared_ptr, e, shared, size)
    else:
        w_ptr = w13_ptr + e.to(tl.int64) * size
    found = -1
    for row0 in range(0, count, BLOCK_M):
        rows = tl.minimum(count - row0, BLOCK_M)
        choice = tl.zeros([BLOCK_M], tl.int32)
        for i in range(0, tl.where(shared < 0, rows, 0)):
            found = tl.min(tl.where(mine & (p > found), p, BLOCK_P), 0)
            choice = tl.where(m == i, found, choice)
        valid = m < rows
        if first_tile & (shared < 0):
            tl.store(list_ptr + e * choices + row0 + m, choice, mask=valid)
        token, column = choice // TOP_K, choice % TOP_K
        if FOLD:
            token = tl.where(shared >= 0, tl.minimum(t0 + m, tokens - 1), token)
            column = tl.where(shared >= 0, TOP_K + shared, column)
            choice = tl.where(shared >= 0, choices + shared * tokens + t0 + m, choice)
        inner = gate_up_tile(
            x_ptr, token, valid, w_ptr, n0, hidden, width, stride_x, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        gamma = tl.load(gamma_ptr + token * stride_gamma + column, mask=valid, other=0.0)
        tl.store(
            act_ptr + choice.to(tl.int64)[:, None] * width + offs_n[None, :],
            (inner * gamma[:, None]).to(act_ptr.dtype.element_ty),
            mask=valid[:, None] & (offs_n < width)[None, :],
        )


@triton.jit
def _sum_choices(
    out_ptr, partial_ptr, ids_ptr, n0, tokens, choices, first_expert, num_experts, hidden,
    stride_out,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out for all tokens and one tile of columns."""
    offs_n = n0 + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < hidden)[None, :]
    for t0 in range(0, tokens, BLOCK_T):
        t = t0 + tl.arange(0, BLOCK_T)
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for k in tl.static_range(TOP_K):
            local = tl.load(ids_ptr + t * TOP_K + k, mask=t < tokens, other=-1) - first_expert
            inside = (local >= 0) & (local < num_experts) & (t < tokens)
            ptrs = partial_ptr + (t * TOP_K + k).to(tl.int64)[:, None] * hidden + offs_n[None, :]
            # The programs that wrote these ran on other compute units: read past this one's L1.
            part = tl.load(ptrs, mask=inside[:, None] & mask_n, other=0.0, cache_modifier=".cg")
            acc += part.to(tl.float32)
        mask = (t < tokens)[:, None] & mask_n
        for s in tl.static_range(SHARED):
            row = (choices + s * tokens + t).to(tl.int64)
            ptrs = partial_ptr + row[:, None] * hidden + offs_n[None, :]
            acc += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        out_ptrs = out_ptr + t.to(tl.int64)[:, None] * stride_out + offs_n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _down_by_expert_kernel(
    out_ptr, partial_ptr, act_ptr, list_ptr, count_ptr, tickets_ptr, ids_ptr, w2_ptr, shared_ptr,
    tokens, choices, first_expert, num_experts, hidden, width, stride_out,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, EVEN_K: tl.constexpr, AMD: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    n0 = tl.program_id(1) * BLOCK_N
    shared, t0 = _shared_block(e, num_experts, tokens, BLOCK_M)
    x = tl.arange(0, BLOCK_X)
    counts = tl.load(count_ptr + x, mask=x < num_experts, other=0)
    count = tl.load(count_ptr + tl.minimum(e, num_experts - 1))
    if SHARED > 0:
        count = tl.where(shared >= 0, tl.minimum(tokens - t0, BLOCK_M), count)
    programs = tl.sum((counts > 0).to(tl.int32), 0) + SHARED * tl.cdiv(tokens, BLOCK_M)
    # Without any choice here the first program stores the sum of nothing.
    if (count == 0) & ((programs > 0) | (e > 0)):
        return
    m = tl.arange(0, BLOCK_M)
    offs_n = n0 + tl.arange(0, BLOCK_N)
    size = hidden * width
    if SHARED > 0:
        w_ptr = expert_weights(w2_ptr, shared_ptr, e, shared, size)
    else:
        w_ptr = w2_ptr + e.to(tl.int64) * size
    for row0 in range(0, count, BLOCK_M):
        valid = m < count - row0
        # Rows past the end name a choice that is there and are never stored.
        listed = tl.minimum(row0 + m, count - 1)
        choice = tl.load(list_ptr + e * choices + listed, mask=valid & (shared < 0), other=0)
        if SHARED > 0:
            choice = tl.where(
                shared >= 0, choices + shared * tokens + tl.minimum(t0 + m, tokens - 1), choice
            )
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, width, BLOCK_K):
            acc = down_step(
                acc, act_ptr, choice.to(tl.int64), valid, w_ptr, n0, k, hidden, width, EVEN_K,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        tl.store(
            partial_ptr + choice.to(tl.int64)[:, None] * hidden + offs_n[None, :],
            acc.to(partial_ptr.dtype.element_ty),
            mask=valid[:, None] & (offs_n < hidden)[None, :],
        )
    # Every wave's stores must be out before the ticket is drawn.
    drain_stores(m, AMD)
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")
    if ticket == tl.maximum(programs, 1) - 1:
        tl.debug_barrier()
        _sum_choices(
            out_ptr, partial_ptr, ids_ptr, n0, tokens, choices, first_expert, num_experts, hidden,
            stride_out, TOP_K, SHARED, BLOCK_T, BLOCK_N,
        )  # fmt: skip


def experts_by_expert(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gamma: torch.Tensor,
    *,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w2: torch.Tensor,
    first_expert: int = 0,
    out: torch.Tensor,
    arch: Arch,
    rows: tuple[TuningRow | None, TuningRow | None] = (None, None),
) -> torch.Tensor:
    """Routed and shared experts of at most MAX_CHOICES choices, two launches.

    The arguments are `moe_aiter.experts.experts`'s, already checked, T >= 1, T * K <= MAX_CHOICES,
    at most MAX_EXPERTS local experts, all of one width.

    Args:
        rows: launch configurations of the two products; None = the tables'.
    """
    (T, H), K, X, I = x.shape, topk_ids.shape[1], w13.shape[0], w2.shape[2]
    S, choices, device = shared_w13.shape[0], T * K, x.device
    facts = {"rows": choices // X, "bits": x.element_size() * 8, "width": I, "hidden": H}
    first = rows[0] or SWIGLU_BY_EXPERT.select(arch.name, **facts)
    second = rows[1] or DOWN_BY_EXPERT.select(arch.name, **facts)
    c: dict[str, Any] = dict(first.constexprs)
    d: dict[str, Any] = dict(second.constexprs)
    tiles = triton.cdiv(H, d["BLOCK_N"])
    tickets = triton.next_power_of_2(tiles)
    lists, counts, drawn = parts(device, torch.int32, (X * choices, X, tickets))
    all_rows = choices + S * T
    act = torch.empty(all_rows, I, dtype=x.dtype, device=device)
    partial = torch.empty(all_rows, H, dtype=x.dtype, device=device)
    _swiglu_by_expert_kernel[
        (triton.cdiv(I, c["BLOCK_N"]), X + S * triton.cdiv(T, c["BLOCK_M"]))
    ](
        act, lists, counts, drawn, x, topk_ids, gamma, w13, shared_w13,
        T, choices, first_expert, X, H, I, x.stride(0), gamma.stride(0),
        TOP_K=K, FOLD=S > 0, EVEN_K=H % c["BLOCK_K"] == 0, BLOCK_P=MAX_CHOICES, TICKETS=tickets,
        **first.launch_kwargs(),
    )  # fmt: skip
    _down_by_expert_kernel[(X + S * triton.cdiv(T, d["BLOCK_M"]), tiles)](
        out, partial, act, lists, counts, drawn, topk_ids, w2, shared_w2,
        T, choices, first_expert, X, H, I, out.stride(0),
        TOP_K=K, SHARED=S, EVEN_K=I % d["BLOCK_K"] == 0, AMD=arch.vendor == "amd",
        BLOCK_X=triton.next_power_of_2(X), **second.launch_kwargs(),
    )  # fmt: skip
    return out
