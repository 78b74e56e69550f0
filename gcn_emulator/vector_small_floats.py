"""Vector conversions to and from fp8, bf8 and fp4."""

from __future__ import annotations

import numpy as np

from gcn_emulator.encodings import sdwa_field
from gcn_emulator.formats import (
    F32,
    F64,
    FP4,
    FP8,
    MASK32,
    U32,
    bf16_to_f32,
    encode_small_float,
    f16_bits,
    f32_to_bf16,
    fp8_kinds,
)
from gcn_emulator.operands import as_type, read_raw, read_typed
from gcn_emulator.vector_irregular import Decoded, special
from gcn_emulator.wave import Action, Wave


def _write_half(w: Wave, dst: int, bits: np.ndarray, high: int) -> None:
    if high:
        w.write(dst, (w.rows[dst] & U32(0xFFFF)) | (bits << U32(16)))
    else:
        w.write(dst, (w.rows[dst] & U32(0xFFFF0000)) | bits)


def _scale_factor(bits: np.ndarray) -> np.ndarray:
    """Power of two given by the exponent field of a float32 scale."""
    return np.exp2(((bits >> U32(23)) & U32(255)).astype(F64) - 127).astype(F32)


def _pair_of(bits: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Two packed f16/bf16 values as float32."""
    low, high = bits & U32(0xFFFF), bits >> U32(16)
    if kind == "f16":
        return as_type(low, "h").astype(F32), as_type(high, "h").astype(F32)
    return bf16_to_f32(low), bf16_to_f32(high)


@special("cvt_scalef32_pk_(fp8|bf8|fp4)_(f32|f16|bf16)")
def _scaled_encode(d: Decoded) -> Action:
    _, _, _, small, source = d.name.split("_")
    dst = d.ops[0].index
    select = d.inst.list_modifier("op_sel", 4, 0)
    table = FP4 if small == "fp4" else FP8[fp8_kinds(d.arch)[small]]
    readers = [read_typed(o, "f") for o in d.ops[1:]]
    raw = read_raw(d.ops[1], "u")

    def execute(w: Wave) -> None:
        if source == "f32":
            first, second = readers[0](w), readers[1](w)
        else:
            first, second = _pair_of(raw(w), source)
        scale = _scale_factor(readers[-1](w).view(U32))
        values = (first / scale, second / scale)
        low, high = (encode_small_float(x, table, w.overflow_clamps) for x in values)
        if small == "fp4":
            shift = 8 * (select[2] + 2 * select[3])
            kept = w.rows[dst] & U32(~(0xFF << shift) & MASK32)
            w.write(dst, kept | ((low | (high << U32(4))) << U32(shift)))
        else:
            _write_half(w, dst, low | (high << U32(8)), select[3])

    return execute


@special("cvt_scalef32_pk_(f32|f16|bf16)_(fp8|bf8|fp4)")
def _scaled_decode(d: Decoded) -> Action:
    _, _, _, target, small = d.name.split("_")
    dst, source, scale = d.ops[0].index, read_typed(d.ops[1], "u"), read_typed(d.ops[2], "f")
    select = d.inst.list_modifier("op_sel", 2, 0)
    fp4 = small == "fp4"
    table = FP4 if fp4 else FP8[fp8_kinds(d.arch)[small]]
    shift = U32(8 * (select[0] + 2 * select[1]) if fp4 else 16 * select[0])
    width = 4 if fp4 else 8

    def execute(w: Wave) -> None:
        bits, factor = source(w) >> shift, _scale_factor(scale(w).view(U32))
        mask = U32((1 << width) - 1)
        low, high = table[bits & mask] * factor, table[(bits >> U32(width)) & mask] * factor
        if target == "f32":
            w.write(dst, low.view(U32))
            w.write(dst + 1, high.view(U32))
        else:
            pack = f16_bits if target == "f16" else f32_to_bf16
            w.write(dst, pack(low) | (pack(high) << U32(16)))

    return execute


@special("cvt_pk_f32_(fp8|bf8)|cvt_f32_(fp8|bf8)")
def _fp8_decode(d: Decoded) -> Action:
    dst, source = d.ops[0].index, read_typed(d.ops[1], "u")
    table = FP8[fp8_kinds(d.arch)[d.name[-3:]]]
    shift, _ = sdwa_field(d.inst.modifiers.get("src0_sel", "DWORD"))
    select = d.inst.list_modifier("op_sel", 2, 0)
    packed = "pk" in d.name
    shift += 16 * select[0] if packed else 8 * (select[0] + 2 * select[1])

    def execute(w: Wave) -> None:
        bits = source(w) >> U32(shift)
        low, high = table[bits & U32(255)], table[(bits >> U32(8)) & U32(255)]
        w.write(dst, low.view(U32))
        if packed:
            w.write(dst + 1, high.view(U32))

    return execute


@special("cvt_pk_(fp8|bf8)_f32")
def _fp8_encode(d: Decoded) -> Action:
    dst, table = d.ops[0].index, FP8[fp8_kinds(d.arch)[d.name[7:10]]]
    a, b = read_typed(d.ops[1], "f"), read_typed(d.ops[2], "f")
    high = d.inst.list_modifier("op_sel", 3, 0)[2]

    def execute(w: Wave) -> None:
        low = encode_small_float(a(w), table, w.overflow_clamps)
        _write_half(
            w, dst, low | (encode_small_float(b(w), table, w.overflow_clamps) << U32(8)), high
        )

    return execute
