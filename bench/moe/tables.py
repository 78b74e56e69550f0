"""Tables of docs/moe.md and README from the rows that `bench.moe.run` appends."""

from __future__ import annotations

from bench.rows import evidence

FILE = "moe_h200_2026-11-30.jsonl"


def moe_experts(rows: list[dict]) -> str:
    """Routed experts beside SGLang's kernels in the same process."""
    found = {(row["op"], row["case"]): row for row in rows}
    lines = [
        "| one rank, tokens | experts hit | moe_aiter, us (launches) | "
        "SGLang 0.5.23, us (launches) | SGLang / moe_aiter | floor, us | moe_aiter / floor | "
        "evidence |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (op, case), row in found.items():
        peer = found.get(("moe.experts/sglang", case))
        if op != "moe.experts":
            continue
        theirs = "not measured | -"
        if peer is not None:
            ratio = peer["p50_us"] / row["p50_us"]
            theirs = f"{_times(peer)} | {ratio:.2f}"
        lines.append(
            f"| {case} | {row['hit_experts']} | {_times(row)} | {theirs} | "
            f"{row['floor_us']} | {row['times_floor']} | {_evidence(row)} |"
        )
    return "\n".join(lines)


def moe_layer(rows: list[dict]) -> str:
    """Gate, routed and shared experts in one timing."""
    lines = [
        "| gate, routed and shared experts, tokens | us (launches) | sum of floors, us | "
        "time / floors | evidence |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] == "moe.layer":
            lines.append(
                f"| {row['case']} | {_times(row)} | {row['floor_us']} | "
                f"{row['times_floor']} | {_evidence(row)} |"
            )
    return "\n".join(lines)


def moe_gate(rows: list[dict]) -> str:
    """The gate (its weights from memory, as in a model) and the dense MLP beside chains of torch
    operations."""
    lines = [
        "| op | case | moe_aiter, us | torch operations, us | ratio | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=_by_tokens):
        if row["op"] == "moe.dense_mlp" or (row["op"] == "moe.gate" and "copies" in row):
            lines.append(
                f"| {row['op'][4:]} | {row['case']} | {row['p50_us']} | {row['torch_p50_us']} | "
                f"{row['speedup']} | {_evidence(row)} |"
            )
    return "\n".join(lines)


def moe_launches(rows: list[dict]) -> str:
    """Single launches of the largest batch, timed one by one."""
    names = ("sort_us", "gate_up_us", "down_us", "combine_us", "sum_us")
    lines = [
        "| launches of | sort, us | gate/up, us | down, us | combine, us | sum, us | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] == "moe.launches" and "sum_us" in row:
            times = " | ".join(str(row.get(name, "-")) for name in names)
            lines.append(f"| {row['case']} | {times} | {_evidence(row)} |")
    return "\n".join(lines)


def _by_tokens(row: dict) -> tuple:
    """The gate first, models apart, tokens ascending (in cases that are "model T=tokens")."""
    model, _, tokens = row["case"].partition(" T=")
    return row["op"] != "moe.gate", model, int(tokens) if tokens.isdigit() else 0


def _times(row: dict) -> str:
    """Median and launches, and the median after a second of these calls where that was taken."""
    held = f"; {row['sustained_p50_us']} under load" if "sustained_p50_us" in row else ""
    return f"{row['p50_us']} ({row['launches']}{held})"


def _evidence(row: dict) -> str:
    """A row of a tuning sweep says so: its configuration was timed, not the op as users call it."""
    kind = "measured in a sweep" if "interim" in row else row["evidence"]
    return evidence({**row, "evidence": kind})
