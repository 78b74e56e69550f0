"""Decoding of the vector ALU: the table, comparisons, and the look-up of irregular instructions."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gcn_emulator import vector_small_floats  # noqa: F401  registers its instructions
from gcn_emulator.encodings import (
    DppControl,
    output_modifiers,
    refuse_clamped_overflow,
    result_writer,
    saturate,
    source_reader,
)
from gcn_emulator.formats import U32, U64, EmuError
from gcn_emulator.operands import (
    FLOAT_CODES,
    Operand,
    Reader,
    apply_sign,
    as_type,
    parse_operand,
    read_raw,
    to_bits,
)
from gcn_emulator.parser import Instruction
from gcn_emulator.vector_irregular import SPECIAL, Decoded
from gcn_emulator.vector_table import (
    ACCUMULATE,
    ALIASES,
    COMPARE,
    COMPARE_CODES,
    DIRECT,
    SATURATING,
    TABLE,
)
from gcn_emulator.wave import Action, Wave

_SUFFIX = re.compile(r"v_(\w+?)(?:_(e32|e64|dpp|sdwa|e64_dpp))?")


def _decode_table(inst: Instruction, name: str, encoding: str, ops: list[Operand]) -> Action:
    code, source_codes, fn = TABLE[name]
    sources = ops[1:]
    if len(sources) != len(source_codes) or ops[0].kind != "v":
        raise EmuError(f"bad operands in {inst}")
    readers = [
        source_reader(inst, op, c, i, encoding)
        for i, (op, c) in enumerate(zip(sources, source_codes, strict=True))
    ]
    if "clamp" in inst.modifiers and code not in FLOAT_CODES:
        if name not in SATURATING:
            raise EmuError(f"integer clamp in {inst}")
        fn = saturate(fn, code)
    finish = output_modifiers(inst, code)
    if finish:
        plain, post = fn, finish
        fn = lambda *args: post(plain(*args))  # noqa: E731
    store = result_writer(inst, ops[0].index, code, encoding, name, len(sources))
    if code == "h":
        store = refuse_clamped_overflow(store)
    elif name in DIRECT and encoding in ("", "e32", "e64") and not finish and fn is TABLE[name][2]:
        return _direct(ops[0].index, code, DIRECT[name], readers)
    if encoding == "dpp":
        control, op, first_code = DppControl(inst), sources[0], source_codes[0]
        raw, rest = read_raw(op, first_code), readers[1:]

        def execute_dpp(w: Wave) -> None:
            bits, lanes = control.fetch(w, raw(w))
            first = apply_sign(as_type(bits, first_code), op, first_code)
            store(w, to_bits(fn(first, *[r(w) for r in rest]), code), lanes)

        return execute_dpp
    if len(readers) == 1:
        (a,) = readers
        return lambda w: store(w, to_bits(fn(a(w)), code), None)
    if len(readers) == 2:
        a, b = readers
        return lambda w: store(w, to_bits(fn(a(w), b(w)), code), None)
    a, b, c = readers
    return lambda w: store(w, to_bits(fn(a(w), b(w), c(w)), code), None)


def _direct(dst: int, code: str, ufunc: np.ufunc, readers: list[Reader]) -> Action:
    """A two-operand ufunc that writes the destination register without a temporary."""
    a, b = readers
    select = {
        "f": lambda w: w.rows_f32[dst],
        "i": lambda w: w.rows_i32[dst],
        "u": lambda w: w.rows[dst],
    }[code]

    def execute(w: Wave) -> None:
        if w.active is None:
            ufunc(a(w), b(w), out=select(w))
        else:
            ufunc(a(w), b(w), out=select(w), where=w.active)

    return execute


def _class_bits(x: np.ndarray, wanted: np.ndarray, code: str) -> np.ndarray:
    """v_cmp_class: does the class of x have its bit set in `wanted`?"""
    man_bits, exp_max = {"f": (23, 255), "F": (52, 2047), "h": (10, 31)}[code]
    bits = to_bits(x, code).astype(U64)
    exponent = (bits >> U64(man_bits)) & U64(exp_max)
    mantissa = bits & U64((1 << man_bits) - 1)
    negative = np.signbit(x)
    nan = (exponent == exp_max) & (mantissa != 0)
    quiet = nan & ((mantissa >> U64(man_bits - 1)) != 0)
    infinite = (exponent == exp_max) & (mantissa == 0)
    denormal, zero = (exponent == 0) & (mantissa != 0), (exponent == 0) & (mantissa == 0)
    normal = (exponent != 0) & (exponent != exp_max)
    order = (nan & ~quiet, quiet)
    order += tuple(c & negative for c in (infinite, normal, denormal, zero))
    order += tuple(c & ~negative for c in (zero, denormal, normal, infinite))
    out = np.zeros(x.shape, bool)
    for i, member in enumerate(order):
        out |= member & (((wanted >> U32(i)) & U32(1)) != 0)
    return out


def _decode_compare(
    inst: Instruction, match: re.Match[str], encoding: str, ops: list[Operand]
) -> Action:
    sets_exec, relation, kind = match.groups()
    code = COMPARE_CODES[kind]
    dst = ops[0].index
    a = source_reader(inst, ops[1], code, 0, encoding)
    if relation == "class":
        b = source_reader(inst, ops[2], "u", 1, encoding)
        fn: Callable[..., np.ndarray] = lambda x, y: _class_bits(x, y, code)  # noqa: E731
    else:
        b = source_reader(inst, ops[2], code, 1, encoding)
        fn = COMPARE[relation]

    def compare(w: Wave) -> None:
        w.write_mask(dst, fn(a(w), b(w)))
        if sets_exec:
            w.set_exec(w.read_sgpr64(dst))

    return compare


_CMP = re.compile(r"cmp(x?)_(\w+)_(f32|f64|f16|u32|i32|u64|i64|u16|i16)")


def decode_vector(inst: Instruction, arch: str) -> Action:
    """Decode any v_* instruction except the matrix ones."""
    match = _SUFFIX.fullmatch(inst.mnemonic)
    assert match is not None
    name, encoding = match[1], match[2] or ""
    encoding = "dpp" if encoding.endswith("dpp") else encoding
    ops = [parse_operand(o) for o in inst.operands]
    if name in ACCUMULATE:
        name, ops = ACCUMULATE[name], [*ops, ops[0]]
    name = ALIASES.get(name, name)
    if name in TABLE:
        return _decode_table(inst, name, encoding, ops)
    if (compare := _CMP.fullmatch(name)) and (compare[2] in COMPARE or compare[2] == "class"):
        return _decode_compare(inst, compare, encoding, ops)
    for pattern, decoder in SPECIAL:
        if pattern.fullmatch(name):
            return decoder(Decoded(inst, name, encoding, ops, arch))
    raise EmuError(f"unsupported instruction {inst}")
