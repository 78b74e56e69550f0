"""Moving data between registers and memory; shared by every memory instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gcn_emulator.formats import I8, I16, I32, I64, LANES, U8, U16, U32, EmuError
from gcn_emulator.operands import M0, Operand
from gcn_emulator.parser import Instruction
from gcn_emulator.wave import MemoryOp, Wave

Lanes = np.ndarray

SIZES = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2,
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
    "u8": 1, "i8": 1, "b8": 1, "u16": 2, "i16": 2, "b16": 2,
    "b32": 4, "b64": 8, "b96": 12, "b128": 16,
}  # fmt: skip


def type_size(kind: str) -> tuple[str, int, str]:
    """'ubyte_d16_hi' -> ('ubyte', 1, 'hi'); the last part is '', 'lo' or 'hi'."""
    base, _, tail = kind.partition("_")
    if base not in SIZES:
        raise EmuError(f"unsupported access type {kind!r}")
    return base, SIZES[base], {"": "", "d16": "lo", "d16_hi": "hi"}[tail]


def compress(values: np.ndarray, mask: Lanes | None) -> np.ndarray:
    """Keep the active lanes (last axis); always a copy, so that it survives later writes."""
    return values.copy() if mask is None else values[..., mask]


def write_loaded(
    wave: Wave, index: int, data: np.ndarray, mask: Lanes | None, base: str, half: str, old: Any
) -> None:
    """Write loaded words of the active lanes to registers, sign-extending as `base` says."""
    if base in ("sbyte", "i8"):
        data = data.astype(U8).view(I8).astype(I32).view(U32)
    elif base in ("sshort", "i16"):
        data = data.astype(U16).view(I16).astype(I32).view(U32)
    if half == "lo":
        data = (old & U32(0xFFFF0000)) | (data & U32(0xFFFF))
    elif half == "hi":
        data = (old & U32(0xFFFF)) | (data << U32(16))
    for i, row in enumerate(data, index):
        if mask is None:
            wave.rows[i][:] = row
        else:
            wave.rows[i][mask] = row


def read_stored(wave: Wave, index: int, size: int, half: str, mask: Lanes | None) -> np.ndarray:
    """Registers to be stored -> uint32[words, active lanes]."""
    data = wave.vgprs[index : index + max(size // 4, 1)]
    return compress(data >> U32(16) if half == "hi" else data, mask)


Address = Callable[[Wave], np.ndarray]
Fetch = Callable[[Wave, np.ndarray, int], np.ndarray]
Put = Callable[[Wave, np.ndarray, int, np.ndarray], None]


def vgpr_address(op: Operand, offset: int) -> Address:
    return lambda w: w.rows[op.index].astype(I64) + offset


def load_op(counter: str, kind: str, dst: int, address: Address, fetch: Fetch) -> MemoryOp:
    """A vector load; `address` may have extra leading axes that `fetch` understands."""
    base, size, half = type_size(kind)

    def prepare(w: Wave) -> Any:
        where = compress(address(w), w.active)
        return where, w.active, compress(w.rows[dst], w.active) if half else None

    def complete(w: Wave, captured: Any) -> None:
        where, mask, old = captured
        write_loaded(w, dst, fetch(w, where, size), mask, base, half, old)

    return MemoryOp(counter, prepare, complete, "v", dst, max(size // 4, 1))


def store_op(counter: str, kind: str, source: int, address: Address, put: Put) -> MemoryOp:
    """A vector store."""
    _, size, half = type_size(kind)

    def prepare(w: Wave) -> Any:
        where = compress(address(w), w.active)
        return where, read_stored(w, source, size, half, w.active)

    return MemoryOp(counter, prepare, lambda w, c: put(w, c[0], size, c[1]))


# Triton sets M0 to 0x7fffffff in waves whose direct-to-LDS loads must be dropped.
LDS_DISCARD = 0x40000000


def load_to_lds_op(inst: Instruction, kind: str, address: Address, fetch: Fetch) -> MemoryOp:
    """A load that writes LDS at M0 + offset + lane * size instead of registers."""
    _, size, _ = type_size(kind)
    spread, label = inst.int_modifier("offset") + LANES * size, str(inst)

    def prepare(w: Wave) -> Any:
        where = compress(address(w), w.active)
        return where, compress(w.read_sgpr(M0) + spread, w.active)

    def complete(w: Wave, captured: Any) -> None:
        where, target = captured
        data, kept = fetch(w, where, size), target < LDS_DISCARD
        w.lds.store(w, target[kept], size, data[:, kept], label)

    return MemoryOp("vm", prepare, complete)
