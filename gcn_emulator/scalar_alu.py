"""Scalar ALU: SOP1, SOP2, SOPK, SOPC as tables over Python integers.

Where the waves of a batch hold different values the tables are applied wave by wave; 64-bit logic
on lane masks works on the lanes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from gcn_emulator.formats import MASK32, MASK64, EmuError, sign_extend
from gcn_emulator.operands import Operand, parse_operand
from gcn_emulator.parser import Instruction
from gcn_emulator.scalars import LaneMask, Scalar, map_waves, mask_lanes, per_wave, uniform
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


Reader = Callable[[Wave], Scalar]

# Logic on bool lanes, for the 64-bit operations
_LANE_LOGIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: a == b,
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}


def scalar_reader(op: Operand, code: str) -> Reader:
    """Closure reading one scalar source, without sign."""
    if code == "k":
        value = sign_extend(int(op.value), 16)
        return lambda w: value
    if code == "c":
        return lambda w: w.read_scc()
    if op.kind == "v" or op.kind == "off":
        raise EmuError(f"{op.text!r} is not a scalar source")
    width = 64 if code in "UI" else 32
    if op.kind == "c":
        constant = op.constant_bits(width)
        return lambda w: constant
    return lambda w: w.scalar(op, width)


def _signed_as(code: str) -> Callable[[int], int] | None:
    """How a source code turns register bits into a Python integer; None: as they are."""
    if code in "id":
        return lambda x: sign_extend(x, 32)
    return (lambda x: sign_extend(x, 64)) if code == "I" else None


def _with_signs(fn: Callable[..., Any], codes: str) -> Callable[..., Any]:
    """A table function taking register bits."""
    signs = [_signed_as(c) for c in codes]
    if not any(signs):
        return fn
    return lambda *args: fn(*[s(a) if s else a for s, a in zip(signs, args, strict=True)])


def _integers(value: Scalar) -> int | tuple[int, ...]:
    return value.words() if isinstance(value, LaneMask) else value


def _decode_compare(inst: Instruction, match: re.Match[str]) -> Action:
    immediate, relation, kind = match.groups()
    compare = COMPARE[relation]
    code = {"i32": "i", "u32": "u", "u64": "U"}[kind]
    first, second = (parse_operand(o) for o in inst.operands)
    left = scalar_reader(first, code)
    fn = _with_signs(lambda a, b: int(compare(a, b)), code * 2)
    if immediate:
        value = int(second.value) & 0xFFFF
        value = sign_extend(value, 16) & MASK32 if code == "i" else value
        return lambda w: _set_scc(w, map_waves(fn, _integers(left(w)), value))
    right = scalar_reader(second, code)
    return lambda w: _set_scc(w, map_waves(fn, _integers(left(w)), _integers(right(w))))


def _set_scc(w: Wave, value: Any) -> None:
    w.scc = value


def _combine(w: Wave, name: str, a: Scalar, b: Scalar) -> Scalar:
    """64-bit logic: on lanes if either side is a lane mask, else on integers."""
    if isinstance(a, LaneMask) or isinstance(b, LaneMask):
        return LaneMask(_LANE_LOGIC[name](mask_lanes(a, w.n), mask_lanes(b, w.n)))
    fn = SAVEEXEC[name]
    return map_waves(lambda x, y: fn(x, y) & MASK64, a, b)


def _nonzero(value: Scalar) -> Any:
    if isinstance(value, LaneMask):
        return value  # resolved when SCC is read
    return map_waves(lambda x: int(x != 0), value)


def _decode_logic64(inst: Instruction, name: str) -> Action:
    dst, first, second = (parse_operand(o) for o in inst.operands)
    left, right, index = scalar_reader(first, "U"), scalar_reader(second, "U"), dst.index

    def logic(w: Wave) -> None:
        result = _combine(w, name, left(w), right(w))
        w.write_sgpr64(index, result)
        w.scc = _nonzero(result)

    return logic


def _decode_saveexec(inst: Instruction, name: str) -> Action:
    dst = parse_operand(inst.operands[0]).index
    source = scalar_reader(parse_operand(inst.operands[1]), "U")

    def saveexec(w: Wave) -> None:
        value, old = source(w), w.exec
        w.write_sgpr64(dst, old)
        w.set_exec(_combine(w, name, value, old))
        w.scc = _nonzero(w.exec)

    return saveexec


def _decode_bitcmp(inst: Instruction, match: re.Match[str]) -> Action:
    code = "U" if match[2] == "64" else "u"
    value = scalar_reader(parse_operand(inst.operands[0]), code)
    bit = scalar_reader(parse_operand(inst.operands[1]), "u")
    wanted, limit = int(match[1]), int(match[2]) - 1

    def test(x: int, n: int) -> int:
        return int((x >> (n & limit)) & 1 == wanted)

    return lambda w: _set_scc(w, map_waves(test, _integers(value(w)), bit(w)))


def _decode_not64(inst: Instruction) -> Action:
    dst, source = (parse_operand(o) for o in inst.operands)
    read, index = scalar_reader(source, "U"), dst.index

    def invert(w: Wave) -> None:
        value = read(w)
        if isinstance(value, LaneMask):
            result: Scalar = LaneMask(~value.lanes)
        else:
            result = map_waves(lambda x: ~x & MASK64, value)
        w.write_sgpr64(index, result)
        w.scc = _nonzero(result)

    return invert


def decode_scalar(inst: Instruction) -> Action:
    """Scalar arithmetic, logic and comparisons."""
    name = inst.mnemonic
    if match := re.fullmatch(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_(i32|u32|u64)", name):
        return _decode_compare(inst, match)
    if match := re.fullmatch(r"s_(\w+)_saveexec_b64", name):
        return _decode_saveexec(inst, match[1])
    if match := re.fullmatch(r"s_bitcmp([01])_b(32|64)", name):
        return _decode_bitcmp(inst, match)
    if (match := re.fullmatch(r"s_(\w+)_b64", name)) and match[1] in LOGIC:
        return _decode_logic64(inst, match[1])
    if name == "s_not_b64":
        return _decode_not64(inst)
    if name == "s_mov_b64":
        target, source = (parse_operand(o) for o in inst.operands)
        read64, pair = scalar_reader(source, "U"), target.index
        return lambda w: w.write_sgpr64(pair, read64(w))
    if name not in TABLE:
        raise EmuError(f"unsupported instruction {inst}")
    return _decode_table(inst, *TABLE[name])


def _decode_table(
    inst: Instruction, width: int, codes: str, fn: Callable[..., Any], rule: str
) -> Action:
    ops = [parse_operand(o) for o in inst.operands]
    dst, sources = ops[0], ops[1:]
    if dst.kind != "s":
        raise EmuError(f"bad scalar destination {dst.text!r}")
    readers = []
    for code in codes:
        source = dst if code in "dDc" else sources.pop(0)
        readers.append(scalar_reader(source, code))
    mask = MASK32 if width == 32 else MASK64
    index = dst.index
    fn = _with_signs(fn, codes)
    has_carry = rule == "+"

    def one_wave(*args: int) -> tuple[int, int]:
        result = fn(*args)
        if has_carry:
            return result[0] & mask, int(result[1])
        return result & mask, int(result & mask != 0)

    def execute(w: Wave) -> None:
        args: list[Any] = [_integers(read(w)) for read in readers]
        if tuple in map(type, args):
            outcomes = [one_wave(*x) for x in zip(*(per_wave(a, w.n) for a in args), strict=True)]
            result = uniform([r for r, _ in outcomes])
            carry = uniform([c for _, c in outcomes])
        else:
            result, carry = one_wave(*args)
        if rule:
            w.scc = carry
        if width == 32:
            w.write_sgpr(index, result)
        else:
            w.write_sgpr64(index, result)

    return execute
