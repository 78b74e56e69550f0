"""Vector encodings: SDWA, DPP, source and output modifiers, placement of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gcn_emulator.formats import I32, I64, LANES, MASK32, U32, WAVE_SIZE, EmuError
from gcn_emulator.operands import (
    DTYPES,
    FLOAT_CODES,
    WIDTHS,
    Operand,
    Reader,
    apply_sign,
    as_type,
    read_raw,
    read_typed,
)
from gcn_emulator.parser import Instruction
from gcn_emulator.vector_table import PRESERVE_HIGH
from gcn_emulator.wave import Wave


def sdwa_field(selector: str) -> tuple[int, int]:
    """'BYTE_2' -> (shift 16, width 8)."""
    if selector == "DWORD":
        return 0, 32
    kind, number = selector.split("_")
    width = 8 if kind == "BYTE" else 16
    return width * int(number), width


def sdwa_select(bits: np.ndarray, selector: str, sign: bool = False) -> np.ndarray:
    """Extract a byte or word of every lane, zero- or sign-extended."""
    shift, width = sdwa_field(selector)
    if width == 32:
        return bits
    field = (bits >> U32(shift)) & U32((1 << width) - 1)
    if sign:
        field = ((field << U32(32 - width)).view(I32) >> I32(32 - width)).view(U32)
    return field


def sdwa_merge(old: np.ndarray, bits: np.ndarray, selector: str, unused: str) -> np.ndarray:
    """Place a result into a byte or word of the destination."""
    shift, width = sdwa_field(selector)
    if width == 32:
        return bits
    mask = (1 << width) - 1
    field = (bits & U32(mask)) << U32(shift)
    if unused == "UNUSED_PRESERVE":
        return (old & U32(~(mask << shift) & MASK32)) | field
    if unused == "UNUSED_SEXT":
        up = 32 - width - shift
        return ((field << U32(up)).view(I32) >> I32(up)).view(U32)
    return field


class DppControl:
    """Lane movement of a DPP operand."""

    def __init__(self, inst: Instruction) -> None:
        source = self._source_lanes(inst)
        self.index = np.clip(source, 0, WAVE_SIZE - 1)
        self.valid = (source >= 0) & (source < WAVE_SIZE)
        rows, banks = inst.int_modifier("row_mask", 15), inst.int_modifier("bank_mask", 15)
        self.enabled = ((rows >> (LANES >> 4)) & (banks >> ((LANES >> 2) & 3)) & 1).astype(bool)
        self.zero_fill = "bound_ctrl" in inst.modifiers
        self.simple = bool(self.valid.all() and self.enabled.all())

    @staticmethod
    def _source_lanes(inst: Instruction) -> np.ndarray:
        """Lane read by every lane; -1 where the source is invalid."""
        row, position = LANES & ~15, LANES & 15
        for key, value in inst.modifiers.items():
            if key == "quad_perm":
                quad = np.array([int(v) for v in value.strip("[]").split(",")])
                return (LANES & ~3) + quad[LANES & 3]
            if key == "row_shl":
                return np.where(position + int(value) < 16, LANES + int(value), -1)
            if key == "row_shr":
                return np.where(position >= int(value), LANES - int(value), -1)
            if key == "row_ror":
                return row + ((position - int(value)) & 15)
            if key == "row_mirror":
                return row + 15 - position
            if key == "row_half_mirror":
                return (LANES & ~7) + 7 - (LANES & 7)
            if key == "row_newbcast":
                return row + int(value)
            if key == "row_bcast" and value == "15":
                return np.where(LANES >= 16, row - 1, -1)
            if key == "row_bcast" and value == "31":
                return np.where(LANES >= 32, 31, -1)
            if key == "wave_shl":
                return np.where(LANES < 63, LANES + 1, -1)
            if key == "wave_shr":
                return LANES - 1
            if key == "wave_rol":
                return (LANES + 1) & 63
            if key == "wave_ror":
                return (LANES - 1) & 63
        raise EmuError(f"unknown DPP control in {inst}")

    def fetch(self, w: Wave, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Moved bits and the lanes that may be written (None: all)."""
        index = self.index if w.n == 1 else np.tile(self.index, w.n) + w.lane_base
        moved = bits[index]
        if self.simple and w.active is None:
            return moved, None
        valid, enabled = np.tile(self.valid, w.n), np.tile(self.enabled, w.n)
        if w.active is not None:
            valid = valid & w.active[index]
        if self.zero_fill:
            return np.where(valid, moved, U32(0)), enabled
        return moved, enabled & valid


