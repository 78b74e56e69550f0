"""Plots of docs/attention.md from the result rows: `python -m bench.attention.plot`.

FA4 and vLLM are recorded figures of the same kind of GPU, not measured in the same process; they
are hatched.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.attention.tables import FILE, KEY, RECORDED, by_case
from bench.tables import latest


def plot(cases: dict[str, dict[str, float]], title: str, path: Path) -> None:
    """Grouped bars on a logarithmic axis; recorded peers are hatched."""
    cases = {case: times for case, times in cases.items() if case in RECORDED}
    names = ["triton_attn", "sglang 0.5.23", "FA4 sheared", "vLLM", "floor"]
    figure, axes = plt.subplots(figsize=(11, 4.5))
    for i, name in enumerate(names):
        values = [{**t, **RECORDED[c]}.get(name, float("nan")) for c, t in cases.items()]
        at = [x + (i - 2) * 0.16 for x in range(len(cases))]
        recorded = name in ("FA4 sheared", "vLLM")
        axes.bar(at, values, 0.15, label=name, hatch="//" if recorded else None)
    axes.set_yscale("log")
    axes.set_ylabel("us (median, H200)")
    axes.set_xticks(range(len(cases)), [c.replace(" ", "\n") for c in cases], fontsize=7)
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/plots"))
    folder = parser.parse_args().folder
    rows = latest(FILE, *KEY)
    for op in ("prefill", "decode"):
        title = f"{op}, relative bias included"
        plot(by_case(rows, op), title, folder / f"attention_{op}.png")


if __name__ == "__main__":
    main()
