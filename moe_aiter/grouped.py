"""Experts over choices grouped by expert: sorted by launches before these, or looked up by these.

    act[r, :]     = gamma[c] * silu(x[t] G_e^T) * (x[t] U_e^T)    r = place of choice c of token t
    in the sort
    partial[c, :] = act[r, :] D_e^T                               rounded to the model dtype
    out[t, :]     = sum over the choices c of t, then over the shared experts, fp32, one rounding

gamma is fp32 and enters before the one rounding of the inner activations. The sum runs in a fixed
order and needs no floating-point atomics. With LOOKUP, for few choices, the programs of the first
launch find their row blocks themselves and the second launch adds up too: two launches instead of
four. With FOLD the shared experts are row blocks of the same two launches
(choice number T * K + s * T + t), which saves launches; without it they come as a finished [T, H]
addend.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.device import arrive
from kernel_base.tuning import TuningRow
from moe_aiter.combine import arrive_and_sum, combine, wait_and_sum
from moe_aiter.lookup import FEWEST, blocks_to_find, find_block
from moe_aiter.routing import ROW_ALIGN, sort_choices
from moe_aiter.tiles import down_step, expert_weights, gate_up_tile, grouped_pid
from moe_aiter.tuning import DOWN_GROUPED, DOWN_LOOKUP, SWIGLU_GROUPED, SWIGLU_LOOKUP

# Arguments whose value must not make another kernel: every new batch size would be compiled.
COUNTS = (
    "tokens", "choices", "blocks", "all_blocks", "stride_gamma", "first_expert", "num_experts"
)  # fmt: skip


@triton.jit
def _block(
    block, blocks, expert, row0, end, choice_ptr, tokens, choices,
    FOLD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(expert, first row of `act`, choice numbers, valid) of a row block; shared experts come
    behind the sorted blocks.

    A shared expert s is expert -2 - s; -1 is an empty slot.
    """
    offs = tl.arange(0, BLOCK_M)
    if FOLD:
        per_shared = tl.cdiv(tokens, BLOCK_M)
        behind = block - blocks
        shared = behind // per_shared
        t0 = behind % per_shared * BLOCK_M
        first = choices + shared * tokens
        expert = tl.where(behind >= 0, -2 - shared, expert)
        row0 = tl.where(behind >= 0, first + t0, row0)
        end = tl.where(behind >= 0, first + tokens, end)
    valid = (row0 + offs < end) & (expert != -1)
    choice = tl.load(choice_ptr + row0 + offs, mask=valid & (expert >= 0), other=0)
    if FOLD:
        choice = tl.where(expert < -1, row0 + offs, choice)
    return expert, row0, choice, valid


