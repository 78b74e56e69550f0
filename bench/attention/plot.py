"""Tables and plots of docs/attention.md from the result rows.

`python -m bench.attention.plot ROWS.jsonl FOLDER`.

FA4 and vLLM are recorded figures of the same kind of GPU, not measured in the same process; they
are hatched.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# us; FA4 with its sheared bias includes the projection. None: not recorded.
RECORDED = {
    "T8192 8/2 local": {"FA4 sheared": 151, "vLLM": 4856},
    "T8192 8/1 global": {"FA4 sheared": 389, "vLLM": 3641},
    "T8192 64/16 local": {"FA4 sheared": 1022},
    "T8192 64/8 global": {"FA4 sheared": 3124},
    "b1 c8192 8/1 global": {"FA4 sheared": 19.4, "vLLM": 54.0},
    "b1 c8192 8/2 local": {"FA4 sheared": 14.8, "vLLM": 7.1},
    "b32 c8192 8/1 global": {"FA4 sheared": 64.1, "vLLM": 70.0},
    "b32 c8192 8/2 local": {"FA4 sheared": 24.7, "vLLM": 9.7},
    "b128 c8192 8/1 global": {"FA4 sheared": 156.6, "vLLM": 172.1},
    "b128 c8192 8/2 local": {"FA4 sheared": 51.5, "vLLM": 32.4},
    "b8 c131072 8/1 global": {"FA4 sheared": 152.8, "vLLM": 175.0},
    "b1 c8192 64/8 global": {"vLLM": 56.5},
    "b32 c8192 64/8 global": {"vLLM": 333.0},
    "b32 c8192 64/16 local": {"vLLM": 58.3},
}
MEASURED_IMPLS = ("triton_attn", "triton_attn without bias", "sglang 0.5.23")


def read(path: str) -> list[dict]:
    """Rows with a time, one per line."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [row for row in rows if "p50_us" in row]


def by_case(rows: list[dict], op: str) -> dict[str, dict[str, float]]:
    """case -> implementation -> median us, and the floor; of a case measured twice the first
    row."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["op"] == op:
            case = cases.setdefault(row["case"], {"floor": row["floor_us"]})
            case.setdefault(row["impl"], row["p50_us"])
    return cases


def table(cases: dict[str, dict[str, float]]) -> str:
    """A markdown table, best first within our columns."""
    names = [*MEASURED_IMPLS, "FA4 sheared", "vLLM", "floor"]
    lines = ["| case | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for case, times in cases.items():
        known = {**times, **RECORDED.get(case, {})}
        cells = [f"{known[name]:g}" if name in known else "-" for name in names]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
    axes.set_xticks(range(len(cases)), [c.replace(" ", "\n", 1) for c in cases], fontsize=7)
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    rows, folder = read(sys.argv[1]), Path(sys.argv[2])
    for op in ("prefill", "decode", "verify"):
        cases = by_case(rows, op)
        print(f"\n### {op}\n\n{table(cases)}")
        if op != "verify":
            plot(cases, f"{op}, relative bias included", folder / f"attention_{op}.png")


if __name__ == "__main__":
    main()
