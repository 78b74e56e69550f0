"""Tokens per second against acceptance from result rows: points as measured, lines from the median
time of a round, which does not depend on acceptance.

python -m bench.speculation.plot rows.jsonl docs/plots/speculation.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from bench.rows import read
from bench.speculation.tables import by_acceptance, without_drafts


def plot(rows: list[dict], file: Path) -> None:
    """One panel a batch size, one line a number of draft steps.

    Raises: ValueError: no row of op "acceptance".
    """
    found, plain = by_acceptance(rows), without_drafts(rows)
    if not found:
        raise ValueError('nothing to plot: there is no row of op "acceptance"')
    figure = Figure(figsize=(5.5 * len(found), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (batch, by_steps) in zip(panels, found.items(), strict=True):
        for steps, some in by_steps.items():
            probability = np.linspace(0, 1, 101)
            tokens = batch * sum(probability**depth for depth in range(steps + 1))
            round_s = median(row["p50_us"] for row in some) / 1e6
            (line,) = axes.plot(probability, tokens / round_s, label=f"{steps}")
            at, measured = ([row[name] for row in some] for name in ("probability", "tokens_per_s"))
            axes.plot(at, measured, "o", color=line.get_color())
        if batch in plain:
            speed = plain[batch]["tokens_per_s"]
            axes.axhline(speed, color="black", ls=":", label="no drafts")
        axes.set_xlabel("probability that a draft is accepted (simulated)")
        axes.set_ylabel("tokens/s")
        axes.set_title(f"batch {batch}, {some[0]['model']}, {some[0]['device']}")
        axes.legend(title="draft steps", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    plot(read(Path(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