@triton.jit(do_not_specialize=COUNTS)
def _swiglu_grouped_kernel(
    act_ptr, x_ptr, gamma_ptr, w13_ptr, shared_ptr,
    choice_ptr, block_expert_ptr, block_begin_ptr, block_end_ptr, ids_ptr, arrived_ptr,
    tokens, choices, blocks, all_blocks, first_expert, num_experts, hidden, width, stride_x,
    stride_gamma,
    TOP_K: tl.constexpr, FOLD: tl.constexpr, EVEN_K: tl.constexpr, AMD: tl.constexpr,
    LOOKUP: tl.constexpr, BLOCK_P: tl.constexpr, TILES: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if LOOKUP:  # the second launch counts from 0
        tile = tl.arange(0, TILES)
        zero = tl.zeros([TILES], tl.int32)
        tl.store(arrived_ptr + tile, zero, mask=(tile >= 0) & (tl.program_id(0) == 0))
    block, block_n = grouped_pid(tl.program_id(0), all_blocks, tl.cdiv(width, BLOCK_N), GROUP_M)
    at = tl.minimum(block, blocks - 1) if FOLD else block
    if LOOKUP:
        expert, row0, end = find_block(
            at, choice_ptr, block_expert_ptr, block_begin_ptr, block_end_ptr, ids_ptr, choices,
            first_expert, num_experts, AMD, BLOCK_P, BLOCK_M,
        )  # fmt: skip
    else:
        expert = tl.load(block_expert_ptr + at)
        row0 = tl.load(block_begin_ptr + at)
        end = tl.load(block_end_ptr + at)
    expert, row0, choice, valid = _block(
        block, blocks, expert, row0, end, choice_ptr, tokens, choices, FOLD, BLOCK_M
    )
    if expert == -1:
        return
    token = choice // TOP_K
    column = choice % TOP_K
    if FOLD:
        token = tl.where(expert < 0, (choice - choices) % tokens, token)
        column = tl.where(expert < 0, TOP_K - 2 - expert, column)
    size = 2 * width * hidden
    if FOLD:
        w_ptr = expert_weights(w13_ptr, shared_ptr, expert, -2 - expert, size)
    else:
        w_ptr = w13_ptr + expert.to(tl.int64) * size
    n0 = block_n * BLOCK_N
    inner = gate_up_tile(
        x_ptr, token, valid, w_ptr, n0, hidden, width, stride_x, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gamma = tl.load(gamma_ptr + token * stride_gamma + column, mask=valid, other=0.0)
    offs_n = n0 + tl.arange(0, BLOCK_N)
    tl.store(
        act_ptr
        + row0.to(tl.int64) * width
        + (tl.arange(0, BLOCK_M)[:, None] * width + offs_n[None, :]),
        (inner * gamma[:, None]).to(act_ptr.dtype.element_ty),
        mask=valid[:, None] & (offs_n < width)[None, :],
    )


@triton.jit(do_not_specialize=COUNTS)
def _down_grouped_kernel(
    out_ptr, partial_ptr, act_ptr, w2_ptr, shared_ptr, addend_ptr,
    choice_ptr, block_expert_ptr, block_begin_ptr, block_end_ptr, ids_ptr, arrived_ptr,
    tokens, choices, blocks, all_blocks, first_expert, num_experts, hidden, width, stride_out,
    stride_addend,
    FOLD: tl.constexpr, EVEN_K: tl.constexpr, AMD: tl.constexpr, LOOKUP: tl.constexpr,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCKS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TAIL: tl.constexpr = False, BLOCK_T: tl.constexpr = 16, BLOCK_C: tl.constexpr = 64,
):  # fmt: skip
    tiles = tl.cdiv(hidden, BLOCK_N)
    if TAIL:
        index = tl.program_id(0) - all_blocks * tiles
        if index >= 0:
            wait_and_sum(
                index, arrived_ptr, block_expert_ptr, out_ptr, partial_ptr, addend_ptr, ids_ptr,
                tokens, choices, blocks, first_expert, num_experts, hidden, stride_out,
                stride_addend, TOP_K, SHARED, BLOCKS, BLOCK_M, BLOCK_N, BLOCK_T, BLOCK_C,
            )  # fmt: skip
            return
    block, block_n = grouped_pid(tl.program_id(0), all_blocks, tiles, GROUP_M)
    at = tl.minimum(block, blocks - 1) if FOLD else block
    expert = tl.load(block_expert_ptr + at)
    row0 = tl.load(block_begin_ptr + at)
    end = tl.load(block_end_ptr + at)
    expert, row0, choice, valid = _block(
        block, blocks, expert, row0, end, choice_ptr, tokens, choices, FOLD, BLOCK_M
    )
    n0 = block_n * BLOCK_N
    if expert == -1:
        if LOOKUP and not TAIL:
            arrive_and_sum(
                n0, all_blocks, arrived_ptr, out_ptr, partial_ptr, addend_ptr, ids_ptr, tokens,
                choices, first_expert, num_experts, hidden, stride_out, stride_addend,
                TOP_K, SHARED, AMD, BLOCK_N, BLOCK_T, BLOCK_C,
            )  # fmt: skip
        return
    size = hidden * width
    if FOLD:
        w_ptr = expert_weights(w2_ptr, shared_ptr, expert, -2 - expert, size)
    else:
        w_ptr = w2_ptr + expert.to(tl.int64) * size
    a_ptr = act_ptr + row0.to(tl.int64) * width
    rows = tl.where(valid, tl.arange(0, BLOCK_M), 0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, width, BLOCK_K):
        acc = down_step(
            acc, a_ptr, rows, valid, w_ptr, n0, k, hidden, width, EVEN_K, BLOCK_N, BLOCK_K
        )
    offs_n = n0 + tl.arange(0, BLOCK_N)
    tl.store(
        partial_ptr + choice.to(tl.int64)[:, None] * hidden + offs_n[None, :],
        acc.to(partial_ptr.dtype.element_ty),
        mask=valid[:, None] & (offs_n < hidden)[None, :],
    )
    if TAIL:
        arrive(arrived_ptr + block_n, rows, AMD)
    elif LOOKUP:
        arrive_and_sum(
            n0, all_blocks, arrived_ptr, out_ptr, partial_ptr, addend_ptr, ids_ptr, tokens,
            choices, first_expert, num_experts, hidden, stride_out, stride_addend,
            TOP_K, SHARED, AMD, BLOCK_N, BLOCK_T, BLOCK_C,
        )  # fmt: skip


def experts_by_choice(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gamma: torch.Tensor,
    *,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_w13: torch.Tensor | None,
    shared_w2: torch.Tensor | None,
    addend: torch.Tensor | None = None,
    first_expert: int = 0,
    out: torch.Tensor,
    arch: Arch,
    rows: tuple[TuningRow | None, TuningRow | None] = (None, None),
) -> torch.Tensor:
    """Routed experts over sorted choices: four launches (sort, gate/up, down, combine).

    The arguments are `moe_aiter.experts.experts`'s, already checked, T >= 1.

    Args:
        shared_w13, shared_w2: shared experts to fold in; None = none.
        addend: [T, H] added last, in x's dtype: shared experts computed elsewhere.
        rows: launch configurations of the two products, of one BLOCK_M; None = the tables'.
    Raises: ValueError: the two configurations disagree on BLOCK_M, which the sort depends on.
    """
    (T, H), K, X, I = x.shape, topk_ids.shape[1], w13.shape[0], w2.shape[2]
    S = 0 if shared_w13 is None else shared_w13.shape[0]
    choices, bits = T * K, x.element_size() * 8
    facts = {
        "rows": choices // max(X, 1), "bits": bits, "width": I, "hidden": H,
        "bulk": _bulk_copies(x, I),
    }  # fmt: skip
    first = rows[0] or SWIGLU_GROUPED.select(arch.name, **facts)
    second = rows[1] or DOWN_GROUPED.select(arch.name, **facts)
    c: dict[str, Any] = dict(first.constexprs)
    block_m = c["BLOCK_M"]
    _same_blocks(first, second)
    hopper = c.get("VARIANT") == "hopper"
    order = sort_choices(
        topk_ids, num_experts=X, block_m=block_m, first_expert=first_expert, by_size=hopper,
        arch=arch,
    )  # fmt: skip
    blocks = order.block_expert.numel()
    all_blocks = blocks + S * triton.cdiv(T, block_m)
    align = ROW_ALIGN.value if hopper else 1
    shared_rows = triton.cdiv(T, align) * align
    # hopper.py adds up the shared experts' down products itself.
    summed = min(S, 1) if hopper else S
    sorted_rows = order.choice.numel()
    act = torch.empty(sorted_rows + S * shared_rows, I, dtype=x.dtype, device=x.device)
    partial = torch.empty(sorted_rows + summed * shared_rows, H, dtype=x.dtype, device=x.device)
    done: dict[str, Any] = {
        "addend": addend, "topk_ids": topk_ids, "place": order.place, "first_expert": first_expert,
        "num_experts": X, "shared": summed, "shared_rows": shared_rows, "arch": arch,
    }  # fmt: skip
    if hopper:
        from moe_aiter.hopper import launch_product  # Gluon: only where it is used

        fixed: dict[str, Any] = {"tokens": T, "top_k": K, "shared_experts": S, "arch": arch}
        launch_product(act, x, w13, shared_w13, gamma, order, row=first, **fixed)
        launch_product(partial, act, w2, shared_w2, None, order, row=second, **fixed)
        return combine(out, partial, **done)
    where = (order.choice, order.block_expert, order.block_begin, order.block_end)
    sizes = (T, choices, blocks, all_blocks, first_expert, X, H, I)
    _swiglu_grouped_kernel[(all_blocks * triton.cdiv(I, c["BLOCK_N"]),)](
        act, x, gamma, w13, shared_w13, *where, None, None, *sizes, x.stride(0), gamma.stride(0),
        TOP_K=K, FOLD=S > 0, EVEN_K=H % c["BLOCK_K"] == 0, AMD=False,
        LOOKUP=False, BLOCK_P=1, TILES=1, **first.launch_kwargs(),
    )  # fmt: skip
    c = dict(second.constexprs)
    _down_grouped_kernel[(all_blocks * triton.cdiv(H, c["BLOCK_N"]),)](
        None, partial, act, w2, shared_w2, None, *where, None, None, *sizes, 0, 0,
        TOP_K=K, SHARED=S, FOLD=S > 0, EVEN_K=I % c["BLOCK_K"] == 0, AMD=False,
        LOOKUP=False, BLOCKS=1, **second.launch_kwargs(),
    )  # fmt: skip
    return combine(out, partial, **done)


def experts_looked_up(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    gamma: torch.Tensor,
    *,
    w13: torch.Tensor,
    w2: torch.Tensor,
    shared_w13: torch.Tensor | None,
    shared_w2: torch.Tensor | None,
    addend: torch.Tensor | None = None,
    first_expert: int = 0,
    out: torch.Tensor,
    arch: Arch,
    rows: tuple[TuningRow | None, TuningRow | None] = (None, None),
) -> torch.Tensor:
    """The same for at most MAX_CHOICES choices and MAX_EXPERTS local experts, in two launches.

    Arguments and errors are those of `experts_by_choice`; the tables are others.
    """
    (T, H), K, X, I = x.shape, topk_ids.shape[1], w13.shape[0], w2.shape[2]
    S = 0 if shared_w13 is None else shared_w13.shape[0]
    choices, device = T * K, x.device
    facts = {"rows": choices // X, "bits": x.element_size() * 8, "width": I, "hidden": H}
    first = rows[0] or SWIGLU_LOOKUP.select(arch.name, **facts)
    second = rows[1] or DOWN_LOOKUP.select(arch.name, **facts)
    c: dict[str, Any] = dict(first.constexprs)
    d: dict[str, Any] = dict(second.constexprs)
    _same_blocks(first, second)
    order = blocks_to_find(choices, num_experts=X, block_m=c["BLOCK_M"], device=device)
    where = (order.choice, order.block_expert, order.block_begin, order.block_end)
    blocks = order.block_expert.numel()
    all_blocks = blocks + S * triton.cdiv(T, c["BLOCK_M"])
    tiles = triton.cdiv(H, d["BLOCK_N"])
    arrived = torch.empty(triton.next_power_of_2(tiles), dtype=torch.int32, device=device)
    act = torch.empty(choices + S * T, I, dtype=x.dtype, device=device)
    partial = torch.empty(choices + S * T, H, dtype=x.dtype, device=device)
    sizes = (T, choices, blocks, all_blocks, first_expert, X, H, I)
    fixed = {"TOP_K": K, "FOLD": S > 0, "AMD": arch.vendor == "amd", "LOOKUP": True}
    _swiglu_grouped_kernel[(all_blocks * triton.cdiv(I, c["BLOCK_N"]),)](
        act, x, gamma, w13, shared_w13, *where, topk_ids, arrived, *sizes, x.stride(0),
        gamma.stride(0),
        EVEN_K=H % c["BLOCK_K"] == 0, BLOCK_P=max(FEWEST, triton.next_power_of_2(choices)),
        TILES=arrived.numel(), **fixed, **first.launch_kwargs(),
    )  # fmt: skip
    sums = triton.cdiv(T, d["BLOCK_T"]) * triton.cdiv(H, d["BLOCK_C"]) if d["TAIL"] else 0
    _down_grouped_kernel[(all_blocks * tiles + sums,)](
        out, partial, act, w2, shared_w2, addend, *where, topk_ids, arrived, *sizes, out.stride(0),
        0 if addend is None else addend.stride(0),
        EVEN_K=I % d["BLOCK_K"] == 0, SHARED=S, BLOCKS=triton.next_power_of_2(blocks),
        **fixed, **second.launch_kwargs(),
    )  # fmt: skip
    return out


def _same_blocks(first: TuningRow, second: TuningRow) -> None:
    """Raises: ValueError: the two products' rows have not one BLOCK_M."""
    up, down = first.constexprs["BLOCK_M"], second.constexprs["BLOCK_M"]
    if up != down:
        raise ValueError(
            f"experts by choice: BLOCK_M is {up} in the gate/up row and {down} in the down row; "
            "wanted one: the row blocks of one launch serve both"
        )


def _bulk_copies(x: torch.Tensor, width: int) -> bool:
    """Whether the Hopper variant can take these activations: whole 64-column steps of both depths,
    16-byte aligned rows, 32-bit offsets."""
    return (
        x.shape[1] % 64 == 0
        and width % 64 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and x.shape[0] * x.stride(0) < 2**31
    )
