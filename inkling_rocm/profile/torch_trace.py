"""torch.profiler's events to rows: kernels launched inside an op's range are that op's.

torch itself counts a kernel to an operation only where torch launched it; Triton launches through
the driver. So a kernel is traced to the driver's or runtime's launch call, which bears its number,
and that call to the range it lies in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from inkling_rocm.profile.table import OpRow, merged, op_of_kernel
from inkling_rocm.profile.window import PREFIX

# Beginnings of the names of runtime and driver calls.
_CALLS = ("cuda", "cu", "hip")


def _within(event: Any) -> Iterator[Any]:
    yield event
    for child in event.cpu_children:
        yield from _within(child)


def _on_host(event: Any) -> bool:
    return event.device_type.name == "CPU"


def op_rows(events: Iterable[Any], *, on_device: bool) -> list[OpRow]:
    """Launches and time of every op.

    Args:
        events: of a finished torch.profiler.profile.
        on_device: count kernels and their time; else torch operations without further torch
            operations below them, and the time of the calls.
    """
    events = list(events)
    ranges = sorted(
        (e for e in events if _on_host(e) and e.name.startswith(PREFIX)),
        key=lambda e: e.time_range.start,
    )
    rows = [OpRow(op=event.name.removeprefix(PREFIX)) for event in ranges]
    if not on_device:
        for row, event in zip(rows, ranges, strict=True):
            row.launches = sum(not e.cpu_children for e in _within(event) if e is not event)
            row.us = event.cpu_time_total
        return merged(rows)
    starts = [event.time_range.start for event in ranges]
    called = {e.id: e.time_range.start for e in events if _on_host(e) and e.name.startswith(_CALLS)}
    for event in events:
        if _on_host(event) or event.is_user_annotation:
            continue
        # Without its call (a profiler that does not record it) a kernel's own time has to do.
        at = called.get(event.id, event.time_range.start)
        index = bisect_right(starts, at) - 1
        inside = index >= 0 and at <= ranges[index].time_range.end
        op = rows[index].op if inside else op_of_kernel(event.name)
        rows.append(OpRow(op=op, launches=1, us=event.time_range.elapsed_us()))
    return merged(rows)
