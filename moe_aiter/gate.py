"""Shared-sink gate: router product, selection and weights.

    logit  = x Wg^T                                              fp32, X routed + S shared
    ids    = top-K of sigmoid(logit[:X]) + bias                  ties to the lowest id
    weight = softmax(logsigmoid(logit[ids + shared])) * route_scale * global_scale

The router product is split along H in slices of fixed length; each program writes the partial sums
of one slice and one tile of experts. For few tokens the program of a token block that finishes last
(an integer ticket) adds the slices in order and selects: one launch. For more, a second launch
does, and on Hopper router_hopper.py makes the product. The sum's order depends on neither which
program is last nor on the other tokens.

logsigmoid(l) = min(l, 0) - log(1 + exp(-|l|)) is finite for any logit, so the weights stay right
where all sigmoids underflow. bf16 products are exact in fp32; fp32 products use "ieee".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_base.arch import Arch
from kernel_base.device import drain_stores
from kernel_base.tuning import TuningRow
from moe_aiter.checks import check_rows, check_weight, request_arch, require
from moe_aiter.tuning import ROUTER, SELECT

# Most token blocks of the one-launch form.
TICKETS = 64
# Columns of a row of partial sums are a multiple of this: rows begin where wide accesses may.
PITCH = 16
# The lowest finite fp32.
LOWEST = tl.constexpr(-3.4028234663852886e38)
NEVER = tl.constexpr(-(2**31))


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sum_slices(partial_ptr, rows, columns, mask, tokens, pitch, SLICES: tl.constexpr):
    """Logits at [rows, columns]: the slices' partial sums [slice, token, expert], added in
    order."""
    ptrs = partial_ptr + rows[:, None].to(tl.int64) * pitch + columns
    # The programs that wrote these ran on other compute units: read past this one's L1.
    logits = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    # Unrolled: all the loads leave before the first is awaited.
    for _ in tl.static_range(1, SLICES):
        ptrs += tokens * pitch
        logits += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    return logits


@triton.jit
def _select(
    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, t0, tokens, num_experts, route_scale,
    stride_ids, pitch,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    t = t0 + tl.arange(0, BLOCK_T)
    x = tl.arange(0, BLOCK_X)
    w = tl.arange(0, BLOCK_W)[None, :]
    mask_t = t < tokens
    inside = (x < num_experts)[None, :]
    bias = tl.load(bias_ptr + x, mask=x < num_experts, other=0.0)
    scale = route_scale * tl.load(scale_ptr)
    mask = mask_t[:, None] & inside
    logits = _sum_slices(partial_ptr, t, x[None, :], mask, tokens, pitch, SLICES)
    used = mask_t[:, None] & (w < TOP_K + SHARED)
    # Columns past K become the shared experts'.
    chosen = tl.zeros([BLOCK_T, BLOCK_W], tl.int32) + (num_experts - TOP_K + w)
    shared = _sum_slices(partial_ptr, t, chosen, used & (w >= TOP_K), tokens, pitch, SLICES)
    # A NaN score ranks last.
    score = tl.maximum(tl.sigmoid(logits) + bias[None, :], LOWEST)
    # Integers in the scores' order (no score is -0), because their maxima take one instruction a
    # wave. The lowest marks what may not be chosen (again).
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)
    chosen_logits = shared
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        expert = tl.min(tl.where(key == best[:, None], x[None, :], BLOCK_X), 1)
        here = x[None, :] == expert[:, None]
        key = tl.where(here, NEVER, key)
        logit = tl.sum(tl.where(here, logits, 0.0), 1)
        chosen = tl.where(w == k, expert[:, None], chosen)
        chosen_logits = tl.where(w == k, logit[:, None], chosen_logits)
    tl.store(ids_ptr + t[:, None] * stride_ids + w, chosen, mask=mask_t[:, None] & (w < TOP_K))
    logs = tl.where(w < TOP_K + SHARED, _log_sigmoid(chosen_logits), float("-inf"))
    powers = tl.exp(logs - tl.max(logs, 1)[:, None])
    weights = powers / tl.sum(powers, 1)[:, None] * scale
    tl.store(weights_ptr + t[:, None] * (TOP_K + SHARED) + w, weights, mask=used)


@triton.jit(do_not_specialize=("tokens", "stride_ids"))
def _router_kernel(
    partial_ptr, ticket_ptr, ids_ptr, weights_ptr, x_ptr, w_ptr, bias_ptr, scale_ptr,
    tokens, num_experts, hidden, route_scale, stride_x, stride_ids, pitch,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, FINISH: tl.constexpr, SLICES: tl.constexpr,
    EVEN_K: tl.constexpr, AMD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    outputs = num_experts + SHARED
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h0 = tl.program_id(2) * SLICE
    offs_k = tl.arange(0, BLOCK_K)
    mask_t, mask_n = t < tokens, n < outputs
    x_ptrs = x_ptr + h0 + (t[:, None] * stride_x + offs_k[None, :])
    # Columns past the end repeat the last one and are never stored: cheaper than masking weights.
    w_ptrs = w_ptr + h0 + (tl.minimum(n, outputs - 1)[None, :] * hidden + offs_k[:, None])
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, SLICE, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + k, mask=mask_t[:, None], other=0.0)
            w = tl.load(w_ptrs + k)
        else:
            mask_k = offs_k < hidden - h0 - k
            x = tl.load(x_ptrs + k, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
            w = tl.load(w_ptrs + k, mask=mask_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    row = tl.program_id(2).to(tl.int64) * tokens + t
    tl.store(
        partial_ptr + row[:, None] * pitch + n[None, :],
        acc,
        mask=mask_t[:, None] & mask_n[None, :],
    )
    if FINISH:
        # Every wave's stores must be out before the ticket is drawn.
        drain_stores(tl.arange(0, BLOCK_M), AMD)
        tl.debug_barrier()
        programs = tl.num_programs(1) * tl.num_programs(2)
        ticket_ptr += tl.program_id(0)
        ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
        if ticket < programs - 1:
            return
        tl.debug_barrier()
        tl.store(ticket_ptr, 0)
        for t0 in range(0, BLOCK_M, BLOCK_T):
            first = tl.program_id(0) * BLOCK_M + t0
            if first < tokens:
                _select(
                    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, first, tokens,
                    num_experts, route_scale, stride_ids, pitch,
                    SHARED, TOP_K, SLICES, BLOCK_T, BLOCK_X, BLOCK_W,
                )  # fmt: skip


@triton.jit(do_not_specialize=("tokens", "stride_ids"))
def _select_kernel(
    ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, tokens, num_experts, route_scale,
    stride_ids, pitch,
    SHARED: tl.constexpr, TOP_K: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    _select(
        ids_ptr, weights_ptr, partial_ptr, bias_ptr, scale_ptr, tl.program_id(0) * BLOCK_T, tokens,
        num_experts, route_scale, stride_ids, pitch,
        SHARED, TOP_K, SLICES, BLOCK_T, BLOCK_X, BLOCK_W,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GateWorkspace:
    """The tickets of the one-launch form. Calls that share them must be ordered on one stream; a
    captured graph must keep them alive.

    Attributes: tickets: int32 [TICKETS], zero between calls (the kernel leaves them so).
    """

    tickets: torch.Tensor

    @staticmethod
    def allocate(device: torch.device) -> GateWorkspace:
        """A workspace of one device; costs one small launch."""
        return GateWorkspace(tickets=torch.zeros(TICKETS, dtype=torch.int32, device=device))


def gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    top_k: int,
    route_scale: float,
    ids_out: torch.Tensor | None = None,
    weights_out: torch.Tensor | None = None,
    workspace: GateWorkspace | None = None,
    arch: Arch | str | None = None,
    rows: tuple[TuningRow | None, TuningRow | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens; no host synchronisation, capturable.

    One launch where the router's row says so (with a workspace), else two.

    Args:
        x: [T, H]. weight: [X + S, H] in x's dtype, routed rows then shared rows. bias: fp32 [X].
        global_scale:
            fp32 [1].
        top_k: K <= X. route_scale: dimensionless.
        ids_out: int32 [T, K], rows of any pitch: where to record the ids (a routing-replay buffer).
        weights_out: fp32 [T, K + S] contiguous.
        workspace: see GateWorkspace; None allocates one.
        rows: launch configurations of the router product and of the selection; None = the
            tables'.
    Returns: topk_ids int32 [T, K], best first, ties to the lowest id; weights fp32 [T, K + S].
    Raises: ValueError: an argument does not fit, or no tuning row.
    """
    op = "gate"
    check_rows(op, "x", x)
    arch = request_arch(arch, x)
    (T, H), X = x.shape, bias.shape[0]
    S, K = weight.shape[0] - X, top_k
    require(op, S >= 0, "weight's rows", weight.shape[0], f"at least the {X} of bias")
    check_weight(op, "weight", weight, (X + S, H), x)
    require(op, bias.dtype == torch.float32, "bias's dtype", bias.dtype, torch.float32)
    require(op, 1 <= K <= X, "top_k", K, f"1 to {X}")
    scale_is = (global_scale.numel(), global_scale.dtype)
    require(op, scale_is == (1, torch.float32), "global_scale", scale_is, (1, torch.float32))
    ids = torch.empty(T, K, dtype=torch.int32, device=x.device) if ids_out is None else ids_out
    ids_are = (tuple(ids.shape), ids.dtype, ids.stride(1))
    require(op, ids_are == ((T, K), torch.int32, 1), "ids_out", ids_are, ((T, K), torch.int32, 1))
    if weights_out is None:
        weights_out = torch.empty(T, K + S, dtype=torch.float32, device=x.device)
    out_is = (tuple(weights_out.shape), weights_out.dtype, weights_out.is_contiguous())
    wanted = ((T, K + S), torch.float32, True)
    require(op, out_is == wanted, "weights_out", out_is, wanted)
    if T == 0:
        return ids, weights_out
    facts = {"tokens": T, "bits": x.element_size() * 8, "hidden": H}
    row = rows[0] or ROUTER.select(arch.name, **facts, bulk=bulk_copies(x, X, S))
    c: dict[str, Any] = dict(row.constexprs)
    # A slice longer than the depth is the whole depth, not masked steps behind its end.
    c["SLICE"] = min(c["SLICE"], triton.cdiv(H, c["BLOCK_K"]) * c["BLOCK_K"])
    slices = triton.cdiv(H, c["SLICE"])
    pitch = triton.cdiv(X + S, PITCH) * PITCH
    partial = torch.empty(slices, T, pitch, dtype=torch.float32, device=x.device)
    shared = {
        "SHARED": S, "TOP_K": K, "SLICES": slices, "BLOCK_X": triton.next_power_of_2(X),
        "BLOCK_W": triton.next_power_of_2(max(K + S, 2)),
    }  # fmt: skip
    tail = 0
    if c.pop("VARIANT", None) == "hopper":
        from moe_aiter.router_hopper import launch_router  # Gluon: only where it is used

        launch_router(partial, x, weight, num_experts=X, depth=c["SLICE"], row=row)
    else:
        blocks, tail = triton.cdiv(T, c["BLOCK_M"]), c.pop("TAIL", 0)
        if blocks > TICKETS:
            tail = 0
        tickets = (workspace or GateWorkspace.allocate(x.device)).tickets if tail else None
        even = H % c["SLICE"] == 0 and c["SLICE"] % c["BLOCK_K"] == 0
        _router_kernel[(blocks, triton.cdiv(X + S, c["BLOCK_N"]), slices)](
            partial, tickets, ids, weights_out, x, weight, bias, global_scale,
            T, X, H, route_scale, x.stride(0), ids.stride(0), pitch,
            FINISH=tail > 0, EVEN_K=even, AMD=arch.vendor == "amd",
            BLOCK_T=max(tail, 1), **shared, **c, **row.launch_options(),
        )  # fmt: skip
    if not tail:
        second = rows[1] or SELECT.select(arch.name, tokens=T)
        _select_kernel[(triton.cdiv(T, second.constexprs["BLOCK_T"]),)](
            ids, weights_out, partial, bias, global_scale, T, X, route_scale, ids.stride(0), pitch,
            **shared, **second.launch_kwargs(),
        )  # fmt: skip
    return ids, weights_out


def bulk_copies(x: torch.Tensor, num_experts: int, shared: int) -> bool:
    """Whether the Hopper variant can take a call: 16-bit, 16-byte aligned rows, at most 256 routed
    and 16 shared experts."""
    aligned = x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.element_size() == 2 and aligned and num_experts <= 256 and shared <= 16
