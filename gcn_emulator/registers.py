"""Which registers an instruction reads and writes, as bit sets."""

from __future__ import annotations

import re

from gcn_emulator.operands import EXEC, M0, VCC, Operand, parse_operand
from gcn_emulator.parser import Instruction

SGPR_COUNT = 128
_SCC = 1 << SGPR_COUNT
_VECTOR_BASE = SGPR_COUNT + 1
_VCC, _EXEC = 3 << VCC, 3 << EXEC
_NO_REGISTERS = (
    "s_waitcnt", "s_nop", "s_barrier", "s_endpgm", "s_branch", "s_setprio", "s_sleep", "s_sethalt",
    "s_icache", "s_dcache", "s_setreg", "s_code_end", "s_ttrace", "s_sched",
    "buffer_wbl2", "buffer_inv",
)  # fmt: skip
_READS_SCC = re.compile(r"s_(cselect|cmov|addc|subb|cbranch_scc)")
_LEAVES_SCC = re.compile(
    r"s_(mov|cmov|cselect|brev|sext|ff[01]|flbit|bitset|mulk?_|mul_hi|bfm|pack|cbranch|load|buffer_load|getpc|setpc)"
)
_TWO_RESULTS = re.compile(r"v_(\w+_co_u32|mad_(u64_u32|i64_i32)|div_scale_f\d+)(_\w+)?")
_SWAPS = re.compile(r"v_(swap_b32|permlane\d+_swap_b32)(_\w+)?")
_ACCUMULATES = re.compile(r"v_(fmac_f\d+|dot\dc_\w+)")
_LOW_FROM_LOW = re.compile(r"v_(mad_(u64_u32|i64_i32)|lshl_add_u64|lshlrev_b64|mov_b64)")
_HALVES = re.compile(r"v_pk_(add|mul|fma)_f32|v_pk_mov_b32")


def scalar_bit(index: int) -> int:
    """Bit of one scalar register."""
    return 1 << index


def vector_bit(index: int) -> int:
    """Bit of one vector register (accumulation registers from index 256)."""
    return 1 << (_VECTOR_BASE + index)


def all_registers() -> int:
    """Every register."""
    return (1 << (_VECTOR_BASE + 512)) - 1


