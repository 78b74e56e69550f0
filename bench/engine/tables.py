"""Tables of docs/bench.md from the rows of the whole engine."""

from __future__ import annotations

FILE = "engine_h200_2026-11-30.jsonl"
KEY = ("op", "case", "model", "rank_slice")


def _evidence(row: dict) -> str:
    return f"{row['evidence']}, {row['device']}, commit {row['commit']}"


def layers(rows: list[dict]) -> str:
    """Time of a layer beside its floor."""
    lines = [
        "| one rank of TP8, mean of layers | us a layer | floor, us | ratio | timed | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] == "layer" and row["rank_slice"]:
            lines.append(
                f"| {row['case']} ({row['layers']} layers) | {row['us_per_layer']} | "
                f"{row['floor_us_per_layer']} | {row['over_floor']} | {row['timed']} | "
                f"{_evidence(row)} |"
            )
    return "\n".join(lines)


def ops(rows: list[dict]) -> str:
    """Launches and time by op: the first decode case, and the prefill."""
    found = [row for row in rows if row["op"] == "layer" and row["rank_slice"]]
    lines = [
        "| case | op | calls a layer | launches a call | us a call | floor, us |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        for name, op in row["ops"].items():
            calls = op["calls"]
            each = [op[field] / calls for field in ("launches", "us", "floor_us")]
            lines.append(
                f"| {row['case']} | {name} | {calls / row['layers']:.2f} | {each[0]:.2f} | "
                f"{each[1]:.1f} | {each[2]:.1f} |"
            )
    return "\n".join(lines)


def steps(rows: list[dict]) -> str:
    """A decode step of the engine: its time, and when the device had nothing to do."""
    lines = [
        "| decode batch | ms a step | tokens/s | host gaps | gaps inside the graph | "
        "device activities | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] == "engine_decode":
            lines.append(
                f"| {row['batch']} ({row['layers']} layers) | {row['step_ms']} | "
                f"{row['tokens_per_s']} | {100 * row['host_gap_share']:.2f} % | "
                f"{100 * row['graph_gap_share']:.2f} % | {row['device_activities_a_step']} | "
                f"{_evidence(row)} |"
            )
    return "\n".join(lines)


def serving(rows: list[dict]) -> str:
    """The sweep over concurrencies."""
    lines = [
        "| concurrency | first token p50 / p99, ms | inter-token p50 / p99, ms | output tokens/s | "
        "tokens/s a user | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] == "serving":
            lines.append(
                f"| {row['max_concurrency']} | {row['median_ttft_ms']} / {row['p99_ttft_ms']} | "
                f"{row['median_itl_ms']} / {row['p99_itl_ms']} | {row['output_throughput']} | "
                f"{row['interactivity_tokens_per_s_user']} | {_evidence(row)} |"
            )
    return "\n".join(lines)
