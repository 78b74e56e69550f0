"""Memory operations between issue and the s_waitcnt that forces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gcn_emulator.formats import WAVE_SIZE, EmuError
from gcn_emulator.scalars import take_waves

if TYPE_CHECKING:
    from gcn_emulator.wave import Wave


@dataclass(slots=True)
class MemoryOp:
    """A memory instruction split at the point where the hardware may delay it.

    `prepare` reads registers when the instruction issues and returns arrays whose last axis is the
    lanes (scalar loads: scalar values); `complete` touches memory and writes the destination. With
    lazy waits `complete` runs only when an s_waitcnt forces it.
    """

    counter: str
    prepare: Callable[[Wave], tuple[Any, ...]]
    complete: Callable[[Wave, tuple[Any, ...], np.ndarray | None], None]
    in_order: bool = True
    label: str = ""
    writes: int = 0  # destination registers as bits
    stores: int = 0  # bytes per lane that it changes in global memory, at captured[0]
    atomic: bool = False

    def __call__(self, wave: Wave) -> None:
        captured = self.prepare(wave)
        if wave.queue is None:
            self.complete(wave, captured, wave.active)
            wave.undefined &= ~self.writes
            return
        wave.queue.append(Pending(self, captured, wave.active))
        wave.undefined |= self.writes


@dataclass(slots=True)
class Pending:
    """An issued operation with the register contents it captured and EXEC at that time."""

    op: MemoryOp
    captured: tuple[Any, ...]
    active: np.ndarray | None


def _describe(error: EmuError, op: MemoryOp) -> EmuError:
    return EmuError(f"{error}, issued by {op.label}")


def wait_for(wave: Wave, counter: str, allowed: int) -> None:
    """Complete the oldest operations of a counter until at most `allowed` are outstanding."""
    queue = wave.queue
    assert queue is not None
    mine = [item for item in queue if item.op.counter == counter]
    if allowed and any(not item.op.in_order for item in mine):
        return  # scalar loads return out of order: only a wait for zero is a guarantee
    finished = mine[: max(len(mine) - allowed, 0)]
    if not finished:
        return
    done = {id(item) for item in finished}
    wave.queue = [item for item in queue if id(item) not in done]
    for item in finished:
        try:
            item.op.complete(wave, item.captured, item.active)
        except EmuError as error:
            raise _describe(error, item.op) from error
        wave.undefined &= ~item.op.writes
    for item in wave.queue:  # a register two loads write stays outstanding until the second is back
        wave.undefined |= item.op.writes


def _select(value: Any, waves: Sequence[int]) -> Any:
    if isinstance(value, np.ndarray):
        parts = value.reshape(*value.shape[:-1], -1, WAVE_SIZE)[..., list(waves), :]
        return np.ascontiguousarray(parts).reshape(*value.shape[:-1], -1)
    return take_waves(value, waves)


def split_queue(queue: list[Pending] | None, waves: Sequence[int]) -> list[Pending] | None:
    """The outstanding operations of some waves of a batch."""
    if queue is None:
        return None
    return [
        Pending(p.op, tuple(_select(c, waves) for c in p.captured), _select(p.active, waves))
        for p in queue
    ]


def same_operations(queues: Sequence[list[Pending] | None]) -> bool:
    """Whether batches have issued the same outstanding operations, so that they can be merged."""
    first = queues[0]
    if first is None:
        return True
    wanted = [id(p.op) for p in first]
    return all([id(p.op) for p in q or []] == wanted for q in queues[1:])
