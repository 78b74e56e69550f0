"""Writes the tables of README and docs from the rows in bench/results.

    python -m bench.tables            rewrite them
    python -m bench.tables --check    exit 1 if one is out of date

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import parity, rank_tables
from bench.attention import tables as attention
from bench.engine import tables as engine
from bench.moe import tables as moe
from bench.prefix_cache import tables as prefix_cache
from bench.rows import RESULTS, ROOT, evidence, read
from bench.sampling import tables as sampling
from bench.speculation import tables as speculation

BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.S)


def latest(file: str, *key: str) -> list[dict]:
    """The newest row of every distinct `key`, in the order of first appearance; none where the file
    is not there yet."""
    rows: dict[tuple, dict] = {}
    if not (RESULTS / file).exists():
        return []
    for row in read(RESULTS / file):
        rows[tuple(row[name] for name in key)] = row
    return list(rows.values())


def cpu_decode() -> str:
    """Decode throughput on a CPU against transformers."""
    lines = [
        "| case, batch 16, fp32, greedy | tokens/s | transformers generate | ratio | evidence |",
        "|---|---|---|---|---|",
    ]
    for row in latest("cpu_decode.jsonl", "case"):
        lines.append(
            f"| {row['case']} | {row['tokens_per_s']} | {row['peer_tokens_per_s']} | "
            f"{row['ratio']} | {evidence(row)} |"
        )
    return "\n".join(lines)


Table = Callable[[list[dict]], str]


def newest(table: Table, file: str, key: tuple[str, ...]) -> Callable[[], str]:
    """`table` of the newest rows of a file."""
    return lambda: table(latest(file, *key))


def _attention(op: str) -> Callable[[], str]:
    return newest(partial(attention.times, op=op), attention.FILE, attention.KEY)


def _engine(table: Table) -> Callable[[], str]:
    return newest(table, engine.FILE, engine.KEY)


def _moe(table: Table) -> Callable[[], str]:
    return newest(table, moe.FILE, ("op", "case"))


def _sampling(table: Table) -> Callable[[], str]:
    return newest(table, sampling.FILE, sampling.KEY)


def _speculation(table: Table) -> Callable[[], str]:
    return newest(table, speculation.FILE, speculation.KEY)


def _ranks(table: Table) -> Callable[[], str]:
    return newest(table, rank_tables.FILE, rank_tables.KEY)


def layer_kernels() -> str:
    """The layer's fused kernels beside the chains of torch operations they replace."""
    rows = latest("layer_h200_2026-11-30.jsonl", "op", "case", "variant")
    by_case: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        by_case.setdefault((row["op"], row["case"]), {})[row["variant"]] = row
    lines = [
        "| op | case | torch operations, us (launches) | fused, us (launches) | floor, us | "
        "fused / floor | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for (op, case), found in by_case.items():
        chain, fused = found["torch"], found["triton"]
        lines.append(
            f"| {op} | {case} | {chain['p50_us']} ({chain['launches']}) | "
            f"{fused['p50_us']} ({fused['launches']}) | {fused['floor_us']} | "
            f"{fused['over_floor']} | {evidence(fused)} |"
        )
    return "\n".join(lines)


def profile() -> str:
    """`inkling-rocm profile` of a decode step on a GPU."""
    lines = [
        "| op | calls | launches | us | least MB | of the ceiling | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in latest("profile_h200_2026-11-30.jsonl", "case"):
        fraction = "-" if row["fraction"] is None else f"{row['fraction']:.0%}"
        lines.append(
            f"| {row['case']} | {row['calls']:g} | {row['launches']:g} | {row['us']} | "
            f"{row['mb']} | {fraction} | {evidence(row)} |"
        )
    return "\n".join(lines)


def small_stack() -> str:
    """One workload through this project's engine and through transformers."""
    rows = latest("small_stack_h200_2026-11-30.jsonl", "case", "implementation")
    ours = {r["case"]: r for r in rows if r["implementation"] == "inkling-rocm engine"}
    lines = [
        "| case | implementation | decode step, ms | tokens/s | prefill, ms | step / engine's | "
        "prefill / engine's | evidence |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: r["batch"]):
        own = ours[row["case"]]
        slower = [f"{row[name] / own[name]:.1f}" for name in ("step_ms", "prefill_ms")]
        lines.append(
            f"| {row['case']} | {row['implementation']} | {row['step_ms']} | "
            f"{row['tokens_per_s']} | {row['prefill_ms']} | {slower[0]} | {slower[1]} | "
            f"{evidence(row)} |"
        )
    return "\n".join(lines)


def linear() -> str:
    """Products of few tokens: the fastest tile beside torch's product."""
    file = RESULTS / engine.LINEAR_FILE
    return engine.linear(read(file) if file.exists() else [])


TABLES: dict[str, Callable[[], str]] = {
    "engine_layers": _engine(engine.layers),
    "engine_ops": _engine(engine.ops),
    "engine_steps": _engine(engine.steps),
    "engine_serving": _engine(engine.serving),
    "linear": linear,
    "cpu_decode": cpu_decode,
    "attention_prefill": _attention("prefill"),
    "attention_decode": _attention("decode"),
    "attention_verify": _attention("verify"),
    "attention_counters": newest(attention.counters, attention.COUNTERS_FILE, ("arch", "impl")),
    "moe_experts": _moe(moe.moe_experts),
    "moe_gate": _moe(moe.moe_gate),
    "moe_launches": _moe(moe.moe_launches),
    "moe_layer": _moe(moe.moe_layer),
    "sampling": _sampling(sampling.sampling),
    "lm_head": _sampling(sampling.lm_head),
    "layer_kernels": layer_kernels,
    "parity": newest(parity.table, parity.FILE, ("case",)),
    "profile": profile,
    "small_stack": small_stack,
    "prefix_tiers": newest(prefix_cache.tiers, prefix_cache.FILE, prefix_cache.KEY),
    "prefix_ttft": newest(prefix_cache.ttft, prefix_cache.TTFT_FILE, prefix_cache.TTFT_KEY),
    "ranks": _ranks(rank_tables.ranks),
    "rank_tokens": _ranks(rank_tables.tokens),
    "prompt_graphs": newest(rank_tables.prompts, rank_tables.PROMPTS_FILE, rank_tables.PROMPTS_KEY),
    "speculation_gate": _speculation(speculation.gates),
    "speculation_rounds": _speculation(speculation.rounds),
    "speculation_acceptance": _speculation(speculation.acceptance),
}


def render(text: str) -> str:
    """`text` with every table between markers rewritten."""
    return BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 on a drift")
    check = parser.parse_args().check
    drifted = 0
    for file in documents():
        text = file.read_text(encoding="utf-8")
        new = render(text)
        if new == text:
            continue
        drifted += 1
        if check:
            print(f"{file.relative_to(ROOT)}: a table is not what bench/results says")
        else:
            file.write_text(new, encoding="utf-8")
            print(f"{file.relative_to(ROOT)} rewritten")
    return 1 if check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())
