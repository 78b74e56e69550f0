"""torch.profiler's events to rows: kernels inside an op's range are that op's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from inkling_rocm.profile.table import OpRow, merged, op_of_kernel
from inkling_rocm.profile.window import PREFIX


def _within(event: Any) -> Iterator[Any]:
    yield event
    for child in event.cpu_children:
        yield from _within(child)


def _is_range(event: Any) -> bool:
    return event.name.startswith(PREFIX) and event.device_type.name == "CPU"


def op_rows(events: Iterable[Any], *, on_device: bool) -> list[OpRow]:
    """Launches and time of every op.

    Args:
        events: of a finished torch.profiler.profile.
        on_device: count kernels and their time; else torch operations without further torch
            operations below them, and the time of the calls.
    """
    events = list(events)
    rows: list[OpRow] = []
    inside: Counter[str] = Counter()
    inside_us: Counter[str] = Counter()
    for event in events:
        if not _is_range(event):
            continue
        row = OpRow(op=event.name.removeprefix(PREFIX))
        if on_device:
            for kernel in (k for e in _within(event) for k in e.kernels):
                row.launches += 1
                row.us += kernel.duration
                inside[kernel.name] += 1
                inside_us[kernel.name] += kernel.duration
        else:
            row.launches = sum(not e.cpu_children for e in _within(event) if e is not event)
            row.us = event.cpu_time_total
        rows.append(row)
    if on_device:
        for event in events:
            if event.device_type.name == "CPU" or event.is_user_annotation:
                continue
            if inside[event.name] > 0:  # one of those counted above
                inside[event.name] -= 1
                continue
            us = event.time_range.elapsed_us()
            rows.append(OpRow(op=op_of_kernel(event.name), launches=1, us=us))
    return merged(rows)
