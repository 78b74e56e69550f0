"""Tables of docs/prefix_cache.md and docs/prefix_cache_tiers.md from the rows that
`bench.prefix_cache.ttft` and `bench.prefix_cache.tiers` append."""

from __future__ import annotations

FILE = "prefix_tiers_2026-11-30.jsonl"
KEY = ("op", "case", "device")
TTFT_FILE = "prefix_ttft_2026-11-30.jsonl"
TTFT_KEY = ("op", "case", "device", "model", "prompt_tokens")


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


def ttft(rows: list[dict]) -> str:
    """Time to the first token by how much of the prompt was cached, and where."""
    lines = [
        "| prompt tokens | cached | in | p50, ms | p20 to p80 | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        where = row["source"] if row["cached_tokens"] else "-"
        if row["gate"] != "pass":
            lines.append(f"| {row['prompt_tokens']} | {row['gate']} | {where} | | | |")
            continue
        lines.append(
            f"| {row['prompt_tokens']} | {row['cached_tokens']} | {where} | {row['p50_ms']:.0f} | "
            f"{row['p20_ms']:.0f} to {row['p80_ms']:.0f} | {row['evidence']}, {row['device']}, "
            f"{row['model']}, commit {row['commit']} |"
        )
    return "\n".join(lines)
