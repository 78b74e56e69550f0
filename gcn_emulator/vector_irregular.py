"""Vector instructions that do not fit dst = f(sources): lane access, carries, packed operations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gcn_emulator.encodings import (
    DppControl,
    output_modifiers,
    result_writer,
    saturate,
    source_reader,
)
from gcn_emulator.formats import (
    F32,
    F64,
    I64,
    LANES,
    MASK32,
    U32,
    U64,
    WAVE_SIZE,
    f16_bits,
)
from gcn_emulator.operands import (
    DTYPES,
    FLOAT_CODES,
    VCC,
    Operand,
    apply_sign,
    as_type,
    parse_operand,
    read_half,
    read_raw,
    read_typed,
    to_bits,
)
from gcn_emulator.parser import Instruction
from gcn_emulator.scalars import mask_lanes, per_wave, uniform
from gcn_emulator.vector_functions import fma32
from gcn_emulator.vector_table import PACKED16, PACKED32, TABLE
from gcn_emulator.wave import Action, Wave


@dataclass(slots=True)
class Decoded:
    """What a decoder of an irregular instruction gets."""

    inst: Instruction
    name: str
    encoding: str
    ops: list[Operand]
    arch: str


Special = Callable[[Decoded], Action]
SPECIAL: list[tuple[re.Pattern[str], Special]] = []


def special(pattern: str) -> Callable[[Special], Special]:
    """Register a decoder for mnemonics that match `pattern` completely."""

    def register(fn: Special) -> Special:
        SPECIAL.append((re.compile(pattern), fn))
        return fn

    return register


@special("nop")
def _nop(d: Decoded) -> Action:
    return lambda w: None


@special("readfirstlane_b32|readlane_b32|writelane_b32")
def _lane_access(d: Decoded) -> Action:
    dst = d.ops[0].index
    if d.name == "writelane_b32":

        def write_lane(w: Wave) -> None:
            lanes, values = (per_wave(w.scalar(d.ops[i]), w.n) for i in (2, 1))
            for i, (lane, value) in enumerate(zip(lanes, values, strict=True)):
                w.rows[dst][WAVE_SIZE * i + (lane & 63)] = value

        return write_lane
    source = d.ops[1].index
    if d.name == "readlane_b32":

        def read_lane(w: Wave) -> None:
            row, lanes = w.rows[source], per_wave(w.scalar(d.ops[2]), w.n)
            w.write_sgpr(
                dst, uniform([int(row[WAVE_SIZE * i + (x & 63)]) for i, x in enumerate(lanes)])
            )

        return read_lane

    def read_first(w: Wave) -> None:
        values = w.rows[source].reshape(w.n, WAVE_SIZE)
        if w.active is None:
            w.write_sgpr(dst, uniform(values[:, 0].tolist()))
            return
        first = w.active.reshape(w.n, WAVE_SIZE).argmax(1)  # lane 0 when no lane is active
        w.write_sgpr(dst, uniform(values[np.arange(w.n), first].tolist()))

    return read_first


@special("permlane(16|32)_swap_b32")
def _permlane_swap(d: Decoded) -> Action:
    """Swap the odd rows of the first register with the even rows of the second."""
    a, b, size = d.ops[0].index, d.ops[1].index, int(d.name[8:10])

    def swap(w: Wave) -> None:
        x, y = w.rows[a].copy(), w.rows[b].copy()
        odd, partner = (w.lane & size).astype(bool), w.lane ^ size
        w.write(a, np.where(odd, y[partner], x))
        w.write(b, np.where(odd, y, x[partner]))

    return swap


@special("swap_b32")
def _swap(d: Decoded) -> Action:
    a, b = d.ops[0].index, d.ops[1].index

    def swap(w: Wave) -> None:
        old = w.rows[a].copy()
        w.write(a, w.rows[b])
        w.write(b, old)

    return swap


@special("cndmask_b32")
def _cndmask(d: Decoded) -> Action:
    dst, condition = d.ops[0].index, d.ops[3] if len(d.ops) > 3 else parse_operand("vcc")
    a, b = (source_reader(d.inst, d.ops[i], "u", i - 1, d.encoding) for i in (1, 2))
    store = result_writer(d.inst, dst, "u", d.encoding, d.name, 2)
    if d.encoding == "dpp":
        control = DppControl(d.inst)

        def select_dpp(w: Wave) -> None:
            first, lanes = control.fetch(w, a(w))
            w.write(dst, np.where(w.lanes_of(condition), b(w), first), lanes)

        return select_dpp
    return lambda w: store(w, np.where(w.lanes_of(condition), b(w), a(w)), None)


@special("(add|sub|subrev|addc|subb|subbrev)_co_u32")
def _carry(d: Decoded) -> Action:
    dst, carry_out = d.ops[0].index, d.ops[1].index
    a, b = (source_reader(d.inst, d.ops[i], "u", i - 2, d.encoding) for i in (2, 3))
    carry_in = d.ops[4] if len(d.ops) > 4 else None
    sign, swap = -1 if d.name.startswith("sub") else 1, "rev" in d.name

    def execute(w: Wave) -> None:
        x, y = a(w).astype(I64), b(w).astype(I64)
        x, y = (y, x) if swap else (x, y)
        total = x + sign * y
        if carry_in is not None:
            total = total + sign * w.lanes_of(carry_in).astype(I64)
        w.write_mask(carry_out, (total < 0) | (total > MASK32))
        w.write(dst, (total & MASK32).astype(U32))

    return execute


@special("mad_(u64_u32|i64_i32)")
def _mad64(d: Decoded) -> Action:
    dst, carry_out = d.ops[0].index, d.ops[1].index
    code, wide = ("i", "I") if d.name == "mad_i64_i32" else ("u", "U")
    a, b, c = read_typed(d.ops[2], code), read_typed(d.ops[3], code), read_typed(d.ops[4], wide)
    kind = DTYPES[wide]

    def execute(w: Wave) -> None:
        product, addend = a(w).astype(kind) * b(w).astype(kind), c(w)
        total = product + addend
        if wide == "U":
            overflow = total < product
        else:
            overflow = ((product ^ total) & (addend ^ total)) < 0
        w.write_mask(carry_out, overflow)
        w.write64(dst, total.view(U64))

    return execute


@special("mbcnt_(lo|hi)_u32_b32")
def _mbcnt(d: Decoded) -> Action:
    """Count mask bits below the lane."""
    dst, mask, base = d.ops[0].index, d.ops[1], read_typed(d.ops[2], "u")
    below = np.clip(LANES - (32 if "hi" in d.name else 0), 0, 32)
    ordinal = np.arange(32, dtype=U32)

    def execute(w: Wave) -> None:
        bits = read_raw(mask, "u")(w)
        under = np.tile(below, w.n)[:, None]
        set_bits = ((bits[:, None] >> ordinal) & U32(1)) * (ordinal < under)
        w.write(dst, base(w) + set_bits.sum(1).astype(U32))

    return execute


@special("bitop3_b(32|16)")
def _bitop3(d: Decoded) -> Action:
    table, code = d.inst.int_modifier("bitop3"), "u" if d.name.endswith("32") else "w"
    a, b, c = (source_reader(d.inst, d.ops[i], code, i - 1, d.encoding) for i in (1, 2, 3))
    store = result_writer(d.inst, d.ops[0].index, code, d.encoding, d.name, 3)
    terms = [i for i in range(8) if table >> i & 1]

    def execute(w: Wave) -> None:
        x, y, z = a(w), b(w), c(w)
        out = np.zeros_like(x)
        for i in terms:
            out = out | ((x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z))
        store(w, to_bits(out, code), None)

    return execute


def _ilogb(x: np.ndarray) -> np.ndarray:
    return np.frexp(x)[1] - 1


@special("div_scale_f(32|64)")
def _div_scale(d: Decoded) -> Action:
    """Scale numerator or denominator of a division away from overflow and underflow."""
    code = "f" if d.name.endswith("32") else "F"
    kind = DTYPES[code]
    big, tiny, steps, low, emin = (96, 23, 64, -126, -126) if code == "f" else (
        768, 53, 128, -1022, -1022,
    )  # fmt: skip
    bias = 127 if code == "f" else 1023
    dst, flag = d.ops[0].index, d.ops[1].index
    a, b, c = (read_typed(o, code) for o in d.ops[2:5])
    up, down = kind(2.0**steps), kind(2.0**-steps)
    smallest = kind(2.0**emin)

    def execute(w: Wave) -> None:
        x, den, num = a(w), b(w), c(w)
        gap = _ilogb(num) - _ilogb(den)
        far = gap >= big
        den_denormal = ~far & (np.abs(den) < smallest) & (den != 0)
        open_ = ~far & ~den_denormal
        rcp_denormal = open_ & (_ilogb(den) > -low)
        quotient_denormal = open_ & (gap < low)
        both = rcp_denormal & quotient_denormal
        small = open_ & ~rcp_denormal & ~quotient_denormal & (_ilogb(num) + bias <= tiny)
        is_den, is_num = x == den, x == num
        factor = np.where(far & is_den | den_denormal | small, up, kind(1))
        factor = np.where(rcp_denormal & (~both | is_den), down, factor)
        factor = np.where(quotient_denormal & ~both & is_num, up, factor)
        out = np.where((num == 0) | (den == 0), kind(np.nan), x * factor)
        w.write_mask(flag, far | quotient_denormal)
        bits = to_bits(out, code)
        if code == "f":
            w.write(dst, bits)
        else:
            w.write64(dst, bits)

    return execute


@special("div_fmas_f(32|64)")
def _div_fmas(d: Decoded) -> Action:
    code = "f" if d.name.endswith("32") else "F"
    dst, steps = d.ops[0].index, 64 if code == "f" else 128
    fn = TABLE["fma_" + d.name[-3:]][2]
    a, b, c = (read_typed(o, code) for o in d.ops[1:4])

    def execute(w: Wave) -> None:
        addend = c(w)
        scaled = mask_lanes(w.read_sgpr64(VCC), w.n)
        if code == "f":  # scale before the only rounding
            exact = a(w).astype(F64) * b(w).astype(F64) + addend.astype(F64)
            factor = np.where(np.abs(addend) >= 2, 2.0**steps, 2.0**-steps)
            scaled_result = (exact * factor).astype(F32)
            w.write(dst, np.where(scaled, scaled_result, fma32(a(w), b(w), addend)).view(U32))
            return
        factor = np.where(np.abs(addend) >= 2, 2.0**steps, 2.0**-steps)
        result = fn(a(w), b(w), addend)
        w.write64(dst, np.where(scaled, result * factor, result).view(U64))

    return execute


@special("pk_mov_b32")
def _pk_mov(d: Decoded) -> Action:
    dst, select = d.ops[0].index, d.inst.list_modifier("op_sel", 2, 0)
    low, high = read_half(d.ops[1], select[0]), read_half(d.ops[2], select[1])

    def execute(w: Wave) -> None:
        first, second = low(w).copy(), high(w).copy()
        w.write(dst, first)
        w.write(dst + 1, second)

    return execute


@special("pk_(add|mul|fma)_f32")
def _packed32(d: Decoded) -> Action:
    dst, sources, fn = d.ops[0].index, d.ops[1:], PACKED32[d.name]
    n = len(sources)
    finish = output_modifiers(d.inst, "f")

    def side(select: str, negate: str, default: int) -> Callable[[Wave], np.ndarray]:
        chosen = d.inst.list_modifier(select, n, default)
        signs = d.inst.list_modifier(negate, n, 0)
        readers = [(read_half(op, h), s) for op, h, s in zip(sources, chosen, signs, strict=True)]

        def compute(w: Wave) -> np.ndarray:
            out = fn(*[-r(w).view(F32) if s else r(w).view(F32) for r, s in readers])
            return finish(out) if finish else out

        return compute

    low, high = side("op_sel", "neg_lo", 0), side("op_sel_hi", "neg_hi", 1)

    def execute(w: Wave) -> None:
        first, second = low(w), high(w)
        w.write(dst, first.view(U32))
        w.write(dst + 1, second.view(U32))

    return execute


@special("|".join(PACKED16))
def _packed16(d: Decoded) -> Action:
    code, fn = PACKED16[d.name]
    dst, sources = d.ops[0].index, d.ops[1:]
    n = len(sources)
    raws = [read_raw(op, code) for op in sources]
    finish = output_modifiers(d.inst, code)
    if "clamp" in d.inst.modifiers and code not in FLOAT_CODES:
        fn = saturate(fn, code)
    sides = []
    for select, negate, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
        shifts = [U32(16 * h) for h in d.inst.list_modifier(select, n, default)]
        sides.append((shifts, d.inst.list_modifier(negate, n, 0)))

    def execute(w: Wave) -> None:
        bits = [r(w) for r in raws]
        out = []
        for shifts, signs in sides:
            values = [as_type(b >> s, code) for b, s in zip(bits, shifts, strict=True)]
            values = [-v if s else v for v, s in zip(values, signs, strict=True)]
            result = fn(*values)
            out.append(to_bits(finish(result) if finish else result, code))
        w.write(dst, out[0] | (out[1] << U32(16)))

    return execute


@special("(fma|mad)_mix(_f32|lo_f16|hi_f16)")
def _fma_mix(d: Decoded) -> Action:
    """Sources are float32, or either half as float16 where op_sel_hi is set."""
    dst, sources = d.ops[0].index, d.ops[1:4]
    high, half = d.inst.list_modifier("op_sel", 3, 0), d.inst.list_modifier("op_sel_hi", 3, 0)
    raws = [read_raw(op, "h" if h else "f") for op, h in zip(sources, half, strict=True)]
    finish = output_modifiers(d.inst, "f")

    def execute(w: Wave) -> None:
        values = []
        for i, op in enumerate(sources):
            bits = raws[i](w)
            if half[i]:
                value = as_type(bits >> U32(16) if high[i] else bits, "h").astype(F32)
            else:
                value = bits.view(F32)
            values.append(apply_sign(value, op, "f"))
        result = fma32(*values)
        result = finish(result) if finish else result
        if d.name.endswith("f32"):
            w.write(dst, result.view(U32))
        elif "hi" in d.name:
            w.write(dst, (w.rows[dst] & U32(0xFFFF)) | (f16_bits(result) << U32(16)))
        else:
            w.write(dst, (w.rows[dst] & U32(0xFFFF0000)) | f16_bits(result))

    return execute
