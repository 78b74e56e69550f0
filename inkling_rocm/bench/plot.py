"""The plots of a serving sweep; needs matplotlib (the `bench` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_serving(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Throughput a GPU against interactivity, and inter-token latency against concurrency.

    Raises: ValueError: matplotlib is not installed, or no row has a decode speed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "the plot needs matplotlib: pip install 'inkling-rocm[bench]', or leave out --plot"
        ) from error
    rows = [row for row in rows if row["interactivity_tokens_per_s_user"]]
    if not rows:
        raise ValueError("nothing to plot: no answer had two tokens")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    speed = [row["interactivity_tokens_per_s_user"] for row in rows]
    throughput = [row["total_throughput_per_gpu"] for row in rows]
    left.plot(speed, throughput, "o-")
    left.margins(0.08)  # labels stay inside
    for x, y, row in zip(speed, throughput, rows, strict=True):
        left.annotate(
            str(row["max_concurrency"]), (x, y), textcoords="offset points", xytext=(5, 5)
        )
    left.set_xlabel("interactivity, output tokens/s a user")
    left.set_ylabel("throughput, input + output tokens/s a GPU")
    left.set_title("Throughput against interactivity (labels: concurrency)")
    concurrency = [row["max_concurrency"] for row in rows]
    right.plot(concurrency, [row["median_itl_ms"] for row in rows], "o-", label="inter-token p50")
    right.plot(concurrency, [row["p99_itl_ms"] for row in rows], "o--", label="inter-token p99")
    right.plot(concurrency, [row["median_ttft_ms"] for row in rows], "s-", label="first token p50")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xlabel("concurrency")
    right.set_ylabel("ms")
    right.set_title(f"{rows[0]['model']}, {rows[0]['backend']}")
    right.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
