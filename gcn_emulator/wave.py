"""State of a batch of wavefronts (64 lanes each) that execute in lock step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gcn_emulator.formats import F32, I32, MASK32, MASK64, U8, U32, WAVE_SIZE
from gcn_emulator.operands import EXEC, Operand
from gcn_emulator.pending import Pending, wait_for
from gcn_emulator.registers import SGPR_COUNT, all_registers, scalar_bit, vector_bit
from gcn_emulator.scalars import LaneMask, Scalar, mask_lanes, per_wave, uniform
from gcn_emulator.storage import ByteStore

if TYPE_CHECKING:
    from gcn_emulator.kernel import Launch

END, BARRIER = -1, -2
POISON_VGPR, POISON_SGPR, POISON_SCRATCH = 0x7FC0DEAD, 0xDEAD0000, 0xA5


class Split(Exception):
    """The waves of a batch want to continue at different places."""

    def __init__(self, taken: Sequence[int], target: int) -> None:
        super().__init__("divergent branch")
        self.taken, self.target = taken, target


Action = Callable[["Wave"], "int | None"]


class Wave:
    """Registers and control state of `n` waves; lane i belongs to wave `ids[i // 64]`."""

    def __init__(self, launch: Launch, ids: Sequence[int]) -> None:
        self.launch, self.ids = launch, tuple(ids)
        self.n = len(self.ids)
        self.width = self.n * WAVE_SIZE
        self.vgprs = np.empty((512, self.width), U32)
        self.rows = list(self.vgprs)
        self.rows_f32 = list(self.vgprs.view(F32))
        self.rows_i32 = list(self.vgprs.view(I32))
        self.lane = np.arange(self.width)  # within the batch
        self.lane_base = self.lane & ~63  # first lane of the lane's wave
        self.lane_wave = np.repeat(np.array(self.ids, I32), WAVE_SIZE)
        private = launch.program.descriptor.get("private_segment_fixed_size", 0)
        self.scratch_size = -(-private // 4) * 4
        self.scratch = ByteStore(np.empty(self.width * self.scratch_size, U8))
        self.sgprs: list[Any] = []
        self.active: np.ndarray | None = None  # EXEC as lanes, None when every lane is on
        self.scc: Any = 0
        self.pc = 0
        self.overflow_clamps = False  # MODE.FP16_OVFL
        self.undefined = 0  # registers that nothing has written, or whose load is outstanding
        self.undefined_lanes: dict[int, int] = {}  # of v_writelane's registers, see undefined.py
        self.queue: list[Pending] | None = None  # None: memory operations complete at once
        self.barriers = 0
        self.memory, self.lds, self.order = launch.memory, launch.lds, launch.order
        self.traffic = launch.counters.traffic if launch.counters else None

    def reset(self, workgroup: tuple[int, int, int]) -> None:
        """Initial register state as set up by the dispatcher."""
        descriptor = self.launch.program.descriptor
        for used in self.launch.used_rows:
            self.vgprs[used] = POISON_VGPR
        self.scratch.bytes[:] = POISON_SCRATCH
        self.sgprs = [POISON_SGPR + i for i in range(SGPR_COUNT)]
        self.active = None
        self.scc = self.pc = self.barriers = 0
        self.overflow_clamps = False
        self.queue = [] if self.launch.lazy else None
        n = 2 * descriptor.get("user_sgpr_dispatch_ptr", 0)
        n += 2 * descriptor.get("user_sgpr_queue_ptr", 0)
        defined = [vector_bit(0), scalar_bit(EXEC), scalar_bit(EXEC + 1)]
        if descriptor.get("user_sgpr_kernarg_segment_ptr"):
            self.sgprs[n] = self.launch.kernarg_address & MASK32
            self.sgprs[n + 1] = self.launch.kernarg_address >> 32
            defined += [scalar_bit(n), scalar_bit(n + 1)]
        # Execution starts at the compatibility prologue, which loads preloaded arguments itself.
        n = descriptor.get("user_sgpr_count", 2)
        for axis, value in zip("xyz", workgroup, strict=True):
            if descriptor.get(f"system_sgpr_workgroup_id_{axis}"):
                self.sgprs[n] = value
                defined.append(scalar_bit(n))
                n += 1
        self.rows[0][:] = self.lane_wave * WAVE_SIZE + (self.lane & 63)
        self.undefined, self.undefined_lanes = all_registers(), {}
        for bit in defined:
            self.undefined &= ~bit

    def set_exec(self, value: Scalar) -> None:
        """Set EXEC; `active` is None when all lanes are on."""
        if type(value) is int and value == MASK64:
            self.active = None
            return
        lanes = mask_lanes(value, self.n)
        self.active = None if lanes.all() else lanes

    @property
    def exec(self) -> Scalar:
        """EXEC as a scalar value."""
        return MASK64 if self.active is None else LaneMask(self.active)

    def _split_mask(self, index: int) -> None:
        """Turn a lane mask held by a register pair into integers."""
        words = self.sgprs[index].words()
        self.sgprs[index] = uniform([w & MASK32 for w in words])
        self.sgprs[index + 1] = uniform([w >> 32 for w in words])

    def read_sgpr(self, index: int) -> int | tuple[int, ...]:
        """One 32-bit scalar register."""
        if index >= EXEC:
            shift = 32 * (index - EXEC)
            return uniform([(x >> shift) & MASK32 for x in per_wave(self.exec, self.n)])
        if type(self.sgprs[index & ~1]) is LaneMask:
            self._split_mask(index & ~1)
        return self.sgprs[index]

    def read_sgpr64(self, index: int) -> Scalar:
        """A pair of scalar registers."""
        if index == EXEC:
            return self.exec
        low = self.sgprs[index]
        if type(low) is LaneMask:
            return low
        high = self.sgprs[index + 1]
        if type(low) is int and type(high) is int:
            return low | (high << 32)
        pairs = zip(per_wave(low, self.n), per_wave(high, self.n), strict=True)
        return uniform([x | (y << 32) for x, y in pairs])

    def write_sgpr(self, index: int, value: int | tuple[int, ...]) -> None:
        """Write one 32-bit scalar register."""
        if index >= EXEC:
            shift = 32 * (index - EXEC)
            parts = zip(per_wave(self.exec, self.n), per_wave(value, self.n), strict=True)
            self.set_exec(uniform([(x & ~(MASK32 << shift)) | (y << shift) for x, y in parts]))
            return
        if type(self.sgprs[index & ~1]) is LaneMask:
            self._split_mask(index & ~1)
        self.sgprs[index] = value

    def write_sgpr64(self, index: int, value: Scalar) -> None:
        """Write a pair of scalar registers."""
        if index == EXEC:
            self.set_exec(value)
        elif isinstance(value, int):
            self.sgprs[index] = value & MASK32
            self.sgprs[index + 1] = value >> 32
        elif isinstance(value, LaneMask):
            self.sgprs[index] = value
        else:
            self.sgprs[index] = uniform([v & MASK32 for v in value])
            self.sgprs[index + 1] = uniform([v >> 32 for v in value])

    def scalar(self, op: Operand, width: int = 32) -> Scalar:
        """Value of a scalar source operand; integers are non-negative."""
        if op.kind == "s":
            return self.read_sgpr(op.index) if width == 32 else self.read_sgpr64(op.index)
        if op.kind == "scc":
            return self.read_scc()
        return op.constant_bits(width)

    def read_scc(self) -> int | tuple[int, ...]:
        """SCC of every wave; it is kept as the mask it came from until someone asks."""
        if type(self.scc) is LaneMask:
            self.scc = self.scc.nonzero()
        return self.scc

    def lanes_of(self, op: Operand) -> np.ndarray:
        """A 64-bit mask operand as bool lanes."""
        return mask_lanes(self.scalar(op, 64), self.n)

    def write_mask(self, index: int, lanes: np.ndarray) -> None:
        """Write a comparison result or carry to a register pair; inactive lanes get 0."""
        self.write_sgpr64(index, LaneMask(lanes if self.active is None else lanes & self.active))

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
        if self.queue:
            wait_for(self, counter, allowed)

    def branch(self, taken: int | tuple[int, ...], target: int) -> int | None:
        """Next instruction of a conditional branch (None: the following one).

        Raises: Split: the waves disagree.
        """
        if isinstance(taken, int):
            return target if taken else None
        raise Split(taken, target)