def register_names(bits: int) -> str:
    """'s4, v7, a0' for a bit set."""
    names = []
    for bit in range(bits.bit_length()):
        if bits >> bit & 1:
            if bit < SGPR_COUNT:
                special = {VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0"}
                names.append(special.get(bit, f"s{bit}"))
            elif bit == SGPR_COUNT:
                names.append("scc")
            else:
                index = bit - _VECTOR_BASE
                names.append(f"v{index}" if index < 256 else f"a{index - 256}")
    return ", ".join(names)


def operand_bits(op: Operand) -> int:
    """Registers of an operand."""
    run = (1 << op.count) - 1
    if op.kind == "s":
        return run << op.index
    if op.kind == "v":
        return run << (_VECTOR_BASE + op.index)
    return _SCC if op.kind == "scc" else 0


def _union(ops: list[Operand]) -> int:
    out = 0
    for op in ops:
        out |= operand_bits(op)
    return out


def _scalar_sets(name: str, ops: list[Operand]) -> tuple[int, int]:
    if name.startswith(("s_cmp", "s_bitcmp")):
        return _union(ops), _SCC
    if name.startswith("s_setpc"):
        return _union(ops), 0
    reads, writes = _union(ops[1:]), operand_bits(ops[0])
    if name.startswith(("s_addk", "s_mulk", "s_cmov", "s_bitset")):
        reads |= writes
    if _READS_SCC.match(name):
        reads |= _SCC
    if not _LEAVES_SCC.match(name):
        writes |= _SCC
    if "saveexec" in name:
        reads, writes = reads | _EXEC, writes | _EXEC
    return reads, writes


def _selected_halves(inst: Instruction, ops: list[Operand]) -> int:
    """Packed float32 instructions read only the half of a pair that op_sel picks."""
    n = len(ops)
    low = inst.list_modifier("op_sel", n, 0)
    high = inst.list_modifier("op_sel_hi", n, 1)
    reads = 0
    for i, op in enumerate(ops):
        if op.kind not in "sv" or op.count < 2:
            reads |= operand_bits(op)
            continue
        if inst.mnemonic.startswith("v_pk_mov"):  # the second source gives the high result
            chosen = {low[i]}
        else:
            chosen = {low[i], high[i]}
        base = 1 << (op.index + (_VECTOR_BASE if op.kind == "v" else 0))
        reads |= sum(base << half for half in chosen)
    return reads


def _vector_sets(inst: Instruction, ops: list[Operand]) -> tuple[int, int]:
    name = inst.mnemonic
    if name.startswith("v_nop"):
        return 0, 0
    if _SWAPS.fullmatch(name):
        both = _union(ops)
        return both, both
    results = 2 if _TWO_RESULTS.fullmatch(name) else 1
    reads, writes = _union(ops[results:]), _union(ops[:results])
    if _HALVES.match(name):
        reads = _selected_halves(inst, ops[1:])
    if _ACCUMULATES.match(name):
        reads |= writes
    if name.startswith("v_cmpx"):
        writes |= _EXEC
    if name.startswith("v_div_fmas") or (name.startswith("v_cndmask") and len(ops) == 3):
        reads |= _VCC
    return reads, writes


def _memory_sets(inst: Instruction, ops: list[Operand]) -> tuple[int, int]:
    name = inst.mnemonic
    if "lds" in inst.modifiers or "_load_lds_" in name:
        return _union(ops) | 1 << M0, 0
    if (
        "load" in name
        or "_read" in name
        or "_rtn" in name
        or "permute" in name
        or "swizzle" in name
    ):
        return _union(ops[1:]), operand_bits(ops[0])
    if "atomic" in name and "sc0" in inst.modifiers:
        if not name.startswith("buffer"):
            return _union(ops[1:]), operand_bits(ops[0])
        data = ops[
            0
        ]  # data and result share registers; a compare-and-swap returns only the first half
        count = data.count // 2 if "cmpswap" in name else data.count
        return _union(ops), operand_bits(Operand(data.text, data.kind, data.index, count))
    return _union(ops), 0


def tainted_results(inst: Instruction, unwritten: int, written: int) -> int:
    """Which results of a vector instruction are undefined when `unwritten` sources are.

    In the 64-bit additions, shifts to the left and moves the low half of the result depends only on
    the low halves of the sources.
    """
    if _LOW_FROM_LOW.match(inst.mnemonic):
        ops = [parse_operand(o) for o in inst.operands]
        low_sources = 0
        for op in ops[1:]:
            low_sources |= operand_bits(Operand(op.text, op.kind, op.index))
        if not unwritten & low_sources:
            return written & ~operand_bits(Operand("", "v", ops[0].index))
    return written


def register_sets(inst: Instruction) -> tuple[int, int]:
    """(read, written) registers of an instruction.

    The old contents of a partly written destination (16-bit results, SDWA, DPP, lane writes) do not
    count as read: compilers build registers piece by piece.
    """
    name = inst.mnemonic
    if name.startswith(_NO_REGISTERS):
        return 0, 0
    if name.startswith("s_cbranch"):
        return {"vcc": _VCC, "exe": _EXEC, "scc": _SCC}[name[10:13]], 0
    ops = [parse_operand(o) for o in inst.operands]
    if name.startswith(("s_load", "s_buffer_load")):
        return _union(ops[1:]), operand_bits(ops[0])
    if name.startswith("s_"):
        return _scalar_sets(name, ops)
    if name.startswith("v_"):
        return _vector_sets(inst, ops)
    return _memory_sets(inst, ops)
