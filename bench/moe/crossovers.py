"""Where one way through gets faster than another: `python -m bench.moe.crossovers OUT.jsonl`.

Times every way of `moe_aiter.tuning.PLAN` (unsorted; shared experts folded in; shared experts
apart) and the ways of sorting over the number of tokens; each must agree with the first. The bounds
go into moe_aiter/tuning.py by hand.
"""

from __future__ import annotations

import argparse

import torch

from bench.moe.problems import (
    EXPERTS,
    MODELS,
    ROUTINGS,
    SHARED,
    TOP_K,
    Layer,
    make_layer,
    make_weights,
)
from bench.moe.problems import routing as make_routing
from bench.moe.timing import time_calls
from bench.moe.tune import FAILURES, row
from bench.rows import Rows
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningRow
from moe_aiter import experts
from moe_aiter.lookup import MAX_CHOICES as MOST_LOOKED_UP
from moe_aiter.register import sort_reference
from moe_aiter.routing import sort_choices
from moe_aiter.tokens import MAX_CHOICES

TOKENS = (
    4, 8, 10, 12, 14, 16, 20, 24, 32, 43, 64, 96, 128, 170, 256, 320, 400, 512, 1024, 2048, 3072,
    4096, 8192,
)  # fmt: skip
UNEVEN_TOKENS = (32, 64, 128, 170)  # also with some experts' rows many times others'
EVERY, NEVER = 1 << 30, -1


def plan(arch: str, by_token_choices: int, fold_rows: int, lookup_choices: int = 0) -> TuningRow:
    bounds = {
        "BY_TOKEN_CHOICES": by_token_choices, "LOOKUP_CHOICES": lookup_choices,
        "FOLD_ROWS": fold_rows, "FOLD_FROM": 0,
    }  # fmt: skip
    return TuningRow(
        arch=arch, constexprs=bounds, options={}, evidence="guess", source="under test"
    )


def ways(layer: Layer, arch: str) -> dict:
    """Time of each way, by name; one that fails, or disagrees with the first, has a message."""
    tokens = layer.tokens
    plans = {"folded": plan(arch, 0, EVERY), "separate": plan(arch, 0, NEVER)}
    if tokens * TOP_K <= MAX_CHOICES:
        plans["by_token"] = plan(arch, MAX_CHOICES, NEVER)
    if tokens * TOP_K <= MOST_LOOKED_UP:
        plans["lookup"] = plan(arch, 0, NEVER, MOST_LOOKED_UP)
    found: dict = {}
    first = None
    for name, way in plans.items():

        def run(index, way=way):
            call = layer.calls[index % ROUTINGS]
            return experts(call.x, call.ids, call.gamma, **call.weights, plan=way)

        try:
            out = run(0).float()
            first = out if first is None else first
            off = float((out - first).norm() / first.norm())
            if not off <= 0.02:  # a NaN is no agreement
                found[f"{name}_message"] = f"differs by {off:.2g} from the first way"
                continue
            found[f"{name}_us"] = time_calls(run, ROUTINGS, repeats=7, steady=True)["p50_us"]
        except FAILURES as problem:
            found[f"{name}_message"] = repr(problem)[:200]
    return found


def sorts(tokens: int) -> dict:
    """Time of each way of sorting, by "launches x chunk x warps"."""
    arch = arch_of_device("cuda:0")
    ids = [make_routing(tokens, seed, "cuda") for seed in range(ROUTINGS)]
    want = sort_reference(ids[0], EXPERTS)
    found: dict = {}
    for launches, chunk, warps in (
        (1, 256, 4), (1, 1024, 4), (1, 2048, 8), (1, 4096, 8), (2, 128, 4), (2, 256, 4),
        (2, 256, 8), (2, 512, 4), (3, 64, 4), (3, 128, 4),
    ):  # fmt: skip
        config = row(arch.name, {"LAUNCHES": launches, "BLOCK_P": chunk}, warps, 1)

        def run(index, config=config):
            return sort_choices(
                ids[index % ROUTINGS], num_experts=EXPERTS, block_m=64, arch=arch, row=config
            )

        name = f"{launches}x{chunk}x{warps}"
        if not torch.equal(run(0).choice, want):
            found[f"{name}_message"] = "wrong order"
            continue
        found[f"{name}_us"] = time_calls(run, ROUTINGS, repeats=7)["p50_us"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    options = parser.parse_args()
    arch = arch_of_device("cuda:0").name
    rows = Rows(options.out, device=torch.cuda.get_device_name(), arch=arch)
    for tokens in options.tokens:
        rows.add("moe.sort", f"T={tokens}", "pass", **sorts(tokens))
    for model in options.model:
        weights = make_weights(model)
        for tokens in options.tokens:
            for uneven in (False, True) if tokens in UNEVEN_TOKENS else (False,):
                layer = make_layer(model, tokens, weights, shared=SHARED, skewed=uneven)
                rows.add("moe.plan", layer.name, "pass", **ways(layer, arch))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
