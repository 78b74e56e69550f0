"""Shared-sink gate: router product, selection and weights.

    logit  = x Wg^T                                              fp32, X routed + S shared
    ids    = top-K of sigmoid(logit[:X]) + bias                  ties to the lowest id
    weight = softmax(logsigmoid(logit[ids + shared])) * route_scale * global_scale

The router product (gate_router.py) is split along H in slices of fixed length. The selection
(gate_select.py) adds the slices in order: in programs of the same launch where the router's row
says so, else in a second launch. On Hopper router_hopper.py makes the product of prompts. A token's
result does not depend on the other tokens, but their number chooses the rows, whose slices differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from moe_aiter.checks import check_rows, check_weight, request_arch, require
from moe_aiter.gate_router import _router_kernel
from moe_aiter.gate_select import _select_kernel
from moe_aiter.tuning import ROUTER, SELECT

# Most token blocks of the one-launch forms.
TICKETS = 64
# Columns of a row of partial sums are a multiple of this: rows begin where wide accesses may.
PITCH = 16
# fp32 numbers a thread loads at once.
LANE_LOADS = 4


@dataclass(frozen=True, kw_only=True)
class GateWorkspace:
    """The token blocks' counters of the one-launch forms. Calls that share them must be ordered on
    one stream; a captured graph must keep them alive.

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
    block_x = triton.next_power_of_2(X)
    shared = {
        "SHARED": S, "TOP_K": K, "SLICES": slices, "BLOCK_X": block_x,
        "BLOCK_W": triton.next_power_of_2(max(K + S, arch.wave_size)),
        "PART": min(block_x, arch.wave_size * LANE_LOADS),
    }  # fmt: skip
    together = 0
    if c.pop("VARIANT", None) == "hopper":
        from moe_aiter.router_hopper import launch_router  # Gluon: only where it is used

        launch_router(partial, x, weight, num_experts=X, depth=c["SLICE"], row=row)
    else:
        blocks, tiles = triton.cdiv(T, c["BLOCK_M"]), triton.cdiv(X + S, c["BLOCK_N"])
        last, behind = c.pop("LAST", 0), c.pop("BEHIND", 0)
        if blocks > TICKETS:
            last = behind = 0
        together = last or behind
        tickets = (workspace or GateWorkspace.allocate(x.device)).tickets if together else None
        layers = slices
        if behind:
            assert c["BLOCK_M"] % behind == 0, "a program selects for tokens of one block"
            layers += triton.cdiv(triton.cdiv(T, behind), blocks * tiles)
        even = H % c["SLICE"] == 0 and c["SLICE"] % c["BLOCK_K"] == 0
        _router_kernel[(blocks, tiles, layers)](
            partial, tickets, ids, weights_out, x, weight, bias, global_scale,
            T, X, H, route_scale, x.stride(0), ids.stride(0), pitch,
            LAST=last > 0, BEHIND=behind > 0, EVEN_K=even, AMD=arch.vendor == "amd",
            BLOCK_T=max(together, 1), **shared, **c, **row.launch_options(),
        )  # fmt: skip
    if not together:
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
