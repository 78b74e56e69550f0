"""Moving data between registers and memory; shared by every memory instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gcn_emulator.formats import I8, I16, I32, I64, U8, U16, U32, EmuError
from gcn_emulator.operands import M0, Operand
from gcn_emulator.parser import Instruction
from gcn_emulator.pending import MemoryOp
from gcn_emulator.scalars import per_lane
from gcn_emulator.wave import Wave

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
    """Keep the active lanes (last axis)."""
    return values if mask is None else values[..., mask]


def write_loaded(
    wave: Wave, index: int, data: np.ndarray, mask: Lanes | None, base: str = "", half: str = ""
) -> None:
    """Write loaded words of the active lanes to registers, sign-extending as `base` says."""
    if base in ("sbyte", "i8"):
        data = data.astype(U8).view(I8).astype(I32).view(U32)
    elif base in ("sshort", "i16"):
        data = data.astype(U16).view(I16).astype(I32).view(U32)
    if half:  # the other half keeps what it holds when the data arrives
        old = compress(wave.rows[index], mask)
        if half == "lo":
            data = (old & U32(0xFFFF0000)) | (data & U32(0xFFFF))
        else:
            data = (old & U32(0xFFFF)) | (data << U32(16))
    if mask is None:
        wave.vgprs[index : index + len(data)] = data
    else:
        wave.vgprs[index : index + len(data), mask] = data


def read_stored(wave: Wave, index: int, size: int, half: str) -> np.ndarray:
    """Registers to be stored -> uint32[words, lanes], a copy that survives later writes."""
    data = wave.vgprs[index : index + max(size // 4, 1)]
    return data >> U32(16) if half == "hi" else data.copy()


Address = Callable[[Wave], np.ndarray]
Fetch = Callable[[Wave, np.ndarray, int, "Lanes | None"], np.ndarray]
Put = Callable[[Wave, np.ndarray, int, np.ndarray, "Lanes | None"], None]


ADDRESS_MASK = I64(0xFFFFFFFF)


def vgpr_address(op: Operand, offset: int) -> Address:
    """LDS byte addresses: a vector register plus a constant, modulo 2^32."""
    return lambda w: (w.rows[op.index].astype(I64) + offset) & ADDRESS_MASK


def load_op(counter: str, kind: str, dst: int, address: Address, fetch: Fetch) -> MemoryOp:
    """A vector load; `address` may have extra leading axes that `fetch` understands.

    `fetch` and `put` get the addresses of the active lanes, and the mask that selected them.
    """
    base, size, half = type_size(kind)

    def prepare(w: Wave) -> tuple[Any, ...]:
        return (address(w),)

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        data = fetch(w, compress(captured[0], mask), size, mask)
        write_loaded(w, dst, data, mask, base, half)

    return MemoryOp(counter, prepare, complete)


def store_op(counter: str, kind: str, source: int, address: Address, put: Put) -> MemoryOp:
    """A vector store."""
    _, size, half = type_size(kind)

    def prepare(w: Wave) -> tuple[Any, ...]:
        return address(w), read_stored(w, source, size, half)

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        where, data = captured
        put(w, compress(where, mask), size, compress(data, mask), mask)

    return MemoryOp(counter, prepare, complete)


# Triton sets M0 to 0x7fffffff in waves whose direct-to-LDS loads must be dropped.
LDS_DISCARD = 0x40000000


def load_to_lds_op(
    inst: Instruction, kind: str, address: Address, fetch: Fetch, label: str
) -> MemoryOp:
    """A load that writes LDS at M0 + offset + lane * size instead of registers."""
    _, size, _ = type_size(kind)
    offset = inst.int_modifier("offset")

    def prepare(w: Wave) -> tuple[Any, ...]:
        return address(w), per_lane(w.read_sgpr(M0), I64) + offset + (w.lane & 63) * size

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        where, target = captured
        kept = target < LDS_DISCARD
        data = fetch(w, compress(where, mask), size, mask)
        if mask is not None:
            data, kept_active = data[:, kept[mask]], kept & mask
        else:
            data, kept_active = data[:, kept], kept
        w.lds.store(w, target[kept_active], size, data, kept_active, label)

    return MemoryOp("vm", prepare, complete)
