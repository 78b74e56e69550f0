"""Atomics on LDS and global memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from gcn_emulator.access import Address, Lanes, compress, vgpr_address, write_loaded
from gcn_emulator.formats import F16, F32, F64, I32, I64, U32, U64, EmuError, packed_bf16_add
from gcn_emulator.operands import Operand
from gcn_emulator.parser import Instruction
from gcn_emulator.pending import MemoryOp
from gcn_emulator.wave import Wave

ATOMIC_KINDS = {
    "u32": U32, "i32": I32, "b32": U32, "f32": F32,
    "u64": U64, "i64": I64, "b64": U64, "f64": F64,
}  # fmt: skip
ATOMIC_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "sub": lambda old, x: old - x,
    "rsub": lambda old, x: x - old,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
    "swap": lambda old, x: x,
    "inc": lambda old, x: np.where(old >= x, old * 0, old + old.dtype.type(1)),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - old.dtype.type(1)),
    "pk_add_f16": lambda old, x: (old.view(F16) + x.view(F16)).view(U32),
    "pk_add_bf16": packed_bf16_add,
}
_GLOBAL_ATOMIC = re.compile(
    r"(add|sub|rsub|[su]?min|[su]?max|and|or|xor|swap|inc|dec|cmpswap|pk_add)"
    r"(?:_(f32|f64|f16|bf16))?(_x2)?"
)
LDS_ATOMIC = re.compile(
    r"(add|sub|rsub|min|max|and|or|xor|inc|dec|wrxchg|cmpst|pk_add)(_rtn)?_(\w+)"
)


def _atomic_update(cell: np.ndarray, name: str, kind: Any, x: np.ndarray) -> np.ndarray:
    """Apply one atomic to a byte view; `x` holds the data (and compare value). Returns old."""
    view = cell.view(kind)
    old = view.copy()
    if name == "cmpswap":
        new, expected = np.split(x, 2)
        if np.array_equal(old.view(U32), expected):
            view[:] = new.view(kind)
    else:
        view[:] = ATOMIC_FUNCTIONS[name](old, x.view(kind))
    return old.view(U32)


def atomic_op(
    counter: str,
    address: Address,
    cell: Callable[[Wave, int, int], np.ndarray],
    spec: tuple[str, Any],
    data_regs: list[int],
    dst: int | None,
) -> MemoryOp:
    """Shared body of LDS, global and buffer atomics; lanes are served in ascending order.

    `address` gives int64[lanes], or [2, lanes] with the bytes left in the buffer in the second row.
    """
    name, kind = spec
    words = np.dtype(kind).itemsize // 4

    def prepare(w: Wave) -> tuple[Any, ...]:
        return address(w), w.vgprs[data_regs]

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        where, data = captured
        if where.ndim == 2:
            inside = where[1] >= 4 * words
            where, mask = where[0], inside if mask is None else inside & mask
        where, data = compress(where, mask), compress(data, mask)
        old = np.zeros((words, len(where)), U32)
        for lane, location in enumerate(where.tolist()):
            x = np.ascontiguousarray(data[:, lane])
            old[:, lane] = _atomic_update(cell(w, location, 4 * words), name, kind, x)
        if dst is not None:
            write_loaded(w, dst, old, mask)

    return MemoryOp(counter, prepare, complete)


def global_atomic_spec(name: str) -> tuple[str, Any, int]:
    """'smax_x2' -> ('max', int64, data words)."""
    match = _GLOBAL_ATOMIC.fullmatch(name)
    if not match:
        raise EmuError(f"unsupported atomic {name}")
    op, ftype, wide = match.groups()
    if op == "pk_add":
        return f"pk_add_{ftype}", U32, 1
    kind: Any = {"f32": F32, "f64": F64}.get(ftype or "")
    if op[0] in "su" and op[1:] in ("min", "max"):
        kind = {"s": (I32, I64), "u": (U32, U64)}[op[0]][bool(wide)]
        op = op[1:]
    kind = kind or (U64 if wide else U32)
    words = np.dtype(kind).itemsize // 4
    return op, kind, words * (2 if op == "cmpswap" else 1)


def lds_atomic(inst: Instruction, match: re.Match[str], ops: list[Operand]) -> MemoryOp:
    op, returns, type_name = match.groups()
    if op == "pk_add":
        spec: tuple[str, Any] = (f"pk_add_{type_name}", U32)
    else:
        renamed = {"wrxchg": "swap", "cmpst": "cmpswap"}.get(op, op)
        if type_name not in ATOMIC_KINDS:
            raise EmuError(f"unsupported LDS atomic {inst.mnemonic}")
        spec = (renamed, ATOMIC_KINDS[type_name])
    words = np.dtype(spec[1]).itemsize // 4
    sources = ops[1:] if returns else ops
    address = vgpr_address(sources[0], inst.int_modifier("offset"))
    order = [sources[2], sources[1]] if spec[0] == "cmpswap" else [sources[1]]
    data = [reg for s in order for reg in range(s.index, s.index + words)]

    def cell(w: Wave, where: int, size: int) -> np.ndarray:
        return w.lds.cell(where, size)

    return atomic_op("lgkm", address, cell, spec, data, ops[0].index if returns else None)
