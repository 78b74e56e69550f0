"""Tables of docs/speculation.md from the rows that `bench.speculation.run` appends."""

from __future__ import annotations

from bench.rows import evidence

FILE = "speculation_h200.jsonl"
KEY = ("op", "case", "model", "device")
NONE_YET = "No rows yet: this was not run on a GPU."
WAYS = ("one graph", "a graph a step", "launched")


def _cell(row: dict | None, name: str) -> str:
    return "-" if row is None or row[name] is None else str(row[name])


def rounds(rows: list[dict]) -> str:
    """A round, in the ways it can be run."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["op"] == "round":
            found.setdefault((row["batch"], row["steps"]), {})[row["how"]] = row
    if not found:
        return NONE_YET
    lines = [
        "| batch, draft steps | one graph, us | a graph a step, us | launched, us | rounds/s | "
        "blocking calls a round | event waits a round | output | evidence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (batch, steps), ways in sorted(found.items()):
        best = next(ways[way] for way in WAYS if way in ways)
        times = " | ".join(_cell(ways.get(way), "p50_us") for way in WAYS)
        lines.append(
            f"| {batch}, {steps} | {times} | {best['rounds_per_s']} | "
            f"{_cell(best, 'blocking_calls_per_round')} | {_cell(best, 'event_waits_per_round')} | "
            f"{best['gate']} | {evidence(best)} |"
        )
    return "\n".join(lines)


def gates(rows: list[dict]) -> str:
    """Outputs with speculation beside those without."""
    found: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["op"] == "gate":
            found.setdefault((row["steps"], row["how"]), {})[row["dtype"]] = row
    if not found:
        return NONE_YET
    dtypes = sorted({dtype for by_dtype in found.values() for dtype in by_dtype}, reverse=True)
    lines = [
        f"| draft steps, how rounds run | {' | '.join(dtypes)} | evidence |",
        "|---|" + "---|" * (len(dtypes) + 1),
    ]
    for (steps, how), by_dtype in sorted(found.items(), key=lambda item: item[0][0]):
        cells = " | ".join(_cell(by_dtype.get(dtype), "gate") for dtype in dtypes)
        lines.append(f"| {steps}, {how} | {cells} | {evidence(next(iter(by_dtype.values())))} |")
    return "\n".join(lines)


def by_acceptance(rows: list[dict]) -> dict[int, dict[int, list[dict]]]:
    """The newest rows of op "acceptance" by batch and steps, in the order of probability."""
    newest = {
        (row["batch"], row["steps"], row["probability"]): row
        for row in rows
        if row["op"] == "acceptance"
    }
    found: dict[int, dict[int, list[dict]]] = {}
    for (batch, steps, _), row in sorted(newest.items()):
        found.setdefault(batch, {}).setdefault(steps, []).append(row)
    return found


def without_drafts(rows: list[dict]) -> dict[int, dict]:
    """By batch, the newest row of a decode step."""
    return {row["batch"]: row for row in rows if row["op"] == "round" and row["steps"] == 0}


def acceptance(rows: list[dict]) -> str:
    """Tokens per second against the probability with which a draft is accepted."""
    found = by_acceptance(rows)
    if not found:
        return NONE_YET
    plain = without_drafts(rows)
    steps = sorted({n for by_steps in found.values() for n in by_steps})
    lines = [
        f"| batch, probability | no drafts | {' | '.join(map(str, steps))} | evidence |",
        "|---|---|" + "---|" * (len(steps) + 1),
    ]
    for batch, by_steps in found.items():
        at: dict[float, dict[int, dict]] = {}
        beside = [plain[batch]] if batch in plain else []
        for n, some in by_steps.items():
            for row in some:
                at.setdefault(row["probability"], {})[n] = row
        for probability, by_n in sorted(at.items()):
            cells = " | ".join(_cell(by_n.get(n), "tokens_per_s") for n in steps)
            lines.append(
                f"| {batch}, {probability} | {_cell(plain.get(batch), 'tokens_per_s')} | {cells} | "
                f"{evidence(*beside, *by_n.values())} |"
            )
    return "\n".join(lines)
