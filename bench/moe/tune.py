"""Measure launch configurations on this GPU: `python -m bench.moe.tune OUT.jsonl [--table ...]
[--model ...]`.

Each table is swept with the other launches at their rows of moe_aiter/tuning.py; the winners go
there by hand, with OUT's name as their source. Configurations are compiled first, by several
processes, into Triton's cache. One that does not compile, launch or agree with the first is
recorded with its message. The gate's are measured by bench.moe.tune_gate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton

from bench.moe.problems import MODELS, ROUTINGS, SHARED, TOP_K, Layer, make_layer, make_weights
from bench.moe.timing import time_calls
from kernel_base.arch import Arch, arch_of_device
from kernel_base.tuning import TuningRow
from moe_aiter.grouped import experts_by_choice, experts_looked_up
from moe_aiter.tokens import MAX_CHOICES, experts_by_token

FAILURES = (RuntimeError, ValueError, triton.OutOfResources, triton.CompilationError)
PROCESSES = 12
TOKENS = {
    "by_token": (1, 4, 16),
    "shared": (1024, 8192),
    "by_choice": (16, 32, 128, 1024, 8192),
    "lookup": (16, 32, 64, 128),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One thing to time: the two rows of a pair of launches (None = the table's)."""

    table: str
    tokens: int
    rows: tuple[TuningRow | None, TuningRow | None]


def row(arch: str, constexprs: dict, warps: int, stages: int) -> TuningRow:
    return TuningRow(
        arch=arch, constexprs=constexprs, options={"num_warps": warps, "num_stages": stages},
        evidence="guess", source="under test",
    )  # fmt: skip


def tile(m: int, n: int, k: int, group: int = 1) -> dict:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}


def by_token_configs(arch: str, tokens: int) -> Iterator[tuple]:
    """Pairs: the launches overlap at their ends, so that the best of each is not the best pair."""
    firsts = (
        (32, 256, 4, 4), (32, 256, 4, 6), (32, 256, 2, 6), (16, 256, 2, 4), (16, 256, 1, 4),
        (32, 128, 4, 3), (32, 128, 2, 4), (32, 128, 4, 6), (64, 128, 4, 6), (16, 128, 1, 6),
    )  # fmt: skip
    seconds = (
        (16, 128, 2, 6), (16, 128, 2, 8), (16, 128, 2, 10), (16, 128, 2, 12), (16, 128, 1, 8),
        (32, 128, 4, 8), (64, 128, 4, 6), (16, 256, 2, 5), (16, 64, 2, 12),
    )  # fmt: skip
    for (n, k, warps, stages), (n2, k2, warps2, stages2) in itertools.product(firsts, seconds):
        first = row(arch, tile(16, n, k), warps, stages)
        second = row(arch, tile(16, n2, k2) | {"SHARED_FIRST": True}, warps2, stages2)
        yield first, replace(second, options={**second.options, "launch_pdl": True})


def shared_configs(arch: str, tokens: int) -> Iterator[tuple]:
    few = tokens <= 64
    blocks = (16, 32, 64) if few else (64, 128)
    columns = (16, 32, 64) if few else (64, 128)
    for m, n, (k, warps, stages) in itertools.product(
        blocks, columns, ((64, 4, 3), (64, 4, 4), (128, 4, 3), (64, 8, 3), (64, 8, 4), (256, 4, 3))
    ):
        if n * k > 8192:
            continue
        yield row(arch, tile(m, n, k, 8), warps, stages), None
        yield None, row(arch, tile(m, n if few else 2 * n, k, 8), warps, stages)


def by_choice_configs(arch: str, tokens: int) -> Iterator[tuple]:
    blocks = (16,) if tokens <= 128 else (32, 64) if tokens <= 2048 else (128,)
    ups = ((64, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3))
    downs = ((128, 128, 4, 2), (128, 128, 4, 3), (128, 64, 4, 4), (64, 128, 4, 4))
    if tokens > 128:
        ups += ((128, 128, 8, 3), (64, 64, 4, 4), (128, 64, 8, 3))
        downs += ((256, 64, 8, 3), (256, 64, 8, 4), (256, 64, 4, 3))
    for m, group, up, down in itertools.product(blocks, (1, 4), ups, downs):
        yield tuple(row(arch, tile(m, n, k, group), warps, st) for n, k, warps, st in (up, down))


