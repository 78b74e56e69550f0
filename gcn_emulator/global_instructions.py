"""buffer_*, global_*, flat_*, scratch_* and scalar loads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gcn_emulator.access import (
    Address,
    Lanes,
    compress,
    load_op,
    load_to_lds_op,
    store_op,
    type_size,
)
from gcn_emulator.atomics import atomic_op, global_atomic_spec
from gcn_emulator.formats import I64, LANES, MASK32, MASK64, U32, U64, EmuError
from gcn_emulator.operands import Operand, parse_operand
from gcn_emulator.parser import Instruction
from gcn_emulator.wave import MemoryOp, Wave


def _global_cell(w: Wave, address: int, size: int) -> np.ndarray:
    return w.memory.cell(address, size)


def _global_fetch(w: Wave, address: np.ndarray, size: int) -> np.ndarray:
    if w.traffic:
        w.traffic.global_access(address, size, True)
    return w.memory.load(address, size)


def _global_put(w: Wave, address: np.ndarray, size: int, data: np.ndarray) -> None:
    if w.traffic:
        w.traffic.global_access(address, size, False)
    w.memory.store(address, size, data)


def _buffer_location(inst: Instruction, ops: list[Operand]) -> Address:
    """Closure -> int64[2, 64]: absolute addresses and bytes left in the buffer from there."""
    vaddr, resource, soffset = ops
    if "idxen" in inst.modifiers:
        raise EmuError("indexed buffer access")
    offset, use_vgpr, r = inst.int_modifier("offset"), "offen" in inst.modifiers, resource.index

    def locate(w: Wave) -> np.ndarray:
        if (w.read_sgpr(r + 1) >> 16) & 0x3FFF:
            raise EmuError("buffer descriptor with a stride")
        base = w.read_sgpr64(r) & 0xFFFFFFFFFFFF
        records, extra = w.read_sgpr(r + 2), w.scalar(soffset)
        relative = offset + (w.rows[vaddr.index].astype(I64) if use_vgpr else 0 * LANES)
        return np.stack([relative + (base + extra), records - extra - relative])

    return locate


def _buffer_parts(location: np.ndarray, size: int) -> Iterator[tuple[slice, np.ndarray, int]]:
    """Accesses inside the buffer as (words, lanes, bytes): whole ones, then single words."""
    left = location[1]
    whole = left >= size
    yield slice(None), whole, size
    if size > 4 and not whole.all():
        for i in range(size // 4):
            lanes = ~whole & (left >= 4 * (i + 1))
            if lanes.any():
                yield slice(i, i + 1), lanes, 4


def _buffer_fetch(w: Wave, location: np.ndarray, size: int) -> np.ndarray:
    """Words outside the buffer read as zero."""
    out = np.zeros((max(size // 4, 1), location.shape[1]), U32)
    for words, lanes, part in _buffer_parts(location, size):
        address = (location[0, lanes] + 4 * (words.start or 0)).astype(U64)
        out[words, lanes] = _global_fetch(w, address, part)
    return out


def _buffer_put(w: Wave, location: np.ndarray, size: int, data: np.ndarray) -> None:
    """Words outside the buffer are dropped."""
    for words, lanes, part in _buffer_parts(location, size):
        address = (location[0, lanes] + 4 * (words.start or 0)).astype(U64)
        _global_put(w, address, part, data[words, lanes])


def decode_buffer(inst: Instruction) -> MemoryOp:
    """buffer_load / buffer_store / buffer_atomic with raw (stride 0) descriptors."""
    action, _, kind = inst.mnemonic[7:].partition("_")
    ops = [parse_operand(o) for o in inst.operands]
    if "lds" in inst.modifiers:
        return load_to_lds_op(inst, kind, _buffer_location(inst, ops), _buffer_fetch)
    reg, location = ops[0].index, _buffer_location(inst, ops[1:])
    if action == "load":
        return load_op("vm", kind, reg, location, _buffer_fetch)
    if action == "store":
        return store_op("vm", kind, reg, location, _buffer_put)
    if action != "atomic":
        raise EmuError(f"unsupported instruction {inst}")
    name, dtype, words = global_atomic_spec(kind)
    width = np.dtype(dtype).itemsize

    def atomic_address(w: Wave) -> tuple[np.ndarray, Lanes]:
        address, left = location(w)
        mask = left >= width
        mask = mask if w.active is None else mask & w.active
        return address[mask], mask

    dst = reg if "sc0" in inst.modifiers else None
    data = list(range(reg, reg + words))
    return atomic_op("vm", atomic_address, _global_cell, (name, dtype), data, dst)


def _global_address(vaddr: Operand, saddr: Operand, offset: int) -> Address:
    v, s = vaddr.index, saddr.index
    if saddr.kind == "off":
        wide = U64(offset & MASK64)
        return lambda w: (w.rows[v] | (w.rows[v + 1].astype(U64) << U64(32))) + wide
    return lambda w: (w.rows[v].astype(I64) + (w.read_sgpr64(s) + offset)).astype(U64)


def decode_global(inst: Instruction) -> MemoryOp:
    """global_* and flat_* instructions (flat addresses never mean LDS or scratch here)."""
    action, _, kind = inst.mnemonic.split("_", 1)[1].partition("_")
    ops = [parse_operand(o) for o in inst.operands]
    offset = inst.int_modifier("offset")
    if inst.mnemonic.startswith("flat_"):
        ops.append(Operand("off", "off"))
    if action == "load" and kind.startswith("lds_"):
        where = _global_address(ops[0], ops[1], offset)
        return load_to_lds_op(inst, kind[4:], where, _global_fetch)
    if action == "load":
        where = _global_address(ops[1], ops[2], offset)
        return load_op("vm", kind, ops[0].index, where, _global_fetch)
    if action == "store":
        where = _global_address(ops[0], ops[2], offset)
        return store_op("vm", kind, ops[1].index, where, _global_put)
    if action != "atomic":
        raise EmuError(f"unsupported instruction {inst}")
    name, dtype, words = global_atomic_spec(kind)
    dst = ops[0].index if "sc0" in inst.modifiers else None
    vaddr, vdata, saddr = ops if dst is None else ops[1:]
    where = _global_address(vaddr, saddr, offset)
    data = list(range(vdata.index, vdata.index + words))

    def atomic_address(w: Wave) -> tuple[np.ndarray, Lanes | None]:
        return compress(where(w), w.active), w.active

    return atomic_op("vm", atomic_address, _global_cell, (name, dtype), data, dst)


def decode_scratch(inst: Instruction) -> MemoryOp:
    """scratch_* instructions: private memory of every lane (register spills)."""
    action, _, kind = inst.mnemonic[8:].partition("_")
    ops = [parse_operand(o) for o in inst.operands]
    data, vaddr = (ops[0], ops[1]) if action == "load" else (ops[1], ops[0])
    saddr, offset, size = ops[2], inst.int_modifier("offset"), type_size(kind)[1]

    def locate(w: Wave) -> np.ndarray:
        start = w.rows[vaddr.index].astype(I64) if vaddr.kind == "v" else 0 * LANES
        start = start + offset + (w.scalar(saddr) if saddr.kind == "s" else 0)
        if np.any((start < 0) | (start + size > w.scratch_size)):
            raise EmuError(f"scratch access beyond {w.scratch_size} bytes")
        return start + LANES * w.scratch_size

    if action == "load":

        def fetch(w, where, size):
            return w.scratch.gather(where, size)

        return load_op("vm", kind, data.index, locate, fetch)

    def put(w, where, size, values):
        return w.scratch.scatter(where, size, values)

    return store_op("vm", kind, data.index, locate, put)


def decode_scalar_load(inst: Instruction) -> MemoryOp:
    """s_load_dword* and s_buffer_load_dword*."""
    ops = [parse_operand(o) for o in inst.operands]
    width = inst.mnemonic.split("_dword")[1]
    count = int(width[1:]) if width else 1
    dst, base, offset = ops[0].index, ops[1].index, ops[2]
    extra, is_buffer = inst.int_modifier("offset"), "buffer" in inst.mnemonic

    def prepare(w: Wave) -> tuple[int, int]:
        start = (w.scalar(offset) + extra) & ~3
        if not is_buffer:
            return w.read_sgpr64(base) + start, count
        left = max(w.read_sgpr(base + 2) - start, 0) // 4
        return (w.read_sgpr64(base) & 0xFFFFFFFFFFFF) + start, min(left, count)

    def complete(w: Wave, captured: tuple[int, int]) -> None:
        address, readable = captured
        values = [0] * count
        if readable:
            data = w.memory.load(np.array([address], U64), 4 * readable)
            values[:readable] = data[:, 0].tolist()
        for i, value in enumerate(values, dst):
            w.write_sgpr(i, value & MASK32)

    return MemoryOp("lgkm", prepare, complete, "s", dst, count, in_order=False)
