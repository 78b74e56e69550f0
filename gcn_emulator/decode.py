"""Decoding: one instruction -> a closure over the batch of waves that executes it."""

from __future__ import annotations

import re

from gcn_emulator.formats import EmuError
from gcn_emulator.global_instructions import (
    decode_buffer,
    decode_global,
    decode_scalar_load,
    decode_scratch,
)
from gcn_emulator.lds_instructions import decode_lds
from gcn_emulator.mfma import decode_mfma
from gcn_emulator.operands import VCC, parse_operand
from gcn_emulator.parser import INSTRUCTION_BYTES, Instruction
from gcn_emulator.scalar_alu import decode_scalar
from gcn_emulator.scalars import LaneMask, Scalar, map_waves
from gcn_emulator.vector_alu import decode_vector
from gcn_emulator.wave import BARRIER, END, Action, Wave

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


def _any_lane(mask: Scalar) -> int | tuple[int, ...]:
    """1 where a wave's mask has a bit set."""
    if isinstance(mask, LaneMask):
        return mask.nonzero()
    return map_waves(lambda x: int(x != 0), mask)


def _decode_branch(inst: Instruction, labels: dict[str, int]) -> Action:
    if inst.operands[0] not in labels:
        raise EmuError(f"unknown label in {inst}")
    target = labels[inst.operands[0]]

    def invert(flag: int | tuple[int, ...]) -> int | tuple[int, ...]:
        return map_waves(lambda x: 1 - x, flag)

    table: dict[str, Action] = {
        "s_branch": lambda w: target,
        "s_cbranch_scc0": lambda w: w.branch(invert(w.read_scc()), target),
        "s_cbranch_scc1": lambda w: w.branch(w.read_scc(), target),
        "s_cbranch_vccz": lambda w: w.branch(invert(_any_lane(w.read_sgpr64(VCC))), target),
        "s_cbranch_vccnz": lambda w: w.branch(_any_lane(w.read_sgpr64(VCC)), target),
        "s_cbranch_execz": lambda w: w.branch(invert(_any_lane(w.exec)), target),
        "s_cbranch_execnz": lambda w: w.branch(_any_lane(w.exec), target),
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


def _decode_jump(inst: Instruction, pc: int, end: int) -> Action:
    """s_getpc_b64 and s_setpc_b64: an instruction's address is four times its number."""
    index = parse_operand(inst.operands[0]).index
    if inst.mnemonic == "s_getpc_b64":
        following = INSTRUCTION_BYTES * (pc + 1)
        return lambda w: w.write_sgpr64(index, following)

    def jump(w: Wave) -> int:
        address = w.read_sgpr64(index)
        if type(address) is not int:
            raise EmuError("waves jump to different addresses")
        target, rest = divmod(address, INSTRUCTION_BYTES)
        if rest or target > end:
            raise EmuError(f"jumps to {address:#x}, which is no instruction")
        return target

    return jump


def decode(inst: Instruction, labels: dict[str, int], arch: str, pc: int, end: int) -> Action:
    """Turn one instruction into a closure over the batch of waves that executes it.

    `pc` is its number and `end` the number of the last instruction.
    """
    label = f"line {inst.line}: {inst}"
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
    if name in ("s_getpc_b64", "s_setpc_b64"):
        return _decode_jump(inst, pc, end)
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
        return decode_lds(inst, label)
    if name.startswith("buffer_"):
        return decode_buffer(inst, label)
    if name.startswith(("global_", "flat_")):
        return decode_global(inst, label)
    if name.startswith("scratch_"):
        return decode_scratch(inst)
    raise EmuError(f"unsupported instruction {inst}")
