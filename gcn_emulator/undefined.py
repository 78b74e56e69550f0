"""Undefined registers: what an instruction may do with them and what becomes undefined by it.

`Wave.undefined` has a bit per register of the whole batch. The compiler spills scalar registers
into lanes of a vector register (v_writelane, v_readlane), defined and undefined ones side by side,
so a register that v_writelane has touched keeps its bit and `Wave.undefined_lanes` says which lanes
of it are meant.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gcn_emulator.formats import MASK64, EmuError
from gcn_emulator.operands import Operand, parse_operand
from gcn_emulator.parser import Instruction
from gcn_emulator.pending import MemoryOp
from gcn_emulator.registers import operand_bits, register_names, tainted_results, vector_bit
from gcn_emulator.scalars import per_wave

if TYPE_CHECKING:
    from gcn_emulator.wave import Action, Wave

_TO_SCALAR = re.compile(r"v_read(first)?lane")
_COPY = re.compile(r"v_(mov_b32(_e32|_e64)?|accvgpr_(read|write|mov)_b32)")


def check_registers(
    w: Wave, inst: Instruction, action: Action, reads: int, touched: int, writes: int
) -> int:
    """The slow path, for an instruction that touches an undefined register.

    A vector instruction passes undefinedness on to its result (compilers read half-built
    registers whose undefined part no result depends on); everything else must not see it.

    Args:
        reads, touched, writes: its registers as bits; a memory operation knows what it will write.

    Returns: the registers that are undefined after it, among those it writes.
    Raises: EmuError: an undefined register would become an address, stored data, a scalar or a
        branch, or the instruction touches a register whose load nothing has waited for.
    """
    is_memory = isinstance(action, MemoryOp)
    if isinstance(action, MemoryOp):
        writes = action.writes
    _check_outstanding(w, reads, touched, is_memory)
    if w.undefined_lanes or inst.mnemonic.startswith("v_writelane"):
        lane_result = _lane_by_lane(w, inst)
        if lane_result is not None:
            return lane_result
        reads &= ~sum(vector_bit(index) for index in w.undefined_lanes)
    unwritten = w.undefined & reads
    if not unwritten:
        return _written_over(w, writes)
    if is_memory or not inst.mnemonic.startswith("v_") or _TO_SCALAR.match(inst.mnemonic):
        raise _undefined(unwritten)
    _written_over(w, writes)
    return tainted_results(inst, unwritten, writes)


def _undefined(registers: int) -> EmuError:
    return EmuError(f"reads {register_names(registers)}, which holds no defined value")


def _check_outstanding(w: Wave, reads: int, touched: int, is_memory: bool) -> None:
    for op in {id(p.op): p.op for p in w.queue or []}.values():
        read = op.writes & reads
        # loads of the same kind return in order, so one may replace another's result
        written = 0 if is_memory else op.writes & touched & ~reads
        if (read | written) & w.undefined:
            what = "reads" if read else "overwrites"
            raise EmuError(
                f"{what} {register_names(read or written)} without waiting for {op.label}"
            )


def _lanes(w: Wave, number: Operand) -> int:
    """The lane an instruction names, in any wave, as a 64-bit mask."""
    if w.undefined & operand_bits(number):
        raise _undefined(w.undefined & operand_bits(number))
    mask = 0
    for lane in per_wave(w.scalar(number), w.n):
        mask |= 1 << (lane & 63)
    return mask


def _undefined_lanes(w: Wave, index: int) -> int:
    """Undefined lanes of a vector register as a 64-bit mask."""
    if not w.undefined & vector_bit(index):
        return 0
    return w.undefined_lanes.get(index, MASK64)


def _lane_by_lane(w: Wave, inst: Instruction) -> int | None:
    """Undefined results of v_writelane, and of v_readlane and copies of a register in lanes.

    None: the instruction is something else.
    """
    name = inst.mnemonic
    if name.startswith("v_writelane"):
        target, value, number = (parse_operand(o) for o in inst.operands)
        lanes, before = _lanes(w, number), _undefined_lanes(w, target.index)
        if w.undefined & operand_bits(value):
            return _set_lanes(w, target.index, before | lanes)
        # different lanes in different waves: none of them is defined in every wave
        return _set_lanes(w, target.index, before & ~lanes if lanes.bit_count() == 1 else before)
    if name.startswith("v_readlane"):
        target, source, number = (parse_operand(o) for o in inst.operands)
        if source.index in w.undefined_lanes:
            known = not _lanes(w, number) & _undefined_lanes(w, source.index)
            return 0 if known else operand_bits(target)
    if _COPY.fullmatch(name) and not inst.modifiers:
        target, source = (parse_operand(o) for o in inst.operands)
        if source.kind == "v" and source.index in w.undefined_lanes:
            return _set_lanes(w, target.index, w.undefined_lanes[source.index])
    return None


def _set_lanes(w: Wave, index: int, lanes: int) -> int:
    """Note the undefined lanes of a register; -> its bit if there are any."""
    if not lanes:
        w.undefined_lanes.pop(index, None)
        return 0
    w.undefined_lanes[index] = lanes
    return vector_bit(index)


def _written_over(w: Wave, writes: int) -> int:
    """Forget the lanes of registers an instruction writes as a whole."""
    for index in [i for i in w.undefined_lanes if writes & vector_bit(i)]:
        del w.undefined_lanes[index]
    return 0


def join_undefined(parts: list[Wave], whole: Wave) -> None:
    """Undefined in the merged batch is what is undefined in any part."""
    for part in parts:
        whole.undefined |= part.undefined
    for index in {i for part in parts for i in part.undefined_lanes}:
        lanes = 0
        for part in parts:
            lanes |= _undefined_lanes(part, index)
        whole.undefined_lanes[index] = lanes
