"""Kernels: kernel arguments, the grid, and the interpreter loop."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from gcn_emulator.cache import load_program
from gcn_emulator.counters import Counters, StaticInfo, static_info
from gcn_emulator.decode import decode
from gcn_emulator.formats import F32, F64, MASK64, U8, EmuError
from gcn_emulator.global_order import GlobalOrder
from gcn_emulator.lds import LocalMemory
from gcn_emulator.memory import GlobalMemory
from gcn_emulator.operands import AGPR_BASE
from gcn_emulator.parser import Instruction
from gcn_emulator.pending import MemoryOp
from gcn_emulator.undefined import check_registers
from gcn_emulator.wave import BARRIER, END, Action, Split, Wave
from gcn_emulator.workgroup import PAUSED, run_workgroup

_VECTOR = re.compile(r"\b([va])\[?(?:\d+:)?(\d+)")
MAX_BRANCHES = 2_000_000  # taken branches of one batch of waves: about five minutes of emulation


class Launch:
    """Everything the waves of one launch share."""

    def __init__(
        self, kernel: Kernel, memory: GlobalMemory, kernarg_address: int, shared: int, lazy: bool,
        races: bool, counters: Counters | None,
    ) -> None:  # fmt: skip
        self.program, self.kernel = kernel.program, kernel
        self.memory, self.kernarg_address = memory, kernarg_address
        self.lazy, self.counters = lazy, counters
        self.order = GlobalOrder(memory)
        size = shared + kernel.program.metadata.get("group_segment_fixed_size", 0)
        self.lds = LocalMemory(size, races, counters.traffic if counters else None)
        self.hits = [0] * len(kernel.program.instructions)
        self.used_rows = kernel.used_rows


class Kernel:
    """A compiled kernel; decoded instructions are cached across launches.

    After a run `races` counts the LDS races found, `hits` how often each instruction was executed.
    """

    def __init__(self, asm: str, arch: str) -> None:
        if arch not in ("gfx942", "gfx950"):
            raise EmuError(f"unsupported architecture {arch}")
        self.arch = arch
        self.program, sets = load_program(asm)
        self.actions: list[Action | None] = [None] * len(sets)
        self.reads = [reads for reads, _ in sets]
        self.touched = [reads | writes for reads, writes in sets]
        self.kept = [~writes for _, writes in sets]
        self.used_rows = _used_rows(self.program.instructions)
        # where a batch that runs ahead of others looks whether they can be merged
        self.meeting_points = [False] * (len(sets) + 1)
        for pc in self.program.labels.values():
            self.meeting_points[pc] = True
        for pc, inst in enumerate(self.program.instructions):
            if inst.mnemonic == "s_waitcnt":
                self.meeting_points[pc + 1] = True
        self.races: Counter[str] = Counter()
        self.hits: list[int] = []

    def static(self, shared: int, num_warps: int) -> StaticInfo:
        """Registers, spills, LDS and occupancy."""
        return static_info(self.program, self.arch, shared, num_warps)

    def run(
        self,
        grid: Sequence[int],
        args: Sequence[Any],
        shared: int = 0,
        num_warps: int = 4,
        *,
        regions: Sequence[np.ndarray] = (),
        lazy: bool = True,
        races: bool = True,
        counters: Counters | None = None,
    ) -> None:
        """Execute every workgroup in order.

        Args:
            grid: workgroups along x, y, z.
            args: numpy arrays (passed by address and accessible), ints or floats.
            shared: dynamic LDS in bytes.
            num_warps: waves of 64 lanes per workgroup.
            regions: further accessible arrays.
            lazy: complete a memory operation only when an s_waitcnt forces it.
            races: find LDS races and reads of unwritten LDS.
            counters: accumulates what was executed.

        Raises: EmuError: see the package's documentation; it names kernel, line and instruction.
        """
        size = tuple(grid) + (1,) * (3 - len(grid))
        kernarg, arrays = self._kernel_arguments(size, args, shared, num_warps)
        memory = GlobalMemory([*arrays, kernarg, *regions])
        launch = Launch(self, memory, kernarg.ctypes.data, shared, lazy, races, counters)
        waves = Wave(launch, range(num_warps))
        self.races = launch.lds.races.found if launch.lds.races else Counter()
        self.hits = launch.hits
        with np.errstate(all="ignore"):
            for z, y, x in itertools.product(*(range(n) for n in reversed(size))):
                waves.reset((x, y, z))
                run_workgroup(launch, waves)
        if counters:
            counters.add_hits(self.program, launch.hits)
            counters.waves += num_warps * size[0] * size[1] * size[2]

    def _kernel_arguments(
        self, grid: tuple[int, ...], args: Sequence[Any], shared: int, num_warps: int
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        total = max([a.offset + a.size for a in self.program.args] + [16])
        kernarg, arrays = np.zeros(-(-total // 64) * 64 + 64, U8), []
        hidden = {
            **{f"hidden_block_count_{a}": n for a, n in zip("xyz", grid, strict=True)},
            "hidden_group_size_x": num_warps * 64,
            "hidden_group_size_y": 1,
            "hidden_group_size_z": 1,
            "hidden_grid_dims": 3,
            "hidden_dynamic_lds_size": shared,
        }
        visible = [a for a in self.program.args if not a.kind.startswith("hidden_")]
        if len(args) > len(visible):
            raise EmuError(f"{len(args)} arguments for {len(visible)} parameters")
        values: list[Any] = list(args) + [0] * (len(visible) - len(args))
        pairs = list(zip(visible, values, strict=True))
        pairs += [(a, hidden[a.kind]) for a in self.program.args if a.kind in hidden]
        for arg, value in pairs:
            if isinstance(value, np.ndarray):
                arrays.append(value)
                data = value.ctypes.data.to_bytes(8, "little")
            elif isinstance(value, float):
                data = np.array(value, F64 if arg.size == 8 else F32).tobytes()
            else:
                data = (int(value) & MASK64).to_bytes(8, "little")
            kernarg[arg.offset : arg.offset + arg.size] = np.frombuffer(data[: arg.size], U8)
        return kernarg, arrays

    def _decode_at(self, pc: int) -> Action:
        inst = self.program.instructions[pc]
        action = decode(inst, self.program.labels, self.arch, pc, len(self.actions) - 1)
        if isinstance(action, MemoryOp):  # its results are undefined until it completes
            action.label, action.writes = f"line {inst.line}: {inst}", ~self.kept[pc]
            self.kept[pc] = -1
        self.actions[pc] = action
        return action

    def execute(self, w: Wave, pausing: bool) -> int:
        """Run a batch until it reaches a barrier or ends; -> BARRIER, END or PAUSED.

        With `pausing` it also stops at the next place where it could meet other batches.

        Raises: Split: its waves disagree about a branch; `w.pc` is the branch.
        """
        actions, hits, meeting = self.actions, w.launch.hits, self.meeting_points
        reads, touched, kept = self.reads, self.touched, self.kept
        pc, n, branches = w.pc, w.n, MAX_BRANCHES
        try:
            while True:
                action = actions[pc] or self._decode_at(pc)
                hits[pc] += n
                if w.undefined & touched[pc]:
                    inst, written = self.program.instructions[pc], touched[pc] & ~kept[pc]
                    tainted = check_registers(w, inst, action, reads[pc], touched[pc], written)
                    following = action(w)
                    w.undefined = (w.undefined & kept[pc]) | tainted
                else:
                    following = action(w)
                if following is None:
                    pc += 1
                elif following >= 0:
                    pc = following
                    branches -= 1
                    if not branches:
                        raise EmuError(f"{MAX_BRANCHES} branches taken: an endless loop?")
                elif following == BARRIER:
                    if w.active is not None:
                        raise EmuError("barrier in divergent control flow: some lanes are off")
                    w.pc = pc + 1
                    return BARRIER
                else:
                    w.wait("vm", 0)
                    w.wait("lgkm", 0)
                    w.pc = pc
                    return END
                if pausing and meeting[pc]:
                    w.pc = pc
                    return PAUSED
        except Split:
            w.pc = pc
            raise
        except EmuError as error:
            raise EmuError(self.located(pc, str(error))) from error
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"{type(error).__name__}: {error}"
            raise EmuError(self.located(pc, message)) from error

    def located(self, pc: int, message: str) -> str:
        """A message with the kernel, line and instruction it is about."""
        if pc >= len(self.program.instructions):
            return f"{self.program.name}: ran past the last instruction: {message}"
        inst = self.program.instructions[pc]
        source = f" ({inst.source})" if inst.source else ""
        return f"{self.program.name}: line {inst.line}{source}: {inst}: {message}"


def _used_rows(instructions: list[Instruction]) -> list[slice]:
    """The vector and accumulation registers a program mentions."""
    highest = {"v": 0, "a": 0}
    for inst in instructions:
        for text in inst.operands:
            for kind, last in _VECTOR.findall(text):
                highest[kind] = max(highest[kind], int(last))
    rows = [slice(0, highest["v"] + 1)]
    if highest["a"] or any("a0" in inst.operands for inst in instructions):
        rows.append(slice(AGPR_BASE, AGPR_BASE + highest["a"] + 1))
    return rows
