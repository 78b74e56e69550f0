"""Tables of docs/bench.md from the rows of the whole engine."""

from __future__ import annotations

import re

from bench.rows import evidence

FILE = "engine_h200_2026-11-30.jsonl"
LINEAR_FILE = "linear_tuning_h200_2026-11-30.jsonl"
KEY = ("op", "case", "model", "rank_slice", "graphs", "ahead")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def layers(rows: list[dict]) -> str:
    """Time of a layer beside its floor."""
    lines = [
        "| one rank of TP8, mean of layers | us a layer | floor, us | ratio | timed | "
        "launches, dense layer / MoE layer | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] == "layer" and row["rank_slice"]:
            graph = row.get("graph_us_per_layer")
            also = f" ({graph} us as a graph)" if graph else ""
            lines.append(
                f"| {row['case']} ({row['layers']} layers) | {row['us_per_layer']} | "
                f"{row['floor_us_per_layer']} | {row['over_floor']} | {row['timed']}{also} | "
                f"{launches(row, moe=False):.3g} / {launches(row, moe=True):.3g} | "
                f"{evidence(row)} |"
            )
    return "\n".join(lines)


def ops(rows: list[dict]) -> str:
    """Launches and time by op: of a call, and calls a layer."""
    lines = [
        "| case | op | calls a layer | launches a call | us a call | floor, us |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["op"] != "layer" or not row["rank_slice"]:
            continue
        for name, op in sorted(row["ops"].items(), key=lambda item: -item[1]["us"]):
            launches, us, floor_us = (
                op[key] / op["calls"] for key in ("launches", "us", "floor_us")
            )
            lines.append(
                f"| {row['case']} | {name} | {op['calls'] / row['layers']:.2f} | {launches:.1f} | "
                f"{us:.1f} | {floor_us:.1f} |"
            )
    return "\n".join(lines)


def launches(row: dict, *, moe: bool) -> float:
    """Launches of one layer of a kind, from the sums over a stack of both kinds."""
    other = ("dense_mlp",) if moe else ("gate", "experts")
    each = {name: op["launches"] / op["calls"] for name, op in row["ops"].items()}
    twice = {"linear": 2, "residual_conv_norm": 2}
    return sum(twice.get(name, 1) * n for name, n in each.items() if name not in other)


def steps(rows: list[dict]) -> str:
    """A decode step of the engine: its time, and when the device had nothing to do."""
    lines = [
        "| decode batch | graphs | one step ahead | ms a step | tokens/s | host gaps | "
        "the longest, us | gaps inside the graph | device activities | evidence |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    decode = [row for row in rows if row["op"] == "engine_decode"]
    for row in sorted(decode, key=lambda row: (not row["graphs"], not row["ahead"], row["batch"])):
        lines.append(
            f"| {row['batch']} ({row['layers']} layers) | {_yes(row['graphs'])} | "
            f"{_yes(row['ahead'])} | {row['step_ms']} | {row['tokens_per_s']} | "
            f"{100 * row['host_gap_share']:.2f} % | {row.get('longest_gap_us', '-')} | "
            f"{100 * row['graph_gap_share']:.2f} % | {row['device_activities_a_step']} | "
            f"{evidence(row)} |"
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
                f"{row['interactivity_tokens_per_s_user']} | {evidence(row)} |"
            )
    return "\n".join(lines)


def linear(rows: list[dict]) -> str:
    """The fastest configuration of every case beside torch's product, of its newest commit."""
    cases: dict[str, list[dict]] = {}
    for row in rows:
        if row["gate"] == "pass":
            cases.setdefault(row["case"], []).append(row)
    lines = [
        "| tokens, [columns, depth] | torch, us (launches) | ours, us | floor, us | evidence |",
        "|---|---|---|---|---|",
    ]
    for case in sorted(cases, key=_shape_first):
        all_found = cases[case]
        found = [row for row in all_found if row["commit"] == all_found[-1]["commit"]]
        torch, ours = (
            min((row for row in found if row["variant"] == variant), key=lambda row: row["p50_us"])
            for variant in ("torch", "triton")
        )
        launches = f" ({torch['launches']})" if "launches" in torch else ""
        lines.append(
            f"| {case} | {torch['p50_us']}{launches} | {ours['p50_us']} | {found[0]['floor_us']} | "
            f"{evidence(found[0])} |"
        )
    return "\n".join(lines)


def _shape_first(case: str) -> list[int]:
    """The numbers of "T=8 [1664, 6144]", tokens last."""
    tokens, *shape = map(int, re.findall(r"\d+", case))
    return [*shape, tokens]