def lookup_configs(arch: str, tokens: int) -> Iterator[tuple]:
    """One side at a time beside the other's row: programs of both end in rounds, so compare several
    numbers of tokens."""
    ups = (
        (64, 128, 4, 4, 3), (64, 128, 1, 4, 3), (64, 128, 4, 4, 4), (64, 128, 4, 8, 3),
        (32, 256, 4, 4, 3), (32, 256, 1, 4, 3), (32, 128, 4, 4, 4), (64, 256, 4, 8, 2),
        (128, 128, 4, 8, 2),
    )  # fmt: skip
    for n, k, group, warps, stages in ups:
        yield row(arch, tile(16, n, k, group), warps, stages), None
    downs = ((128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 4, 4), (64, 128, 4, 4))
    sums = ((8, 128), (4, 128), (16, 64))
    for (n, k, warps, stages), group, (together, columns) in itertools.product(
        downs, (1, 4, 1 << 20), sums
    ):
        if columns > n:
            continue
        tail = {"TAIL": True, "BLOCK_T": together, "BLOCK_C": columns}
        yield None, row(arch, tile(16, n, k, group) | tail, warps, stages)


CONFIGS = {
    "by_token": by_token_configs,
    "shared": shared_configs,
    "by_choice": by_choice_configs,
    "lookup": lookup_configs,
}


WAYS: dict[str, Callable] = {
    "by_token": experts_by_token, "shared": experts_by_token, "by_choice": experts_by_choice,
    "lookup": experts_looked_up,
}  # fmt: skip


def runner(table: str, layer: Layer, arch: Arch) -> Callable[[Config, int], torch.Tensor]:
    """What is timed for a configuration, as a function of (config, call number)."""

    def run(config: Config, index: int) -> torch.Tensor:
        call = layer.calls[index % ROUTINGS]
        weights, ids, gamma = dict(call.weights), call.ids, call.gamma
        if table == "shared":
            weights |= {"w13": None, "w2": None}
            ids, gamma = None, gamma[:, TOP_K:]
        op = WAYS[table]
        out = torch.empty_like(call.x)
        return op(call.x, ids, gamma, **weights, out=out, arch=arch, rows=config.rows)

    return run


def compile_some(job: tuple[str, str, int, int]) -> None:
    """In a process of its own: launch every PROCESSES-th configuration once, to fill the cache."""
    table, model, tokens, first = job
    arch = arch_of_device("cuda:0")
    weights = make_weights(model)
    layer = make_layer(
        model, tokens, weights, shared=SHARED if table in ("shared", "lookup") else 0
    )
    run = runner(table, layer, arch)
    for rows in itertools.islice(CONFIGS[table](arch.name, tokens), first, None, PROCESSES):
        try:
            run(Config(table=table, tokens=tokens, rows=rows), 0)
            torch.cuda.synchronize()
        except FAILURES:
            continue  # the measuring process meets the same failure and records it


def describe(config: Config) -> dict:
    names = ("first", "second")
    return {
        name: None if r is None else {**r.constexprs, **r.options}
        for name, r in zip(names, config.rows, strict=True)
    }


def sweep(table: str, model: str, weights: dict, tokens: int, pool, path: str) -> None:
    pool.map(compile_some, [(table, model, tokens, first) for first in range(PROCESSES)])
    arch = arch_of_device("cuda:0")
    layer = make_layer(
        model, tokens, weights, shared=SHARED if table in ("shared", "lookup") else 0
    )
    run = runner(table, layer, arch)
    expected, results = None, []
    for rows in ((None, None), *CONFIGS[table](arch.name, tokens)):
        config = Config(table=table, tokens=tokens, rows=rows)
        record = {"table": table, "model": model, "tokens": tokens, **describe(config)}
        try:
            out = run(config, 0).float()
            expected = out if expected is None else expected
            record["off"] = float((out - expected).norm() / expected.norm())
            if record["off"] < 0.02:
                record |= time_calls(lambda i, c=config: run(c, i), ROUTINGS, repeats=5)
        except FAILURES as problem:
            record["message"] = repr(problem)[:200]
        results.append(record)
        with open(path, "a", encoding="utf-8") as file:  # an interrupted sweep keeps its rows
            file.write(json.dumps(record) + "\n")
    print(f"{table} {model} T={tokens}: {len(results)} configurations", flush=True)
    for r in sorted((r for r in results if "p50_us" in r), key=lambda r: r["p50_us"])[:5]:
        print("  ", r["p50_us"], r["first"], r["second"], flush=True)
    default = results[0]
    print("   table's rows:", default.get("p50_us", default.get("message")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--table", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--model", nargs="+", default=["inkling-tp8"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for model in options.model:
            weights = make_weights(model)
            for table in options.table:
                for tokens in options.tokens or TOKENS[table]:
                    if table == "by_token" and tokens * TOP_K > MAX_CHOICES:
                        continue
                    sweep(table, model, weights, tokens, pool, options.out)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
