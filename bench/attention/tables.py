"""The attention tables of docs/attention.md, from the rows in bench/results."""

from __future__ import annotations

FILE = "attention_h200_2026-11-30.jsonl"
COUNTERS_FILE = "attention_counters_emulated_2026-11-30.jsonl"
KEY = ("op", "case", "impl")

# us; recorded figures of the same kind of GPU, not measured in the same process. FA4 with its
# sheared bias includes the projection.
RECORDED: dict[str, dict[str, float]] = {
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
MEASURED_IMPLS = ("triton_attn", "triton_attn without bias", "sglang 0.5.23", "FlexAttention")


def by_case(rows: list[dict], op: str) -> dict[str, dict[str, float]]:
    """case -> implementation -> median us, and the floor."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["op"] == op and "p50_us" in row:
            case = cases.setdefault(row["case"], {"floor": row["floor_us"]})
            case[row["impl"]] = row["p50_us"]
    return cases


def times(rows: list[dict], op: str) -> str:
    """Medians of one operation; only columns that have a figure."""
    cases = {case: {**known, **RECORDED.get(case, {})} for case, known in by_case(rows, op).items()}
    names = [*MEASURED_IMPLS, "FA4 sheared", "vLLM", "floor"]
    names = [name for name in names if any(name in known for known in cases.values())]
    lines = ["| case | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for case, known in cases.items():
        cells = [f"{known[name]:g}" if name in known else "-" for name in names]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def counters(rows: list[dict]) -> str:
    """Emulated instructions of the same tiles with a gather and with the strided bias."""
    lines = [
        "| arch | variant | VALU | 2-byte loads | 16-byte loads | VGPRs |",
        "|---|---|---|---|---|---|",
    ]
    note = {"gather": "projection not counted", "strided": "writer included"}
    for row in rows:
        lines.append(
            f"| {row['arch']} | {row['impl']} ({note[row['impl']]}) | {row['valu']} | "
            f"{row['narrow_loads']} | {row['wide_loads']} | {row['vgprs']} |"
        )
    return "\n".join(lines)
