"""Tables of docs/prefix_cache_tiers.md from the rows that `bench.prefix_cache.tiers` appends."""

from __future__ import annotations

FILE = "prefix_tiers_2026-11-30.jsonl"
KEY = ("op", "case", "device")


def tiers(rows: list[dict]) -> str:
    """Time and rate of one entry, and of what bounds it."""
    lines = [
        "| what | entry, MB | p50, ms | p99, ms | GB/s | of what bounds it | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["gate"] != "pass":
            lines.append(f"| {row['op']}, {row['case']} | {row['gate']} | | | | | |")
            continue
        fraction = "-" if row["fraction_of_bound"] is None else f"{row['fraction_of_bound']:.2f}"
        lines.append(
            f"| {row['op']}, {row['case']} | {row['entry_bytes'] / 1e6:.2f} | "
            f"{row['p50_us'] / 1e3:.2f} | {row['p99_us'] / 1e3:.2f} | {row['gb_per_s']:.2f} | "
            f"{fraction} | {row['evidence']}, {row['device']}, {row['file_system']}, "
            f"commit {row['commit']} |"
        )
    return "\n".join(lines)