def sdwa_source(inst: Instruction, op: Operand, code: str, position: int) -> Reader:
    selector = inst.modifiers.get(f"src{position}_sel", "DWORD")
    raw = read_raw(op, code if WIDTHS[code] < 64 else "u")
    return lambda w: apply_sign(as_type(sdwa_select(raw(w), selector, op.sext), code), op, code)


def source_reader(
    inst: Instruction, op: Operand, code: str, position: int, encoding: str
) -> Reader:
    """Reader of source `position` with SDWA selection, op_sel and sign modifiers."""
    if encoding == "sdwa":
        return sdwa_source(inst, op, code, position)
    if WIDTHS[code] == 16 and inst.list_modifier("op_sel", 4, 0)[position]:
        raw = read_raw(op, code)
        return lambda w: apply_sign(as_type(raw(w) >> U32(16), code), op, code)
    return read_typed(op, code)


def output_modifiers(inst: Instruction, code: str) -> Callable[[Any], Any] | None:
    """omod (mul:2, mul:4, div:2) and float clamp."""
    factor = float(inst.modifiers.get("mul", 1)) / float(inst.modifiers.get("div", 1))
    clamp = "clamp" in inst.modifiers and code in FLOAT_CODES
    if factor == 1 and not clamp:
        return None
    kind = DTYPES[code]

    def apply(x: Any) -> Any:
        x = np.asarray(x).astype(kind, copy=False) * kind(factor)
        return np.where(np.isnan(x), kind(0), np.clip(x, kind(0), kind(1))) if clamp else x

    return apply


def saturate(fn: Callable[..., Any], code: str) -> Callable[..., Any]:
    info = np.iinfo(DTYPES[code])
    return lambda *args: np.clip(fn(*(a.astype(I64) for a in args)), info.min, info.max)


def result_writer(
    inst: Instruction, dst: int, code: str, encoding: str, name: str, sources: int
) -> Callable[[Wave, np.ndarray, np.ndarray | None], None]:
    """Closure storing raw result bits with SDWA or op_sel placement."""
    if WIDTHS[code] == 64:
        return lambda w, bits, lanes: w.write64(dst, bits)
    if encoding == "sdwa":
        selector = inst.modifiers.get("dst_sel", "DWORD")
        unused = inst.modifiers.get("dst_unused", "UNUSED_PAD")
        if selector != "DWORD":
            return lambda w, bits, lanes: w.write(
                dst, sdwa_merge(w.rows[dst], bits, selector, unused), lanes
            )
    elif WIDTHS[code] == 16:
        if inst.list_modifier("op_sel", sources + 1, 0)[sources]:
            return lambda w, bits, lanes: w.write(
                dst, (w.rows[dst] & U32(0xFFFF)) | (bits << U32(16)), lanes
            )
        if name in PRESERVE_HIGH:
            return lambda w, bits, lanes: w.write(
                dst, (w.rows[dst] & U32(0xFFFF0000)) | bits, lanes
            )
    return lambda w, bits, lanes: w.write(dst, bits, lanes)


def refuse_clamped_overflow(store: Callable[..., None]) -> Callable[..., None]:
    """MODE.FP16_OVFL also clamps float16 arithmetic; refuse to guess when that would matter."""

    def checked(w: Wave, bits: np.ndarray, lanes: np.ndarray | None) -> None:
        if w.overflow_clamps and np.any((bits & U32(0x7FFF)) == 0x7C00):
            raise EmuError("infinite float16 result with MODE.FP16_OVFL set")
        store(w, bits, lanes)

    return checked
