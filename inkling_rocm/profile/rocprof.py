"""rocprofv3 (rocprofiler-sdk): its command line and its CSV traces.

A kernel belongs to the op in whose roctx range its launch lies: kernel_trace and hip_api_trace
share correlation ids, hip_api_trace and marker_api_trace the host's clock and thread ids. Without
these two files, and for launches outside every range, the kernel's name decides. Columns are read
by name: which there are has changed between releases. Times are in nanoseconds.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inkling_rocm.profile.table import OpRow, merged, op_of_kernel
from inkling_rocm.profile.window import PREFIX

NAME = "inkling"
WINDOW = "inkling window"


def command(folder: Path, program: Sequence[str]) -> list[str]:
    """rocprofv3 around a program; the traces go to `folder`."""
    return [
        "rocprofv3", "--kernel-trace", "--hip-runtime-trace", "--marker-trace",
        "--output-format", "csv", "-d", str(folder), "-o", NAME, "--", *program,
    ]  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One dispatch."""

    name: str
    correlation: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Span:
    """A call or a range on a host thread."""

    name: str
    thread: int
    correlation: int
    start_ns: int
    end_ns: int


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path.name}: no column {', '.join(missing)}; it has "
                f"{', '.join(reader.fieldnames or ('none',))}. Is it a rocprofv3 CSV trace?"
            )
        return list(reader)


def read_kernels(path: Path) -> list[Kernel]:
    """Dispatches of a kernel_trace.csv, by start.

    Raises: ValueError: a column is missing.
    """
    rows = _rows(path, ("Kernel_Name", "Correlation_Id", "Start_Timestamp", "End_Timestamp"))
    kernels = [
        Kernel(
            row["Kernel_Name"],
            int(row["Correlation_Id"]),
            int(row["Start_Timestamp"]),
            int(row["End_Timestamp"]),
        )
        for row in rows
        if row.get("Kind", "KERNEL_DISPATCH") == "KERNEL_DISPATCH"
    ]
    return sorted(kernels, key=lambda k: k.start_ns)


def read_spans(path: Path) -> list[Span]:
    """Calls of a hip_api_trace.csv or ranges of a marker_api_trace.csv, by start.

    Raises: ValueError: a column is missing.
    """
    columns = ("Function", "Thread_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp")
    spans = [
        Span(
            row["Function"],
            int(row["Thread_Id"]),
            int(row["Correlation_Id"]),
            int(row["Start_Timestamp"]),
            int(row["End_Timestamp"]),
        )
        for row in _rows(path, columns)
    ]
    return sorted(spans, key=lambda s: s.start_ns)


def op_rows(
    kernels: Sequence[Kernel], calls: Sequence[Span] = (), ranges: Sequence[Span] = ()
) -> list[OpRow]:
    """Launches and time of every op; where there is a window range, of that window alone.

    Args: calls: of the HIP runtime. ranges: roctx ranges; those of ops do not nest in each other.
    """
    windows = [span for span in ranges if span.name == WINDOW]
    by_thread: dict[int, list[Span]] = {}
    for span in ranges:
        if span.name.startswith(PREFIX):
            by_thread.setdefault(span.thread, []).append(span)
    starts = {thread: [s.start_ns for s in spans] for thread, spans in by_thread.items()}
    launched = {call.correlation: call for call in calls}
    rows = []
    for kernel in kernels:
        call = launched.get(kernel.correlation)
        began = kernel.start_ns if call is None else call.start_ns
        if windows and not any(w.start_ns <= began <= w.end_ns for w in windows):
            continue
        op = None
        if call is not None and call.thread in by_thread:
            at = bisect_right(starts[call.thread], call.start_ns) - 1
            span = by_thread[call.thread][at]
            if at >= 0 and call.start_ns <= span.end_ns:
                op = span.name.removeprefix(PREFIX)
        us = (kernel.end_ns - kernel.start_ns) / 1e3
        rows.append(OpRow(op=op or op_of_kernel(kernel.name), launches=1, us=us))
    return merged(rows)


def read_traces(folder: Path) -> list[OpRow]:
    """Rows of what `command` left in `folder`.

    Raises: ValueError: there is no kernel trace, or a trace lacks a column.
    """
    traces = sorted(folder.rglob("*kernel_trace.csv"))
    if not traces:
        raise ValueError(f"{folder}: no kernel_trace.csv; did rocprofv3 run the program?")
    calls, ranges = (
        [span for path in sorted(folder.rglob(pattern)) for span in read_spans(path)]
        for pattern in ("*hip_api_trace.csv", "*marker_api_trace.csv")
    )
    kernels = [kernel for path in traces for kernel in read_kernels(path)]
    return op_rows(kernels, sorted(calls, key=lambda s: s.start_ns), ranges)
