"""Takes rows of `inkling-rocm bench` and bench.engine_gpu into bench/results.

    python -m bench.engine.keep ROWS.jsonl --commit 1a2b3c4 --gate "test_gpu.py: 32 passed"

The command line knows nothing of a checkout: the commit it ran from and the correctness check that
came before are added here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.engine.tables import FILE, KEY
from bench.rows import append, read


def kept(row: dict, *, commit: str, gate: str) -> dict:
    """The row with what every row of bench/results says."""
    case = {
        "serving": f"concurrency {row.get('max_concurrency')}",
        "engine_decode": f"batch {row.get('batch')}",
    }.get(row["op"], row.get("case"))
    unknown = dict.fromkeys(KEY)
    return {**unknown, **row, "case": case, "commit": commit, "gate": row.get("gate", gate)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--commit", required=True, help="that the rows were measured at")
    parser.add_argument("--gate", required=True, help="what was checked before, with its outcome")
    parser.add_argument("--file", default=FILE, help="of bench/results")
    options = parser.parse_args()
    rows = [kept(row, commit=options.commit, gate=options.gate) for row in read(options.rows)]
    print(f"{len(rows)} rows to {append(options.file.removesuffix('.jsonl'), rows)}")


if __name__ == "__main__":
    main()
