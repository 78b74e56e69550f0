"""Launching kernels: decoding, grid, barriers, lazy waits and the LDS race detector."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from gcn_emulator.counters import Counters, StaticInfo, static_info
from gcn_emulator.formats import F32, F64, MASK64, U8, EmuError
from gcn_emulator.global_instructions import (
    decode_buffer,
    decode_global,
    decode_scalar_load,
    decode_scratch,
)
from gcn_emulator.lds import LocalMemory
from gcn_emulator.lds_instructions import decode_lds
from gcn_emulator.memory import GlobalMemory
from gcn_emulator.mfma import decode_mfma
from gcn_emulator.operands import VCC
from gcn_emulator.parser import Instruction, Program, parse_program
from gcn_emulator.scalar_alu import decode_scalar
from gcn_emulator.vector_alu import decode_vector
from gcn_emulator.wave import BARRIER, END, Action, MemoryOp, Wave

_NO_EFFECT = {
    "s_nop", "s_setprio", "s_sleep", "s_sethalt", "s_icache_inv", "s_dcache_wb", "s_dcache_inv",
    "buffer_wbl2", "buffer_inv", "s_code_end", "s_ttracedata", "s_sched_barrier",
}  # fmt: skip
_MODIFIERS = frozenset(
    """offset offset0 offset1 offen idxen sc0 sc1 nt lds clamp mul div bitop3 cbsz abid blgp
    op_sel op_sel_hi neg_lo neg_hi dst_sel dst_unused src0_sel src1_sel quad_perm row_shl row_shr
    row_ror row_mirror row_half_mirror row_bcast row_newbcast wave_shl wave_shr wave_rol wave_ror
    row_mask bank_mask bound_ctrl""".split()  # noqa: SIM905
)
_WAIT = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")


def _decode_wait(inst: Instruction) -> Action:
    counts = {name: int(value) for name, value in _WAIT.findall(inst.rest)}
    if not counts:
        value = int(inst.rest, 0)
        counts = {"vmcnt": (value & 15) | ((value >> 14) & 3) << 4, "lgkmcnt": (value >> 8) & 15}
    limits = [(k.removesuffix("cnt"), v) for k, v in counts.items() if k != "expcnt"]

    def wait(w: Wave) -> None:
        for counter, allowed in limits:
            w.wait(counter, allowed)

    return wait


def _decode_branch(inst: Instruction, labels: dict[str, int]) -> Action:
    if inst.operands[0] not in labels:
        raise EmuError(f"unknown label in {inst}")
    target = labels[inst.operands[0]]
    table: dict[str, Action] = {
        "s_branch": lambda w: target,
        "s_cbranch_scc0": lambda w: None if w.scc else target,
        "s_cbranch_scc1": lambda w: target if w.scc else None,
        "s_cbranch_vccz": lambda w: None if w.read_sgpr64(VCC) else target,
        "s_cbranch_vccnz": lambda w: target if w.read_sgpr64(VCC) else None,
        "s_cbranch_execz": lambda w: None if w.exec else target,
        "s_cbranch_execnz": lambda w: target if w.exec else None,
    }
    if inst.mnemonic not in table:
        raise EmuError(f"unsupported instruction {inst}")
    return table[inst.mnemonic]


def _decode_setreg(inst: Instruction) -> Action:
    """Only MODE.FP16_OVFL (bit 23) is modelled; the exception bits 12-22 change no result."""
    match = re.match(r"hwreg\(HW_REG_MODE,(\d+),(\d+)\)", inst.operands[0])
    first, size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or not inst.mnemonic.endswith("imm32_b32"):
        raise EmuError(f"unsupported instruction {inst}")
    if first >= 12 and first + size <= 23:
        return lambda w: None
    if (first, size) != (23, 1):
        raise EmuError(f"unsupported instruction {inst}")
    value = bool(int(inst.operands[1], 0) & 1)

    def set_overflow_mode(w: Wave) -> None:
        w.overflow_clamps = value

    return set_overflow_mode


def decode(inst: Instruction, labels: dict[str, int], arch: str) -> Action:
    """Turn one instruction into a closure over the wave."""
    name = inst.mnemonic
    if name in _NO_EFFECT:
        return lambda w: None
    if name == "s_waitcnt":
        return _decode_wait(inst)
    unknown = set(inst.modifiers) - _MODIFIERS
    if unknown:
        raise EmuError(f"unsupported modifiers {sorted(unknown)} in {inst}")
    if name == "s_endpgm":
        return lambda w: END
    if name == "s_barrier":
        return lambda w: BARRIER
    if name.startswith(("s_branch", "s_cbranch")):
        return _decode_branch(inst, labels)
    if name.startswith("s_setreg"):
        return _decode_setreg(inst)
    if name.startswith(("s_load_dword", "s_buffer_load_dword")):
        return decode_scalar_load(inst)
    if name.startswith("s_"):
        return decode_scalar(inst)
    if name.startswith("v_mfma"):
        return decode_mfma(inst, arch)
    if name.startswith("v_"):
        return decode_vector(inst, arch)
    if name.startswith("ds_"):
        return decode_lds(inst)
    if name.startswith("buffer_"):
        return decode_buffer(inst)
    if name.startswith(("global_", "flat_")):
        return decode_global(inst)
    if name.startswith("scratch_"):
        return decode_scratch(inst)
    raise EmuError(f"unsupported instruction {inst}")


class Launch:
    """Everything the waves of one launch share."""

    def __init__(
        self,
        kernel: Kernel,
        memory: GlobalMemory,
        kernarg_address: int,
        shared: int,
        lazy: bool,
        races: bool,
        counters: Counters | None,
    ) -> None:
        self.program, self.kernel = kernel.program, kernel
        self.memory, self.kernarg_address = memory, kernarg_address
        self.lazy, self.counters = lazy, counters
        size = shared + kernel.program.metadata.get("group_segment_fixed_size", 0)
        self.lds = LocalMemory(size, races, counters.traffic if counters else None)
        self.hits = [0] * len(kernel.program.instructions)


class Kernel:
    """A compiled kernel; decoded instructions are cached across launches."""

    def __init__(self, asm: str, arch: str) -> None:
        if arch not in ("gfx942", "gfx950"):
            raise EmuError(f"unsupported architecture {arch}")
        self.arch = arch
        self.program: Program = parse_program(asm)
        self.actions: list[Action | None] = [None] * len(self.program.instructions)
        self.races: Counter[str] = Counter()

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

        `args` are numpy arrays (passed by address and accessible), ints or floats; `regions` are
        further accessible arrays. Found LDS races are left in `self.races`.
        """
        size = tuple(grid) + (1,) * (3 - len(grid))
        kernarg, arrays = self._kernel_arguments(size, args, shared, num_warps)
        memory = GlobalMemory([*arrays, kernarg, *regions])
        launch = Launch(self, memory, kernarg.ctypes.data, shared, lazy, races, counters)
        waves = [Wave(launch, i) for i in range(num_warps)]
        self.races = launch.lds.races.found if launch.lds.races else Counter()
        with np.errstate(all="ignore"):
            for z, y, x in itertools.product(*(range(n) for n in reversed(size))):
                self._workgroup(launch, waves, (x, y, z))
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

    def _workgroup(
        self, launch: Launch, waves: list[Wave], workgroup: tuple[int, int, int]
    ) -> None:
        launch.lds.reset()
        for wave in waves:
            wave.reset(workgroup)
        live = waves
        while live:
            for wave in live:
                self._run_to_barrier(wave, launch.hits)
            if launch.lds.races:
                launch.lds.races.epoch += 1
            live = [w for w in live if not w.done]

    def _decode_at(self, pc: int) -> Action:
        inst = self.program.instructions[pc]
        action = decode(inst, self.program.labels, self.arch)
        if isinstance(action, MemoryOp):
            action.label = f"line {inst.line}: {inst}"
        self.actions[pc] = action
        return action

    def _run_to_barrier(self, wave: Wave, hits: list[int]) -> None:
        """Run one wave until it reaches a barrier or ends."""
        actions, pc = self.actions, wave.pc
        try:
            while True:
                action = actions[pc] or self._decode_at(pc)
                hits[pc] += 1
                following = action(wave)
                if following is None:
                    pc += 1
                elif following >= 0:
                    pc = following
                elif following == BARRIER:
                    wave.pc = pc + 1
                    return
                else:
                    wave.wait("vm", 0)
                    wave.wait("lgkm", 0)
                    wave.done = True
                    return
        except EmuError as error:
            raise EmuError(self._located(pc, str(error))) from error
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"{type(error).__name__}: {error}"
            raise EmuError(self._located(pc, message)) from error

    def _located(self, pc: int, message: str) -> str:
        if pc >= len(self.program.instructions):
            return f"{self.program.name}: ran past the last instruction: {message}"
        inst = self.program.instructions[pc]
        return f"{self.program.name}: line {inst.line}: {inst}: {message}"
