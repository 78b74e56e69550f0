"""Experts over whole token blocks: rows are tokens, nothing is sorted.

    act[slot, t, :] = gamma[t, slot] * silu(x[t] G^T) * (x[t] U^T)       first launch
    out[t, :]       = sum over slots of act[slot, t, :] D^T              second launch

A slot is one expert: of the T * K choices, the first that names it (later ones leave at once), then
the shared experts, which every token hits. gamma is fp32 and enters before the one rounding of the
inner activations; where a token did not choose the slot's expert it is 0. So each hit expert's
weights are read once, the second launch is one long product over (slot, inner column) with one fp32
accumulator, and the result needs neither partials nor atomics. Slots are summed in order of expert
id, before or after the shared ones (SHARED_FIRST: their addresses need not wait for the list of
slots): a token's sum has the same order whatever its neighbours chose.

With decode batches this is the routed path; with any number of tokens it is the shared experts as
one linearised dense block, and (with one shared expert and gamma = global_scale) the dense MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.device import await_previous, let_next_start
from kernel_base.tuning import TuningRow
from moe_aiter.tiles import down_step, expert_weights, gate_up_tile, grouped_pid
from moe_aiter.tuning import DOWN_TOKENS, SWIGLU_TOKENS

# The slot list is made by one program from a [choices, choices] comparison.
MAX_CHOICES = 128
CHOICE_RADIX = tl.constexpr(MAX_CHOICES)
LIST_ROWS = tl.constexpr(16)
# Arguments whose value must not make another kernel: every new batch size would be compiled.
COUNTS = (
    "tokens", "choices", "first_expert", "num_experts", "stride_gamma", "blocks_m", "shared_experts"
)  # fmt: skip


@triton.jit
def _list_slots(ids_ptr, slots_ptr, choices, first_expert, num_experts, BLOCK_P: tl.constexpr):
    """slots[0] = number of hit local experts; slots[1 + i] = expert * MAX + slot of the i-th one in
    order of id."""
    p = tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + p, mask=p < choices, other=-1) - first_expert
    rows = tl.arange(0, LIST_ROWS)
    # A choice leads if no earlier one names the same expert. Compared in strips: all pairs at once
    # would spill.
    earlier = tl.zeros([BLOCK_P], tl.int32)
    for p0 in range(0, choices, LIST_ROWS):
        q = p0 + rows
        id_q = tl.load(ids_ptr + q, mask=q < choices, other=-1) - first_expert
        same = (id_q[:, None] == ids[None, :]) & (q[:, None] < p[None, :])
        earlier += tl.sum(same.to(tl.int32), 0)
    leads = (ids >= 0) & (ids < num_experts) & (p < choices) & (earlier == 0)
    tl.store(slots_ptr, tl.sum(leads.to(tl.int32), 0))
    for p0 in range(0, choices, LIST_ROWS):
        q = p0 + rows
        id_q = tl.load(ids_ptr + q, mask=q < choices, other=-1) - first_expert
        leads_q = tl.sum((leads[None, :] & (p[None, :] == q[:, None])).to(tl.int32), 1) > 0
        rank = tl.sum((leads[None, :] & (ids[None, :] < id_q[:, None])).to(tl.int32), 1)
        tl.store(slots_ptr + 1 + rank, id_q * CHOICE_RADIX + q, mask=leads_q)


@triton.jit(do_not_specialize=COUNTS)
def _swiglu_tokens_kernel(
    act_ptr, slots_ptr, x_ptr, ids_ptr, gamma_ptr, w13_ptr, shared_ptr,
    tokens, choices, first_expert, num_experts, hidden, width, stride_x, stride_gamma, blocks_m,
    TOP_K: tl.constexpr, BLOCK_P: tl.constexpr, EVEN_K: tl.constexpr, CHAINED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    # Row 0 of the grid lists the slots for the second launch, beside the products.
    slot = tl.program_id(1) - (TOP_K > 0)
    if slot < 0:
        if tl.program_id(0) == 0:
            _list_slots(ids_ptr, slots_ptr, choices, first_expert, num_experts, BLOCK_P)
        return
    block_m, block_n = grouped_pid(tl.program_id(0), blocks_m, tl.cdiv(width, BLOCK_N), GROUP_M)
    t = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_t = t < tokens
    gamma_rows = gamma_ptr + t * stride_gamma
    expert = slot
    if TOP_K > 0:
        p = tl.arange(0, BLOCK_P)
        chosen = tl.load(ids_ptr + tl.minimum(slot, choices - 1))
        expert = chosen - first_expert
        earlier = p < tl.minimum(slot, choices)
        before = tl.load(ids_ptr + p, mask=earlier, other=0)
        named = tl.sum(((before == chosen) & earlier).to(tl.int32), 0)
        if (slot < choices) & ((expert < 0) | (expert >= num_experts) | (named > 0)):
            return
    n0 = block_n * BLOCK_N
    w_ptr = expert_weights(w13_ptr, shared_ptr, expert, slot - choices, 2 * width * hidden)
    inner = gate_up_tile(
        x_ptr, tl.minimum(t, tokens - 1), mask_t, w_ptr, n0, hidden, width, stride_x, EVEN_K,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gamma = tl.load(gamma_rows + TOP_K + slot - choices, mask=mask_t & (slot >= choices), other=0.0)
    for k in tl.static_range(TOP_K):
        picked = tl.load(ids_ptr + t * TOP_K + k, mask=mask_t, other=0) == chosen
        picked &= mask_t & (slot < choices)
        gamma += tl.load(gamma_rows + k, mask=picked, other=0.0)
    inner = inner * gamma[:, None]
    offs_n = n0 + tl.arange(0, BLOCK_N)
    rows = (slot * tokens + t).to(tl.int64)
    tl.store(
        act_ptr + rows[:, None] * width + offs_n[None, :],
        inner.to(act_ptr.dtype.element_ty),
        mask=mask_t[:, None] & (offs_n < width)[None, :],
    )


@triton.jit
def _add_slots(
    acc, act_ptr, slots_ptr, w2_ptr, hit, rows, mask_t, n0, tokens, hidden, width,
    EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + the down products of the hit experts, in the order of the list."""
    steps = tl.cdiv(width, BLOCK_K)  # of one expert; the loop walks (expert, step) without a break
    for i in range(0, hit * steps):
        entry = tl.load(slots_ptr + 1 + i // steps)
        slot, expert = entry % CHOICE_RADIX, entry // CHOICE_RADIX
        a_ptr = act_ptr + slot.to(tl.int64) * tokens * width
        w_ptr = w2_ptr + expert.to(tl.int64) * (hidden * width)
        acc = down_step(
            acc, a_ptr, rows, mask_t, w_ptr, n0, (i % steps) * BLOCK_K, hidden, width, EVEN_K,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=COUNTS)
def _down_tokens_kernel(
    out_ptr, act_ptr, slots_ptr, w2_ptr, shared_ptr,
    tokens, choices, hidden, width, shared_experts, stride_out, blocks_m,
    ROUTED: tl.constexpr, SHARED_FIRST: tl.constexpr, EVEN_K: tl.constexpr, CHAINED: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    block_m, block_n = grouped_pid(tl.program_id(0), blocks_m, tl.cdiv(hidden, BLOCK_N), GROUP_M)
    t = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_t = t < tokens
    n0 = block_n * BLOCK_N
    steps = tl.cdiv(width, BLOCK_K)
    rows = tl.minimum(t, tokens - 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    await_previous(CHAINED)
    if ROUTED:
        hit = tl.load(slots_ptr)
        if not SHARED_FIRST:
            acc = _add_slots(
                acc, act_ptr, slots_ptr, w2_ptr, hit, rows, mask_t, n0, tokens, hidden, width,
                EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    for i in range(0, shared_experts * steps):
        shared = (i // steps).to(tl.int64)
        a_ptr = act_ptr + (choices + shared) * tokens * width
        w_ptr = shared_ptr + shared * (hidden * width)
        acc = down_step(
            acc, a_ptr, rows, mask_t, w_ptr, n0, (i % steps) * BLOCK_K, hidden, width, EVEN_K,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if ROUTED and SHARED_FIRST:
        acc = _add_slots(
            acc, act_ptr, slots_ptr, w2_ptr, hit, rows, mask_t, n0, tokens, hidden, width,
            EVEN_K, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    offs_n = n0 + tl.arange(0, BLOCK_N)
    tl.store(
        out_ptr + t.to(tl.int64)[:, None] * stride_out + offs_n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=mask_t[:, None] & (offs_n < hidden)[None, :],
    )


def experts_by_token(
    x: torch.Tensor,
    topk_ids: torch.Tensor | None,
    gamma: torch.Tensor,
    *,
    w13: torch.Tensor | None,
    w2: torch.Tensor | None,
    shared_w13: torch.Tensor,
    shared_w2: torch.Tensor,
    first_expert: int = 0,
    out: torch.Tensor,
    arch: Arch,
    rows: tuple[TuningRow | None, TuningRow | None] = (None, None),
    library: bool = False,
) -> torch.Tensor:
    """Routed experts (unless topk_ids is None) and shared experts, two launches, rows = tokens.

    The arguments are `moe_aiter.experts.experts`'s, already checked, T >= 1, T * K <= MAX_CHOICES.

    Args:
        gamma: fp32 [T, K + S], or [T, S] without routed experts; the row stride may be 0.
        rows: launch configurations of the two launches; None = the tables'.
        library: the second is torch's matrix product; of one shared expert alone.
    """
    assert not library or (topk_ids is None and len(shared_w2) == 1)
    T, H = x.shape
    K = topk_ids.shape[1] if topk_ids is not None else 0
    S, I = shared_w13.shape[0], shared_w2.shape[2] if w2 is None else w2.shape[2]
    choices, bits = T * K, x.element_size() * 8
    slots = torch.empty(1 + choices, dtype=torch.int32, device=x.device)
    ids = topk_ids if K else slots  # without choices no kernel reads them
    act = torch.empty((choices + S) * T * I, dtype=x.dtype, device=x.device)
    facts = {"tokens": T, "bits": bits, "choices": choices, "width": I, "hidden": H}
    first = rows[0] or SWIGLU_TOKENS.select(arch.name, **facts)
    second = rows[1] or DOWN_TOKENS.select(arch.name, **facts)
    # The second launch's programs may be there, waiting, when the first ends.
    chained = bool(second.options.get("launch_pdl")) and not library
    base = shared_w13 if w13 is None else w13
    c: dict[str, Any] = dict(first.constexprs)
    blocks_m = triton.cdiv(T, c["BLOCK_M"])
    _swiglu_tokens_kernel[(blocks_m * triton.cdiv(I, c["BLOCK_N"]), (K > 0) + choices + S)](
        act, slots, x, ids, gamma, base, shared_w13,
        T, choices, first_expert, 0 if w13 is None else w13.shape[0], H, I, x.stride(0),
        gamma.stride(0), blocks_m,
        TOP_K=K, BLOCK_P=MAX_CHOICES, EVEN_K=H % c["BLOCK_K"] == 0, CHAINED=chained,
        **first.launch_kwargs(),
    )  # fmt: skip
    if library:
        return torch.mm(act.view(T, I), shared_w2[0].T, out=out)
    c = dict(second.constexprs)
    blocks_m = triton.cdiv(T, c["BLOCK_M"])
    _down_tokens_kernel[(blocks_m * triton.cdiv(H, c["BLOCK_N"]),)](
        out, act, slots, w2, shared_w2,
        T, choices, H, I, S, out.stride(0), blocks_m,
        ROUTED=K > 0, EVEN_K=I % c["BLOCK_K"] == 0, CHAINED=chained,
        **{"SHARED_FIRST": False, **second.launch_kwargs(waits=True)},
    )  # fmt: skip
    return out
