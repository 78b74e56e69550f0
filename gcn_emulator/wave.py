"""State of one wavefront (64 lanes) and its outstanding memory operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gcn_emulator.formats import (
    F32,
    I32,
    LANES,
    MASK32,
    MASK64,
    U8,
    U32,
    WAVE_SIZE,
    EmuError,
    bits_to_lanes,
)
from gcn_emulator.operands import EXEC, Operand
from gcn_emulator.storage import ByteStore

if TYPE_CHECKING:
    from gcn_emulator.kernel import Launch

VECTOR_REGISTERS = 512
POISON_VGPR = U32(0x7FBADBAD)
POISON_SGPR = 0xBADBAD00
END, BARRIER = -1, -2

Action = Callable[["Wave"], "int | None"]


@dataclass(slots=True)
class MemoryOp:
    """A memory instruction split at the point where the hardware may delay it.

    `prepare` reads registers when the instruction issues; `complete` touches memory and writes
    the destination. With lazy waits `complete` runs only when an s_waitcnt forces it.
    """

    counter: str
    prepare: Callable[[Wave], Any]
    complete: Callable[[Wave, Any], None]
    dst_kind: str = ""
    dst_index: int = 0
    dst_count: int = 0
    in_order: bool = True
    label: str = ""

    def __call__(self, wave: Wave) -> None:
        captured = self.prepare(wave)
        if wave.queue is None:
            self.complete(wave, captured)
            return
        wave.queue.append((self, captured))
        for i in range(self.dst_index, self.dst_index + self.dst_count):
            if self.dst_kind == "v":
                wave.write(i, POISON_VGPR)
            else:
                wave.write_sgpr(i, POISON_SGPR + i)


class Wave:
    """Registers and control state of one wavefront; reused from workgroup to workgroup."""

    def __init__(self, launch: Launch, wave_id: int) -> None:
        self.launch, self.id = launch, wave_id
        self.vgprs = np.zeros((VECTOR_REGISTERS, WAVE_SIZE), U32)
        self.rows = list(self.vgprs)
        self.rows_f32 = list(self.vgprs.view(F32))
        self.rows_i32 = list(self.vgprs.view(I32))
        private = launch.program.descriptor.get("private_segment_fixed_size", 0)
        self.scratch_size = -(-private // 4) * 4
        self.scratch = ByteStore(np.zeros(WAVE_SIZE * self.scratch_size, U8))
        self.sgprs: list[int] = []
        self.exec, self.active = MASK64, None
        self.scc = self.pc = 0
        self.done = False
        self.overflow_clamps = False  # MODE.FP16_OVFL
        self.queue: list[tuple[MemoryOp, Any]] | None = None
        self.memory, self.lds = launch.memory, launch.lds
        self.traffic = launch.counters.traffic if launch.counters else None

    def reset(self, workgroup: tuple[int, int, int]) -> None:
        """Initial register state as set up by the dispatcher."""
        descriptor = self.launch.program.descriptor
        self.vgprs[:] = 0x7FC0DEAD
        self.scratch.bytes[:] = 0xA5
        self.sgprs = [0xDEAD0000 + i for i in range(128)]
        self.set_exec(MASK64)
        self.scc = self.pc = 0
        self.done = False
        self.overflow_clamps = False
        self.queue = [] if self.launch.lazy else None
        n = 2 * descriptor.get("user_sgpr_dispatch_ptr", 0)
        n += 2 * descriptor.get("user_sgpr_queue_ptr", 0)
        if descriptor.get("user_sgpr_kernarg_segment_ptr"):
            self.sgprs[n] = self.launch.kernarg_address & MASK32
            self.sgprs[n + 1] = self.launch.kernarg_address >> 32
        # Execution starts at the compatibility prologue, which loads preloaded arguments itself.
        n = descriptor.get("user_sgpr_count", 2)
        for axis, value in zip("xyz", workgroup, strict=True):
            if descriptor.get(f"system_sgpr_workgroup_id_{axis}"):
                self.sgprs[n] = value
                n += 1
        self.rows[0][:] = LANES + WAVE_SIZE * self.id

    def set_exec(self, bits: int) -> None:
        """Set EXEC; `active` is None when all lanes are on."""
        self.exec = bits & MASK64
        self.active = None if self.exec == MASK64 else bits_to_lanes(self.exec)

    def read_sgpr(self, index: int) -> int:
        """One 32-bit scalar register."""
        if index >= EXEC:
            return (self.exec >> (32 * (index - EXEC))) & MASK32
        return self.sgprs[index]

    def read_sgpr64(self, index: int) -> int:
        """A pair of scalar registers."""
        if index == EXEC:
            return self.exec
        return self.sgprs[index] | (self.sgprs[index + 1] << 32)

    def write_sgpr(self, index: int, value: int) -> None:
        """Write one 32-bit scalar register."""
        if index >= EXEC:
            shift = 32 * (index - EXEC)
            self.set_exec((self.exec & ~(MASK32 << shift)) | ((value & MASK32) << shift))
        else:
            self.sgprs[index] = value & MASK32

    def write_sgpr64(self, index: int, value: int) -> None:
        """Write a pair of scalar registers."""
        if index == EXEC:
            self.set_exec(value)
        else:
            self.sgprs[index] = value & MASK32
            self.sgprs[index + 1] = (value >> 32) & MASK32

    def scalar(self, op: Operand, width: int = 32) -> int:
        """Value of a scalar source operand as a non-negative integer."""
        if op.kind == "s":
            return self.read_sgpr(op.index) if width == 32 else self.read_sgpr64(op.index)
        if op.kind == "scc":
            return self.scc
        return op.constant_bits(width)

    def write(self, index: int, bits: Any, lanes: np.ndarray | None = None) -> None:
        """Write uint32 lanes of a vector register under EXEC and an optional lane mask."""
        mask = self.active
        if lanes is not None:
            mask = lanes if mask is None else mask & lanes
        if mask is None:
            self.rows[index][:] = bits
        else:
            np.copyto(self.rows[index], bits, where=mask)

    def write64(self, index: int, bits: np.ndarray) -> None:
        """Write uint64 lanes to a register pair under EXEC."""
        self.write(index, (bits & MASK32).astype(U32))
        self.write(index + 1, (bits >> 32).astype(U32))

    def wait(self, counter: str, allowed: int) -> None:
        """s_waitcnt: complete the oldest operations until at most `allowed` are outstanding."""
        queue = self.queue
        if not queue:
            return
        mine = [item for item in queue if item[0].counter == counter]
        if allowed and any(not op.in_order for op, _ in mine):
            return  # scalar loads return out of order: only a wait for zero is a guarantee
        finished = mine[: max(len(mine) - allowed, 0)]
        done = {id(item) for item in finished}
        self.queue = [item for item in queue if id(item) not in done]
        for op, captured in finished:
            try:
                op.complete(self, captured)
            except EmuError as error:
                raise EmuError(f"{error}, issued by {op.label}") from error
