"""Tables of docs/sampling.md from the rows that `bench.sampling.run` appends."""

from __future__ import annotations

from bench.rows import evidence

FILE = "sampling_h200_2026-11-30.jsonl"
KEY = ("op", "case")


def sampling(rows: list[dict]) -> str:
    """One call of the device sampler beside torch's ways."""
    lines = [
        "| case | us (launches) | read once, us | torch sampler of the engine, us | sort, us | "
        "evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] != "sample":
            continue
        if row["gate"] != "pass":
            lines.append(f"| {row['case']} | {row['gate']} | | | | {evidence(row)} |")
            continue
        sort = row["torch_sort_us"] or "-"
        lines.append(
            f"| {row['case']} | {row['p50_us']} ({row['launches']}) | {row['floor_us']} | "
            f"{row['torch_engine_us']} | {sort} | {evidence(row)} |"
        )
    return "\n".join(lines)


def lm_head(rows: list[dict]) -> str:
    """lm_head beside torch's product over the real rows and over the padded ones."""
    lines = [
        "| rows, tokens | Triton, us | floor, us | Triton / floor | torch, us | "
        "torch, padded rows, us | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] != "lm_head":
            continue
        lines.append(
            f"| {row['case']} | {row['p50_us']} | {row['floor_us']} | {row['times_floor']} | "
            f"{row['torch_us']} | {row['torch_padded_us']} | {evidence(row)} |"
        )
    return "\n".join(lines)
