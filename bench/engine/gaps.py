"""When a GPU had nothing to do in a profiled window of steps, and what the host did meanwhile."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import profile


@dataclass(frozen=True)
class Activity:
    """A kernel or copy, us; those of one graph replay share their launch."""

    name: str
    start: float
    end: float
    launch: int


@dataclass(frozen=True)
class Doing:
    """What the host did, us of the same clock as activities."""

    name: str
    start: float
    end: float


@dataclass
class Spans:
    """Microseconds between the first start and the last end: with device activity, idle between
    two activities of one graph (the device's own doing), idle before another launch (the host's
    doing, or the device's time to begin a launch that is there); and the latter by what came
    next, and the longest of it (start, end, what came next)."""

    busy: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    before: Counter[str] = field(default_factory=Counter)
    longest: tuple[float, float, str] = (0.0, 0.0, "")

    @property
    def total(self) -> float:
        return self.busy + self.inside + self.between

    @property
    def host_share(self) -> float:
        return self.between / self.total


def spans_of(activities: Iterable[Activity]) -> Spans:
    """Where the time went. Args: activities: in any order, possibly overlapping."""
    found = Spans()
    last: Activity | None = None  # the one that ends last so far
    for activity in sorted(activities, key=lambda a: a.start):
        reached = activity.start if last is None else last.end
        idle = max(activity.start - reached, 0.0)
        if last is not None and activity.launch == last.launch:
            found.inside += idle
        else:
            found.between += idle
            found.before[activity.name] += idle
            if idle > found.longest[1] - found.longest[0]:
                found.longest = (reached, activity.start, activity.name)
        found.busy += max(activity.end - max(activity.start, reached), 0.0)
        if last is None or activity.end > last.end:
            last = activity
    return found


def meanwhile(doings: Iterable[Doing], start: float, end: float) -> dict[str, float]:
    """Microseconds of each thing that the host did within a span, most first; they may overlap."""
    found: Counter[str] = Counter()
    for doing in doings:
        overlap = min(doing.end, end) - max(doing.start, start)
        if overlap > 0:
            found[doing.name] += overlap
    return {name: round(us, 1) for name, us in found.most_common(8)}


@dataclass
class Window:
    """One profile of steps, and what the host did besides driver calls, ns of the wall clock."""

    profile: profile
    doings: list[tuple[str, int, int]] = field(default_factory=list)

    def activities(self) -> list[Activity]:
        """Kernels and copies in order, without the first and last tenth: the first and last steps
        start and drain the pipeline."""
        found = device_activities(self.profile)
        return found[len(found) // 10 : -len(found) // 10]

    def host(self) -> list[Doing]:
        """Driver calls, garbage collections and steps."""
        calls = [
            Doing(event.name, event.time_range.start, event.time_range.end)
            for event in self.profile.events()
            if event.device_type == torch.autograd.DeviceType.CPU
        ]
        origin = self.profile.profiler.kineto_results.trace_start_ns()
        return calls + [
            Doing(name, (start - origin) / 1e3, (end - origin) / 1e3)
            for name, start, end in self.doings
        ]


def device_activities(prof: profile) -> list[Activity]:
    """Kernels and copies of a finished profile, by start."""
    found = [
        Activity(event.name, event.time_range.start, event.time_range.end, event.id)
        for event in prof.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda a: a.start)


@contextmanager
def collections_noted(doings: list[tuple[str, int, int]]) -> Iterator[None]:
    """Append every garbage collection to a list."""
    began = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.time_ns()
        else:
            name = f"garbage collection {info['generation']}"
            doings.append((name, began, time.time_ns()))

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)
