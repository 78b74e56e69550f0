"""A window of engine steps, opened and closed from inside the model's own calls.

The engine runs in its own thread and asynchronously; a profiler of that thread must start and stop
there. So a listener on the ops does it: the first op of a forward is where a step begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from inkling_rocm.profile.table import OpRow
from inkling_rocm.profile.traffic import call_bytes

PREFIX = "op:"


class Window:
    """A listener for `parity.watch.watched`.

    Args:
        is_step: whether a forward of so many tokens counts.
        warmup, steps: forwards to pass over, then to profile.
        start, stop: called in the engine's thread at the window's borders; wait: before the time is
            taken at its end.
        mark: a range of this name around an op call inside the window.
    """

    def __init__(
        self,
        *,
        is_step: Callable[[int], bool],
        warmup: int,
        steps: int,
        start: Callable[[], Any],
        wait: Callable[[], Any],
        stop: Callable[[], Any],
        mark: Callable[[str], AbstractContextManager],
    ):
        self.is_step, self.warmup, self.steps = is_step, warmup, steps
        self._start, self._wait, self._stop, self._mark = start, wait, stop, mark
        self._seen = 0
        self.open = self.done = False
        self.calls: dict[str, OpRow] = {}
        self.wall_us = 0.0
        self._began = 0.0

    def __call__(self, site: str, op: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        if op == "embed":
            self._next_forward(args[0])
        with self._mark(PREFIX + op) if self.open else nullcontext():
            result = function(*args, **kwargs)
        if self.open:
            row = self.calls.setdefault(op, OpRow(op=op))
            row.calls += 1
            row.bytes += call_bytes(op, args, kwargs, result)
        return result

    def _next_forward(self, input_ids: Tensor) -> None:
        if self.done:
            return
        counted = self.is_step(input_ids.numel())
        if self.open and (self._seen == self.warmup + self.steps or not counted):
            self.close()
        elif not self.open and counted and self._seen == self.warmup:
            self.open = True
            self._start()
            self._began = time.perf_counter()
        self._seen += counted

    def close(self) -> None:
        """End the window; nothing happens if it is not open."""
        if not self.open:
            return
        self._wait()
        self.wall_us = (time.perf_counter() - self._began) * 1e6
        self._stop()
        self.open, self.done = False, True

    @property
    def measured(self) -> int:
        """Steps inside the window."""
        return max(min(self._seen - self.warmup, self.steps), 0)
