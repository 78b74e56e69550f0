"""Time to the first token against the cached part of the prompt, from result rows.

python -m bench.prefix_cache.plot bench/results/prefix_ttft_DATE.jsonl docs/plots/prefix_ttft.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from bench.prefix_cache.tables import TTFT_KEY
from bench.rows import read


def plot(rows: list[dict], file: Path) -> None:
    """One line for each place that the prefix was in.

    Raises: ValueError: there is no row that passed.
    """
    found = {tuple(row[key] for key in TTFT_KEY): row for row in rows if row["gate"] == "pass"}
    if not found:
        raise ValueError("nothing to plot: no row passed its gate")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    sources: dict[str, list[dict]] = {}
    for row in found.values():
        sources.setdefault(row["source"], []).append(row)
    for source, some in sources.items():
        some.sort(key=lambda row: row["cached_fraction"])
        middle = [row["p50_ms"] for row in some]
        spread = [
            [row["p50_ms"] - row["p20_ms"] for row in some],
            [row["p80_ms"] - row["p50_ms"] for row in some],
        ]
        fractions = [row["cached_fraction"] for row in some]
        axes.errorbar(fractions, middle, spread, fmt="o-", capsize=3, label=f"in {source} memory")
    axes.set_xlabel("part of the prompt that is cached")
    axes.set_ylabel("time to first token, ms")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{row['model']}, {row['prompt_tokens']} tokens, {row['device']}", fontsize=10)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    plot(read(Path(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
