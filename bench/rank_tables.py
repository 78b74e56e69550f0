"""Tables of ranks (docs/tensor_parallel.md) and of prompts from graphs (docs/bench.md)."""

from __future__ import annotations

import math

from bench.rows import evidence

FILE = "tensor_parallel_h200_2026-11-30.jsonl"
KEY = ("op", "case", "dtype", "layers")
PROMPTS_FILE = "prompt_graphs_h200_2026-11-30.jsonl"
PROMPTS_KEY = ("op", "case", "config", "layers", "rank_slice")


def ranks(rows: list[dict]) -> str:
    """Decode steps and first tokens by number of ranks, beside the first mode's."""
    lines = [
        "| bf16 | mode | ms | tokens/s | beside one GPU | rank 0 in collectives, us a step | "
        "evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    alone: dict[str, float] = {}
    modes = [row["mode"] for row in rows]
    for row in sorted(rows, key=lambda row: (modes.index(row["mode"]), row.get("batch", math.inf))):
        time = row.get("step_ms", row.get("first_token_ms"))
        if time is None:
            continue
        what = row["case"].removeprefix(row["mode"] + ", ")
        faster = alone.setdefault(what, time) / time
        lines.append(
            f"| {what} ({row['layers']} layers) | {row['mode']} | {time} | "
            f"{row.get('tokens_per_s', '')} | {faster:.2f}x | "
            f"{row.get('collectives_us_a_step', '')} | {evidence(row)} |"
        )
    return "\n".join(lines)


def tokens(rows: list[dict]) -> str:
    """Whether ranks give the tokens of one."""
    lines = ["| greedy tokens | dtype | equal to one GPU's | evidence |", "|---|---|---|---|"]
    for row in rows:
        if row["case"].endswith(", tokens"):
            lines.append(
                f"| {row['mode']} ({row['layers']} layers) | {row['dtype']} | {row['gate']} | "
                f"{evidence(row)} |"
            )
    return "\n".join(lines)


def prompts(rows: list[dict]) -> str:
    """Time to the first token from graphs and kernel by kernel."""
    lines = [
        "| prompt, one rank of TP8 | from a graph, ms | kernel by kernel, ms | ratio | gate | "
        "evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        graph, launched = row["graph_ms"], row["launched_ms"]
        lines.append(
            f"| {row['case']} ({row['layers']} layers, {row['config']}) | {graph} | {launched} | "
            f"{launched / graph:.2f}x | {row['gate']} | {evidence(row)} |"
        )
    return "\n".join(lines)
