"""Operand parsing and the closures that read operands from a wave."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gcn_emulator.formats import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    MASK32,
    MASK64,
    U16,
    U32,
    U64,
    EmuError,
    float_bits,
)
from gcn_emulator.scalars import Scalar, per_lane

if TYPE_CHECKING:
    from gcn_emulator.wave import Wave

VCC, M0, EXEC = 106, 124, 126
AGPR_BASE = 256
_SPECIAL = {
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1),
    "flat_scratch": (102, 2),
    "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
    "xnack_mask": (104, 2),
}
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_FLOAT = re.compile(r"-?\d+\.\d+(e[-+]?\d+)?")

# Type codes used by the instruction tables.
#   u i f  32-bit unsigned / signed / float      U I F  the 64-bit ones
#   w s h  16-bit unsigned / signed / float (low half of a register unless op_sel says high)
DTYPES: dict[str, Any] = {
    "u": U32,
    "i": I32,
    "f": F32,
    "U": U64,
    "I": I64,
    "F": F64,
    "w": U16,
    "s": I16,
    "h": F16,
}
FLOAT_CODES = "fFh"
WIDTHS = {"u": 32, "i": 32, "f": 32, "U": 64, "I": 64, "F": 64, "w": 16, "s": 16, "h": 16}

Reader = Callable[["Wave"], np.ndarray]


@dataclass(frozen=True, slots=True)
class Operand:
    """kind: 'v' vector register (AGPRs from index 256), 's' scalar, 'c' constant, 'off', 'scc'."""

    text: str
    kind: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    is_float: bool = False
    neg: bool = False
    abs: bool = False
    sext: bool = False

    def constant_bits(self, width: int, is_float_op: bool = False) -> int:
        """Bit pattern of a constant when read as a `width`-bit operand."""
        if self.is_float:
            return float_bits(float(self.value), width)
        value = int(self.value)
        if width == 64 and is_float_op and "0x" in self.text:
            return (value & MASK32) << 32  # a literal supplies the high half of a double
        return value & ((1 << width) - 1)


@lru_cache(65536)
def parse_operand(text: str) -> Operand:
    """Parse one source or destination operand."""
    original, neg, absolute, sext = text, False, False, False
    if re.match(r"-(\||[vsa]\d|[vsa]\[|abs|vcc|exec|m0)", text):
        neg, text = True, text[1:]
    if text.startswith("neg("):
        neg, text = True, text[4:-1]
    if text.startswith("sext("):
        sext, text = True, text[5:-1]
    if text.startswith("abs("):
        absolute, text = True, text[4:-1]
    elif text.startswith("|"):
        absolute, text = True, text[1:-1]
    signs = {"neg": neg, "abs": absolute, "sext": sext}
    match = _REGISTER.fullmatch(text)
    if match:
        low = int(match[2] or match[3])
        count = int(match[4]) - low + 1 if match[4] else 1
        kind = "s" if match[1] == "s" else "v"
        return Operand(original, kind, low + AGPR_BASE * (match[1] == "a"), count, **signs)
    if text in _SPECIAL:
        return Operand(original, "s", *_SPECIAL[text], **signs)
    if text in ("off", "scc"):
        return Operand(original, text)
    if _FLOAT.fullmatch(text):
        return Operand(original, "c", value=float(text), is_float=True, **signs)
    try:
        return Operand(original, "c", value=int(text, 0), **signs)
    except ValueError:
        raise EmuError(f"unknown operand {original!r}") from None


@lru_cache(4096)
def _filled(value: int, width: int, kind: Any) -> np.ndarray:
    out: np.ndarray = np.full(width, value, kind)
    out.setflags(write=False)
    return out


def broadcast(value: Scalar, width: int, kind: Any) -> np.ndarray:
    """A scalar value on every lane."""
    if type(value) is int:
        return _filled(value, width, kind)
    return per_lane(value, kind)


def read_raw(op: Operand, code: str) -> Reader:
    """Closure giving an operand's bits: uint64[lanes] for 64-bit codes, else uint32[lanes].

    Constants and scalar registers come as shared, read-only arrays.
    """
    index, wide = op.index, WIDTHS[code] == 64
    if op.kind == "v":
        if wide:
            return lambda w: w.rows[index] | (w.rows[index + 1].astype(U64) << U64(32))
        return lambda w: w.rows[index]
    if op.kind in ("s", "scc"):
        if wide:
            return lambda w: broadcast(w.scalar(op, 64), w.width, U64)
        return lambda w: broadcast(w.scalar(op), w.width, U32)
    if op.kind != "c":
        raise EmuError(f"operand {op.text!r} is not a vector source")
    bits = op.constant_bits(WIDTHS[code], code in FLOAT_CODES)
    if not wide and WIDTHS[code] == 16 and not op.is_float:
        bits = int(op.value) & MASK32
    if code == "I" and "0x" in op.text and bits >> 31 == 1:
        bits |= MASK64 ^ MASK32
    kind = U64 if wide else U32
    return lambda w: broadcast(bits, w.width, kind)


def as_type(bits: np.ndarray, code: str) -> np.ndarray:
    """Reinterpret raw bits as the numpy type of `code`."""
    if WIDTHS[code] == 16:
        return bits.astype(U16).view(DTYPES[code])
    return bits.view(DTYPES[code])


def to_bits(value: np.ndarray, code: str) -> np.ndarray:
    """Result of an operation -> raw register bits (uint32, or uint64 for 64-bit codes)."""
    value = np.asarray(value).astype(DTYPES[code], copy=False)
    if WIDTHS[code] == 16:
        return value.view(U16).astype(U32)
    return value.view(U64 if WIDTHS[code] == 64 else U32)


def apply_sign(value: np.ndarray, op: Operand, code: str) -> np.ndarray:
    """Apply |x| and -x; on untyped operands they act on the sign bit."""
    if code in FLOAT_CODES:
        value = np.abs(value) if op.abs else value
        return -value if op.neg else value
    top = WIDTHS[code] - 1
    kind = DTYPES[code]
    value = value & kind((1 << top) - 1) if op.abs else value
    return value ^ kind(1 << top) if op.neg else value


def read_typed(op: Operand, code: str) -> Reader:
    """Closure giving an operand as its numpy type with neg/abs applied."""
    if op.kind == "v" and not (op.neg or op.abs):
        index = op.index
        if code == "f":
            return lambda w: w.rows_f32[index]
        if code == "u":
            return lambda w: w.rows[index]
        if code == "i":
            return lambda w: w.rows_i32[index]
    raw = read_raw(op, code)
    if not (op.neg or op.abs):
        return lambda w: as_type(raw(w), code)
    return lambda w: apply_sign(as_type(raw(w), code), op, code)


def read_half(op: Operand, high: int) -> Reader:
    """Low or high 32 bits of a 64-bit operand (packed float32 instructions)."""
    if op.kind == "v":
        index = op.index + high
        return lambda w: w.rows[index]
    if op.kind == "s":
        index = op.index + high
        return lambda w: broadcast(w.read_sgpr(index), w.width, U32)
    if high:
        raise EmuError(f"high half of constant {op.text} selected")
    return read_raw(op, "u")
