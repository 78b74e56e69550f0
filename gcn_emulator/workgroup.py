"""Scheduling the waves of one workgroup: batches, divergence, barriers.

All waves start as one batch. A branch the waves disagree about splits it; batches that stand at
the same instruction with the same outstanding memory operations are merged again. While there are
several, the one furthest behind runs first, so that those ahead wait for it at the next meeting
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gcn_emulator.formats import WAVE_SIZE, EmuError
from gcn_emulator.pending import Pending, same_operations, split_queue
from gcn_emulator.scalars import LaneMask, per_wave, take_waves, uniform
from gcn_emulator.undefined import join_undefined
from gcn_emulator.wave import BARRIER, Split, Wave

if TYPE_CHECKING:
    from gcn_emulator.kernel import Launch

PAUSED = -3


def run_workgroup(launch: Launch, waves: Wave) -> None:
    """Execute one workgroup whose registers have been set up.

    Raises: EmuError: from an instruction, or some waves wait at a barrier that others never reach.
    """
    kernel, lds = launch.kernel, launch.lds
    lds.reset()
    launch.order.new_workgroup()
    running, waiting, ended = [waves], [], []
    while running:
        running = _merge(running)
        batch = min(running, key=lambda b: b.pc)
        running.remove(batch)
        try:
            outcome = kernel.execute(batch, pausing=bool(running))
        except Split as split:
            running += _divide(batch, split)
            continue
        if outcome == PAUSED:
            running.append(batch)
        elif outcome == BARRIER:
            waiting.append(batch)
        else:
            ended.append(batch)
        if not running and waiting:
            if ended:
                raise EmuError(_unmatched_barrier(launch, waiting, ended))
            if lds.races:
                lds.races.epoch += 1
            launch.order.barrier(waiting)
            running, waiting = waiting, []


def _unmatched_barrier(launch: Launch, waiting: list[Wave], ended: list[Wave]) -> str:
    def ids(batches: list[Wave]) -> str:
        return ", ".join(str(i) for i in sorted(i for b in batches for i in b.ids))

    message = f"divergence at a barrier: waves {ids(waiting)} wait, waves {ids(ended)} have ended"
    return launch.kernel.located(waiting[0].pc - 1, message)


def _divide(batch: Wave, split: Split) -> list[Wave]:
    """The two batches of a branch the waves disagree about."""
    taken = [i for i, flag in enumerate(split.taken) if flag]
    rest = [i for i, flag in enumerate(split.taken) if not flag]
    parts = []
    for waves, pc in ((taken, split.target), (rest, batch.pc + 1)):
        part = _take(batch, waves)
        part.pc = pc
        parts.append(part)
    return parts


def _take(batch: Wave, waves: Sequence[int]) -> Wave:
    """Some waves of a batch as a batch of their own."""
    part = Wave(batch.launch, [batch.ids[i] for i in waves])
    lanes = batch.lane.reshape(-1, WAVE_SIZE)[list(waves)].reshape(-1)
    for rows in batch.launch.used_rows:
        part.vgprs[rows] = batch.vgprs[rows, lanes]
    if batch.scratch_size:
        private = batch.scratch.bytes.reshape(batch.width, -1)[lanes]
        part.scratch.bytes[:] = private.reshape(-1)
    part.sgprs = [take_waves(value, waves) for value in batch.sgprs]
    part.set_exec(take_waves(batch.exec, waves))
    part.scc = take_waves(batch.scc, waves)
    part.overflow_clamps, part.undefined = batch.overflow_clamps, batch.undefined
    part.undefined_lanes = dict(batch.undefined_lanes)
    part.queue = split_queue(batch.queue, waves)
    return part


def _merge(batches: list[Wave]) -> list[Wave]:
    """Merge batches that stand at the same place in the same state."""
    if len(batches) == 1:
        return batches
    groups: dict[tuple[int, bool], list[Wave]] = {}
    for batch in batches:
        groups.setdefault((batch.pc, batch.overflow_clamps), []).append(batch)
    merged = []
    for group in groups.values():
        if len(group) > 1 and same_operations([b.queue for b in group]):
            merged.append(_join(group))
        else:
            merged += group
    return merged


def _join(parts: list[Wave]) -> Wave:
    """One batch of all waves of `parts`."""
    first = parts[0]
    ids = sorted(i for part in parts for i in part.ids)
    whole = Wave(first.launch, ids)
    for part in parts:
        lanes = np.isin(whole.lane_wave, part.ids)
        for rows in first.launch.used_rows:
            whole.vgprs[rows, lanes] = part.vgprs[rows]
        if whole.scratch_size:
            private = whole.scratch.bytes.reshape(whole.width, -1)
            private[lanes] = part.scratch.bytes.reshape(part.width, -1)
    # where every wave finds itself: (part, position in the part)
    origin = [next((p, p.ids.index(i)) for p in parts if i in p.ids) for i in ids]
    for part in parts:  # a register pair may hold a lane mask in one part only
        for index, value in enumerate(part.sgprs):
            if isinstance(value, LaneMask):
                part.read_sgpr(index)
    columns = [[per_wave(v, p.n) for v in p.sgprs] for p in parts]
    whole.sgprs = [
        uniform([columns[parts.index(p)][register][at] for p, at in origin])
        for register in range(len(first.sgprs))
    ]
    whole.set_exec(uniform([per_wave(p.exec, p.n)[at] for p, at in origin]))
    whole.scc = uniform([per_wave(p.read_scc(), p.n)[at] for p, at in origin])
    whole.pc, whole.overflow_clamps = first.pc, first.overflow_clamps
    join_undefined(parts, whole)
    whole.queue = _join_queues(parts, whole)
    return whole


def _join_queues(parts: list[Wave], whole: Wave) -> list[Pending] | None:
    if first_is_eager(parts):
        return None
    queue = []
    for items in zip(*(p.queue or [] for p in parts), strict=True):
        captured = tuple(
            _join_captured([item.captured[i] for item in items], parts, whole)
            for i in range(len(items[0].captured))
        )
        active = None
        if any(item.active is not None for item in items):
            active = np.ones(whole.width, bool)
            for item, part in zip(items, parts, strict=True):
                if item.active is not None:
                    active[np.isin(whole.lane_wave, part.ids)] = item.active
        queue.append(Pending(items[0].op, captured, active))
    return queue


def first_is_eager(parts: list[Wave]) -> bool:
    """Whether the launch completes memory operations at once."""
    return parts[0].queue is None


def _join_captured(values: list, parts: list[Wave], whole: Wave):
    """Captured arrays (lanes last) or scalar values of the parts, in the order of the whole."""
    if isinstance(values[0], np.ndarray):
        out = np.empty((*values[0].shape[:-1], whole.width), values[0].dtype)
        for value, part in zip(values, parts, strict=True):
            out[..., np.isin(whole.lane_wave, part.ids)] = value
        return out
    by_wave = {
        i: x
        for value, part in zip(values, parts, strict=True)
        for i, x in zip(part.ids, per_wave(value, part.n), strict=True)
    }
    return uniform([by_wave[i] for i in whole.ids])
