"""The launches of a large batch timed one by one: what the sum of a call's time is made of."""

from __future__ import annotations

import torch

from bench.moe.gate import layer_passes
from bench.moe.problems import ROUTINGS, TOP_K, make_layer, make_weights
from bench.moe.timing import time_calls
from bench.rows import Rows
from kernel_base.arch import arch_named
from moe_aiter import experts
from moe_aiter.combine import combine
from moe_aiter.routing import sort_choices
from moe_aiter.tuning import DOWN_GROUPED, SWIGLU_GROUPED

TOKENS = 8192


def launches_alone(rows: Rows, model: str) -> None:
    """One row: us of sorting, of both products and of the sum, routed experts alone. Only for the
    256-row blocks of hopper.py; elsewhere nothing is added."""
    arch = arch_named(rows.arch)
    weights = make_weights(model)
    layer = make_layer(model, TOKENS, weights, shared=0)
    calls, (X, H, I) = layer.calls, weights["w2"].shape
    facts = {"rows": TOKENS * TOP_K // X, "bits": 16, "width": I, "hidden": H, "bulk": True}
    first, second = (table.select(arch.name, **facts) for table in (SWIGLU_GROUPED, DOWN_GROUPED))
    if first.constexprs.get("VARIANT") != "hopper":
        return
    from moe_aiter.hopper import launch_product  # Gluon: only where it is used

    ok, error, eager = layer_passes(
        lambda call: experts(call.x, call.ids, call.gamma, **call.weights), layer
    )
    block_m = first.constexprs["BLOCK_M"]

    def sort(index: int):
        return sort_choices(
            calls[index].ids, num_experts=X, block_m=block_m, by_size=True, arch=arch
        )

    orders = [sort(index) for index in range(ROUTINGS)]
    fixed = {"tokens": TOKENS, "top_k": TOP_K, "shared_experts": 0, "arch": arch}
    act = torch.empty(orders[0].choice.numel(), I, dtype=torch.bfloat16, device="cuda")
    partial = torch.empty(orders[0].choice.numel(), H, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(calls[0].x)

    def gate_up(index: int):
        call, order = calls[index], orders[index]
        launch_product(act, call.x, weights["w13"], None, call.gamma, order, row=first, **fixed)

    def down(index: int):
        launch_product(partial, act, weights["w2"], None, None, orders[index], row=second, **fixed)

    def add_up(index: int):
        combine(
            out, partial, None, calls[index].ids, place=orders[index].place, first_expert=0,
            num_experts=X, shared=0, arch=arch,
        )  # fmt: skip

    parts = {"sort_us": sort, "gate_up_us": gate_up, "down_us": down, "combine_us": add_up}
    found = {}
    if ok:
        for name, part in parts.items():
            found[name] = time_calls(part, ROUTINGS, steady=True)["p50_us"]
        found["sum_us"] = round(sum(found.values()), 2)
    rows.add(
        "moe.launches", f"{layer.name}, 0 shared experts folded in",
        "pass" if ok else f"fail: error {error:.2g}, eager {eager:.2g}", **found,
    )  # fmt: skip
