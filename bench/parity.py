"""The parity report in rows: one tiny model in one dtype on one target, beside float64 and beside
what a recorded GPU gave.

    python -m bench.parity --targets cpu,gfx942,gfx950 --out bench/results/parity_2026-11-30.jsonl
    python -m bench.parity --targets cuda --out rows.jsonl              # on a GPU

Errors are parts of their budgets, the worst over all ops of all layers and forwards.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from bench.rows import ROOT, evidence, result_row
from inkling_rocm.parity.report import parity
from inkling_rocm.parity.run import EMULATED

FILE = "parity_2026-11-30.jsonl"
RECORDED = ROOT / "tests" / "data" / "parity" / "h200"


def _worst(result: dict, error: str) -> float:
    return round(max(site[error] / site[f"{error}_budget"] for site in result["sites"]), 3)


def report_row(result: dict, *, device: str) -> dict:
    """A result of `inkling_rocm.parity.report.parity` as one row."""
    target, beside = result["target"], result["beside"]
    fault = result["first_fault"]
    return result_row(
        "parity", f"{result['problem']} {result['dtype']} {target}", device=device, arch=target,
        gate="passed" if result["passed"] and beside["passed"] else "failed",
        evidence="emulated" if target in EMULATED else "measured",
        problem=result["problem"], dtype=result["dtype"], target=target,
        ops=len({site["site"] for site in result["sites"]}), outputs=len(result["sites"]),
        own_of_budget=_worst(result, "own"), same_of_budget=_worst(result, "same"),
        first_fault=None if fault is None else fault["site"],
        tokens_equal_cpu=result["tokens_equal"], beside=beside,
    )  # fmt: skip


def table(rows: list[dict]) -> str:
    """Every model, dtype and target."""
    lines = [
        "| model, dtype | target | ops, outputs | own, worst of budget | same, worst of budget | "
        "tokens = CPU's | beside the H200's recording: worst of budget, outputs compared, tokens | "
        "verdict | evidence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        b = row["beside"]
        yes = {True: "yes", False: "no"}
        lines.append(
            f"| {row['problem']}, {row['dtype']} | {row['target']} | {row['ops']}, "
            f"{row['outputs']} | {row['own_of_budget']} | {row['same_of_budget']} | "
            f"{yes[row['tokens_equal_cpu']]} | {b['worst_of_budget']}, {b['compared']}, "
            f"{yes[b['tokens_equal']]} | {row['gate']} | {evidence(row)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="cpu,gfx942,gfx950")
    parser.add_argument("--problems", default="")
    parser.add_argument("--dtypes", default="")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    problems, dtypes = (
        tuple(filter(None, text.split(","))) for text in (options.problems, options.dtypes)
    )
    for target in options.targets.split(","):
        device = torch.cuda.get_device_name() if target == "cuda" else "CPU"
        results, _ = parity([target], problems, dtypes, against=RECORDED)
        with options.out.open("a", encoding="utf-8") as file:
            for result in results:
                file.write(json.dumps(report_row(result, device=device)) + "\n")


if __name__ == "__main__":
    main()
