"""Measure the gate's launch configurations on this GPU: `python -m bench.moe.tune_gate OUT.jsonl
[--model ...] [--tokens ...]`.

Calls rotate over more copies of the router's weights than the L2 holds, as in a model, where the
experts' weights come between two gates; x stays in L2, where the launch before left it. The table's
own rows come first, with and without one launch. The winners go to moe_aiter/tuning.py by hand,
with OUT's name as their source. One that does not compile, launch or agree with float64 is recorded
with its message.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from bench.moe.problems import EXPERTS, MODELS, SHARED, TOP_K
from bench.moe.run import GATE_COPIES, ROUTE_SCALE
from bench.moe.timing import time_calls
from bench.moe.tune import FAILURES, Config, describe, row
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningRow
from moe_aiter.gate import GateWorkspace, gate
from moe_aiter.problems import GateProblem, make_gate_problem
from moe_aiter.reference import gate_reference
from moe_aiter.tuning import ROUTER

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 4096, 16384)
ONE_LAUNCH_UP_TO = 512
Rows = tuple[TuningRow | None, TuningRow | None]


def select_row(arch: str, tokens: int, warps: int) -> TuningRow:
    return replace(row(arch, {"BLOCK_T": tokens}, warps, 1), options={"num_warps": warps})


# Tokens of a tile, for calls of at most so many.
BLOCKS = {16: (16,), 64: (16, 32, 64), 128: (32, 64), 512: (64, 128)}
# By tokens of a tile: experts of a tile, (depth of a step, stages), waves.
DECODE = {
    16: ((16, 32, 64), ((128, 5), (256, 3), (256, 4), (512, 2), (512, 3)), (1, 2)),
    32: ((32, 64), ((128, 4), (256, 3), (256, 4)), (2, 4)),
    64: ((32, 64), ((128, 5), (256, 3)), (4,)),
    128: ((64,), ((64, 4), (64, 6), (128, 3)), (4,)),
}
SHARED_BYTES = 200_000


def decode_configs(arch: str, tokens: int, hidden: int) -> Iterator[Rows]:
    """One launch with a wave a token in the programs behind; about one round of programs on 132
    multiprocessors."""
    for m in next(blocks for most, blocks in BLOCKS.items() if tokens <= most):
        columns, steps, waves = DECODE[m]
        for n, (k, stages), length, warps in itertools.product(
            columns, steps, (512, 768, 1024, 1536, 2048), waves
        ):
            programs = -(-tokens // m) * -(-(EXPERTS + SHARED) // n) * (hidden // length)
            if hidden % length or length % k or not 60 <= programs <= 290:
                continue
            if stages > max(length // k + 1, 3) or (m + n) * k * 2 * stages > SHARED_BYTES:
                continue
            sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SLICE": length}
            yield row(arch, sizes | {"BEHIND": warps}, warps, stages), None


def prompt_configs(arch: str, tokens: int, hidden: int) -> Iterator[Rows]:
    """Two launches."""
    select = select_row(arch, 1, 1)
    for m, n, length, warps in itertools.product(
        (64, 128), (32, 64), (1536, 2048, 3072, 8192), (4, 8)
    ):
        sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "SLICE": length}
        yield row(arch, sizes, warps, 4), select
    if arch == "sm90":
        for length, stages in itertools.product((768, 1536, 3072, 6144), (3, 4)):
            constexprs = {"VARIANT": "hopper", "BLOCK_K": 64, "SLICE": length, "STAGES": stages}
            yield replace(row(arch, constexprs, 4, 1), options={}), select
    for t, warps in itertools.product((1, 2, 4), (1, 2, 4)):
        yield None, select_row(arch, t, warps)


def configs(arch: str, tokens: int, hidden: int) -> Iterator[Rows]:
    """Every pair of rows to time, the table's first."""
    yield None, None
    table = ROUTER.select(arch, tokens=tokens, bits=16, hidden=hidden, bulk=True)
    apart = {
        name: size for name, size in table.constexprs.items() if name not in ("LAST", "BEHIND")
    }
    if len(apart) < len(table.constexprs):
        yield replace(table, constexprs=apart), None
    some = decode_configs if tokens <= ONE_LAUNCH_UP_TO else prompt_configs
    yield from some(arch, tokens, hidden)


def check(p: GateProblem, run: Callable[[int], tuple], workspace: GateWorkspace) -> dict:
    """How far a configuration is from float64, and whether it repeats itself."""
    fixed = {"top_k": TOP_K, "route_scale": ROUTE_SCALE}
    want_ids, want = gate_reference(p.x, p.weight, p.bias, p.global_scale, **fixed)
    ids, weights = run(0)
    # Scores closer than fp32 rounding may swap places.
    same = (ids == want_ids).all(1)
    off = float(((weights.double() - want)[same].norm() / want[same].norm()).nan_to_num(1e9))
    again = [run(i) for i in range(GATE_COPIES)]
    repeats = all(torch.equal(ids, i) and torch.equal(weights, w) for i, w in again)
    clean = not workspace.tickets.any().item()
    return {
        "same": float(same.float().mean()), "off": off, "repeats": repeats, "clean": clean,
        "ok": bool(same.float().mean() > 0.99 and off < 1e-4 and repeats and clean),
    }  # fmt: skip


def sweep(model: str, tokens: int, path: str) -> None:
    """Time every configuration at `tokens`; append a row each to `path`, print the best."""
    arch, hidden = arch_of_device("cuda:0"), MODELS[model][0]
    p = make_gate_problem(tokens, experts=EXPERTS, hidden=hidden, device="cuda")
    copies = [(p.weight.clone(), p.bias.clone()) for _ in range(GATE_COPIES)]
    workspace = GateWorkspace.allocate(p.x.device)
    results = []
    for rows in configs(arch.name, tokens, hidden):

        def run(index: int, rows: Rows = rows) -> tuple[torch.Tensor, torch.Tensor]:
            weight, bias = copies[index]
            return gate(
                p.x, weight, bias, p.global_scale, top_k=TOP_K, route_scale=ROUTE_SCALE, arch=arch,
                workspace=workspace, rows=rows,
            )  # fmt: skip

        config = Config(table="gate", tokens=tokens, rows=rows)
        record = {"table": "gate", "model": model, "tokens": tokens, "copies": GATE_COPIES}
        record |= describe(config)
        try:
            record |= check(p, run, workspace)
            if record["ok"]:
                record |= time_calls(run, GATE_COPIES, repeats=7)
        except FAILURES as problem:
            record["message"] = repr(problem)[:200]
        results.append(record)
        with open(path, "a", encoding="utf-8") as file:  # an interrupted sweep keeps its rows
            file.write(json.dumps(record) + "\n")
    bad = sum("p50_us" not in r for r in results)
    print(f"gate {model} T={tokens}: {len(results)} configurations, {bad} failed", flush=True)
    timed = sorted((r for r in results if "p50_us" in r), key=lambda r: r["p50_us"])
    for r in (*results[:2], *timed[:6]):
        print("  ", r.get("p50_us", r.get("message")), r["first"], r["second"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--model", nargs="+", default=["inkling-tp8"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    options = parser.parse_args()
    for model, tokens in itertools.product(options.model, options.tokens):
        sweep(model, tokens, options.out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
