"""The plot of the newest serving sweep in bench/results.

python -m bench.engine.plot docs/plots/serving.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.engine.tables import FILE, KEY
from bench.tables import latest
from inkling_rocm.bench.plot import plot_serving


def plot(file: Path) -> None:
    """Draw what docs/bench.md has as a table."""
    sweep = [row for row in latest(FILE, *KEY) if row["op"] == "serving"]
    plot_serving(sorted(sweep, key=lambda row: row["max_concurrency"]), file)


if __name__ == "__main__":
    plot(Path(sys.argv[1]))
