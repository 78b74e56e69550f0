"""Scalar ALU: SOP1, SOP2, SOPK, SOPC as tables over Python integers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from gcn_emulator.formats import MASK32, MASK64, EmuError, sign_extend
from gcn_emulator.operands import Operand, parse_operand
from gcn_emulator.parser import Instruction
from gcn_emulator.wave import Action, Wave

# Source codes: u/i 32-bit unsigned/signed, U/I the 64-bit ones, d/D the destination's old value
# (signed/unsigned), k a 16-bit immediate (sign-extended), c the incoming SCC.
# SCC rule: "" unchanged, "nz" set when the result is non-zero, "+" the function returns
# (result, scc).


def _carry_add(a: int, b: int, carry: int = 0) -> tuple[int, bool]:
    return a + b + carry, a + b + carry > MASK32


def _borrow_sub(a: int, b: int, borrow: int = 0) -> tuple[int, bool]:
    return a - b - borrow, a - b - borrow < 0


def _signed(value: int) -> tuple[int, bool]:
    return value, not -(2**31) <= value < 2**31


def _bit_field(a: int, control: int, bits: int, signed: bool) -> int:
    offset, width = control & (bits - 1), (control >> 16) & 0x7F
    field = (a >> offset) & ((1 << width) - 1)
    return sign_extend(field, width) if signed and 0 < width <= bits else field


def _reverse(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def _first_one(a: int) -> int:
    return (a & -a).bit_length() - 1


def _leading_zeros(a: int, bits: int) -> int:
    return bits - a.bit_length() if a else -1


def _leading_sign(a: int, bits: int) -> int:
    return _leading_zeros(a ^ (((1 << bits) - 1) * (a >> (bits - 1))), bits)


def _shift_add(n: int) -> Callable[[int, int], tuple[int, bool]]:
    return lambda a, b: ((a << n) + b, (a << n) + b > MASK32)


Entry = tuple[int, str, Callable[..., Any], str]
TABLE: dict[str, Entry] = {
    "s_mov_b32": (32, "u", lambda a: a, ""),
    "s_mov_b64": (64, "U", lambda a: a, ""),
    "s_movk_i32": (32, "k", lambda a: a, ""),
    "s_not_b32": (32, "u", lambda a: ~a, "nz"),
    "s_not_b64": (64, "U", lambda a: ~a, "nz"),
    "s_brev_b32": (32, "u", lambda a: _reverse(a, 32), ""),
    "s_brev_b64": (64, "U", lambda a: _reverse(a, 64), ""),
    "s_abs_i32": (32, "i", abs, "nz"),
    "s_sext_i32_i8": (32, "u", lambda a: sign_extend(a, 8), ""),
    "s_sext_i32_i16": (32, "u", lambda a: sign_extend(a, 16), ""),
    "s_bcnt0_i32_b32": (32, "u", lambda a: 32 - a.bit_count(), "nz"),
    "s_bcnt1_i32_b32": (32, "u", int.bit_count, "nz"),
    "s_bcnt1_i32_b64": (32, "U", int.bit_count, "nz"),
    "s_ff1_i32_b32": (32, "u", _first_one, ""),
    "s_ff1_i32_b64": (32, "U", _first_one, ""),
    "s_ff0_i32_b32": (32, "u", lambda a: _first_one(~a & MASK32), ""),
    "s_flbit_i32_b32": (32, "u", lambda a: _leading_zeros(a, 32), ""),
    "s_flbit_i32_b64": (32, "U", lambda a: _leading_zeros(a, 64), ""),
    "s_flbit_i32": (32, "u", lambda a: _leading_sign(a, 32), ""),
    "s_bitset0_b32": (32, "Du", lambda d, n: d & ~(1 << (n & 31)), ""),
    "s_bitset1_b32": (32, "Du", lambda d, n: d | 1 << (n & 31), ""),
    "s_add_u32": (32, "uu", _carry_add, "+"),
    "s_sub_u32": (32, "uu", _borrow_sub, "+"),
    "s_addc_u32": (32, "uuc", _carry_add, "+"),
    "s_subb_u32": (32, "uuc", _borrow_sub, "+"),
    "s_add_i32": (32, "ii", lambda a, b: _signed(a + b), "+"),
    "s_sub_i32": (32, "ii", lambda a, b: _signed(a - b), "+"),
    "s_addk_i32": (32, "dk", lambda a, b: _signed(a + b), "+"),
    "s_mulk_i32": (32, "dk", lambda a, b: a * b, ""),
    "s_mul_i32": (32, "uu", lambda a, b: a * b, ""),
    "s_mul_hi_u32": (32, "uu", lambda a, b: (a * b) >> 32, ""),
    "s_mul_hi_i32": (32, "ii", lambda a, b: (a * b) >> 32, ""),
    "s_absdiff_i32": (32, "ii", lambda a, b: abs(a - b), "nz"),
    "s_min_i32": (32, "ii", lambda a, b: (min(a, b), a < b), "+"),
    "s_max_i32": (32, "ii", lambda a, b: (max(a, b), a > b), "+"),
    "s_min_u32": (32, "uu", lambda a, b: (min(a, b), a < b), "+"),
    "s_max_u32": (32, "uu", lambda a, b: (max(a, b), a > b), "+"),
    "s_lshl_b32": (32, "uu", lambda a, n: (a << (n & 31)) & MASK32, "nz"),
    "s_lshr_b32": (32, "uu", lambda a, n: a >> (n & 31), "nz"),
    "s_ashr_i32": (32, "iu", lambda a, n: a >> (n & 31), "nz"),
    "s_lshl_b64": (64, "Uu", lambda a, n: (a << (n & 63)) & MASK64, "nz"),
    "s_lshr_b64": (64, "Uu", lambda a, n: a >> (n & 63), "nz"),
    "s_ashr_i64": (64, "Iu", lambda a, n: a >> (n & 63), "nz"),
    "s_bfe_u32": (32, "uu", lambda a, c: _bit_field(a, c, 32, False), "nz"),
    "s_bfe_i32": (32, "uu", lambda a, c: _bit_field(a, c, 32, True), "nz"),
    "s_bfe_u64": (64, "Uu", lambda a, c: _bit_field(a, c, 64, False), "nz"),
    "s_bfe_i64": (64, "Uu", lambda a, c: _bit_field(a, c, 64, True), "nz"),
    "s_bfm_b32": (32, "uu", lambda a, b: ((1 << (a & 31)) - 1) << (b & 31), ""),
    "s_bfm_b64": (64, "uu", lambda a, b: ((1 << (a & 63)) - 1) << (b & 63), ""),
    "s_pack_ll_b32_b16": (32, "uu", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16, ""),
    "s_pack_lh_b32_b16": (32, "uu", lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000), ""),
    "s_pack_hh_b32_b16": (32, "uu", lambda a, b: a >> 16 | (b & 0xFFFF0000), ""),
    "s_cselect_b32": (32, "uuc", lambda a, b, c: a if c else b, ""),
    "s_cselect_b64": (64, "UUc", lambda a, b, c: a if c else b, ""),
    "s_cmov_b32": (32, "Duc", lambda d, a, c: a if c else d, ""),
    "s_cmovk_i32": (32, "dkc", lambda d, a, c: a if c else d, ""),
    **{f"s_lshl{n}_add_u32": (32, "uu", _shift_add(n), "+") for n in (1, 2, 3, 4)},
}
LOGIC: dict[str, Callable[[int, int], int]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
for _name, _fn in LOGIC.items():
    TABLE[f"s_{_name}_b32"] = (32, "uu", _fn, "nz")
    TABLE[f"s_{_name}_b64"] = (64, "UU", _fn, "nz")
SAVEEXEC = LOGIC | {"andn1": lambda a, b: ~a & b, "orn1": lambda a, b: ~a | b}
COMPARE = {
    "eq": operator.eq,
    "lg": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


def scalar_reader(op: Operand, code: str) -> Callable[[Wave], int]:
    """Closure reading one scalar source according to its code."""
    if code == "k":
        value = sign_extend(int(op.value), 16)
        return lambda w: value
    if code == "c":
        return lambda w: w.scc
    if op.kind == "v" or op.kind == "off":
        raise EmuError(f"{op.text!r} is not a scalar source")
    width = 64 if code in "UI" else 32
    if op.kind == "c":
        bits = op.constant_bits(width)
        constant = sign_extend(bits, width) if code in "iId" else bits
        return lambda w: constant
    if code in "iId":
        return lambda w: sign_extend(w.scalar(op, width), width)
    return lambda w: w.scalar(op, width)


def _decode_compare(inst: Instruction, match: re.Match[str]) -> Action:
    immediate, relation, kind = match.groups()
    fn = COMPARE[relation]
    code = {"i32": "i", "u32": "u", "u64": "U"}[kind]
    first, second = (parse_operand(o) for o in inst.operands)
    left = scalar_reader(first, code)
    if immediate:
        value = sign_extend(int(second.value), 16) if code == "i" else int(second.value) & 0xFFFF

        def right(w: Wave) -> int:
            return value
    else:
        right = scalar_reader(second, code)

    def compare(w: Wave) -> None:
        w.scc = int(fn(left(w), right(w)))

    return compare


def _decode_saveexec(inst: Instruction, fn: Callable[[int, int], int]) -> Action:
    dst = parse_operand(inst.operands[0]).index
    source = scalar_reader(parse_operand(inst.operands[1]), "U")

    def saveexec(w: Wave) -> None:
        value, old = source(w), w.exec
        w.write_sgpr64(dst, old)
        w.set_exec(fn(value, old))
        w.scc = int(w.exec != 0)

    return saveexec


def decode_scalar(inst: Instruction) -> Action:
    """Scalar arithmetic, logic and comparisons."""
    name = inst.mnemonic
    if match := re.fullmatch(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_(i32|u32|u64)", name):
        return _decode_compare(inst, match)
    if match := re.fullmatch(r"s_(\w+)_saveexec_b64", name):
        return _decode_saveexec(inst, SAVEEXEC[match[1]])
    if match := re.fullmatch(r"s_bitcmp([01])_b(32|64)", name):
        code = "U" if match[2] == "64" else "u"
        value = scalar_reader(parse_operand(inst.operands[0]), code)
        bit = scalar_reader(parse_operand(inst.operands[1]), "u")
        wanted, limit = int(match[1]), int(match[2]) - 1

        def bitcmp(w: Wave) -> None:
            w.scc = int((value(w) >> (bit(w) & limit)) & 1 == wanted)

        return bitcmp
    if name not in TABLE:
        raise EmuError(f"unsupported instruction {inst}")
    width, codes, fn, rule = TABLE[name]
    ops = [parse_operand(o) for o in inst.operands]
    dst, sources = ops[0], ops[1:]
    if dst.kind != "s":
        raise EmuError(f"bad scalar destination {dst.text!r}")
    readers = []
    for code in codes:
        if code in "dD":
            readers.append(scalar_reader(dst, "i" if code == "d" else "u"))
        else:
            readers.append(scalar_reader(dst if code == "c" else sources.pop(0), code))
    mask = MASK32 if width == 32 else MASK64
    index = dst.index

    def execute(w: Wave) -> None:
        result = fn(*[read(w) for read in readers])
        if rule == "+":
            result, carry = result
            w.scc = int(carry)
        elif rule:
            w.scc = int(result & mask != 0)
        if width == 32:
            w.write_sgpr(index, result)
        else:
            w.write_sgpr64(index, result & mask)

    return execute
