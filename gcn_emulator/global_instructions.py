"""buffer_*, global_*, flat_*, scratch_* and scalar loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gcn_emulator.access import (
    Address,
    Fetch,
    Lanes,
    Put,
    compress,
    load_op,
    load_to_lds_op,
    store_op,
    type_size,
)
from gcn_emulator.atomics import atomic_op, global_atomic_spec
from gcn_emulator.formats import I64, MASK64, U32, U64, EmuError
from gcn_emulator.operands import Operand, parse_operand
from gcn_emulator.parser import Instruction
from gcn_emulator.pending import MemoryOp
from gcn_emulator.scalars import LaneMask, map_waves, per_lane, per_wave, uniform
from gcn_emulator.wave import POISON_VGPR, Wave


def _global_cell(w: Wave, address: int, size: int) -> np.ndarray:
    return w.memory.cell(address, size)


def _count(w: Wave, address: np.ndarray, size: int, mask: Lanes | None, is_load: bool) -> None:
    if w.traffic:
        waves = w.lane_wave if mask is None else w.lane_wave[mask]
        for i in w.ids:
            w.traffic.global_access(address[waves == i], size, is_load)


def _global_fetch(w: Wave, address: np.ndarray, size: int, mask: Lanes | None) -> np.ndarray:
    _count(w, address, size, mask, True)
    return w.memory.load(address, size)


def _global_put(
    w: Wave, address: np.ndarray, size: int, data: np.ndarray, mask: Lanes | None
) -> None:
    _count(w, address, size, mask, False)
    if size >= 4 and (data == U32(POISON_VGPR)).any():
        raise EmuError("stores a lane of a register that nothing has written")
    w.memory.store(address, size, data)


def _buffer_location(inst: Instruction, ops: list[Operand]) -> Address:
    """Closure -> int64[2, lanes]: absolute addresses and bytes left in the buffer from there."""
    vaddr, resource, soffset = ops
    if "idxen" in inst.modifiers:
        raise EmuError("indexed buffer access")
    offset, use_vgpr, r = inst.int_modifier("offset"), "offen" in inst.modifiers, resource.index

    def locate(w: Wave) -> np.ndarray:
        if any((word >> 16) & 0x3FFF for word in per_wave(w.read_sgpr(r + 1), w.n)):
            raise EmuError("buffer descriptor with a stride")
        base = per_lane(w.read_sgpr64(r), I64) & 0xFFFFFFFFFFFF
        records = per_lane(w.read_sgpr(r + 2), I64)
        extra = per_lane(w.scalar(soffset), I64)
        out = np.empty((2, w.width), I64)
        relative = w.rows[vaddr.index].astype(I64) + offset if use_vgpr else offset
        out[0] = relative + (base + extra)
        out[1] = records - extra - relative
        return out

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


def _of_active(lanes: np.ndarray, mask: Lanes | None) -> Lanes:
    """Lanes chosen among the active ones -> a mask over all lanes."""
    if mask is None:
        return lanes
    out = mask.copy()
    out[mask] = lanes
    return out


def _buffer_fetch(w: Wave, location: np.ndarray, size: int, mask: Lanes | None) -> np.ndarray:
    """Words outside the buffer read as zero."""
    if (location[1] >= size).all():
        return _global_fetch(w, location[0].astype(U64), size, mask)
    out = np.zeros((max(size // 4, 1), location.shape[1]), U32)
    for words, lanes, part in _buffer_parts(location, size):
        address = (location[0, lanes] + 4 * (words.start or 0)).astype(U64)
        out[words, lanes] = _global_fetch(w, address, part, _of_active(lanes, mask))
    return out


def _buffer_put(
    w: Wave, location: np.ndarray, size: int, data: np.ndarray, mask: Lanes | None
) -> None:
    """Words outside the buffer are dropped."""
    for words, lanes, part in _buffer_parts(location, size):
        address = (location[0, lanes] + 4 * (words.start or 0)).astype(U64)
        _global_put(w, address, part, data[words, lanes], _of_active(lanes, mask))


def _ordered(locate: Address, size: int, atomic: bool = False) -> Address:
    """The addresses of a read, checked against stores that nothing has ordered before it."""

    def address(w: Wave) -> np.ndarray:
        where = locate(w)
        w.order.check(w, where, size, atomic)
        return where

    return address


def _load(kind: str, dst: int, locate: Address, fetch: Fetch) -> MemoryOp:
    return load_op("vm", kind, dst, _ordered(locate, type_size(kind)[1]), fetch)


def _store(kind: str, source: int, locate: Address, put: Put) -> MemoryOp:
    op = store_op("vm", kind, source, locate, put)
    op.stores = type_size(kind)[1]
    return op


def _atomic(kind: str, data: int, locate: Address, dst: int | None) -> MemoryOp:
    name, dtype, words = global_atomic_spec(kind)
    size = np.dtype(dtype).itemsize
    registers = list(range(data, data + words))
    where = _ordered(locate, size, atomic=True)
    op = atomic_op("vm", where, _global_cell, (name, dtype), registers, dst)
    op.stores, op.atomic = size, True
    return op


def decode_buffer(inst: Instruction, label: str) -> MemoryOp:
    """buffer_load / buffer_store / buffer_atomic with raw (stride 0) descriptors."""
    action, _, kind = inst.mnemonic[7:].partition("_")
    ops = [parse_operand(o) for o in inst.operands]
    if "lds" in inst.modifiers:
        location = _ordered(_buffer_location(inst, ops), type_size(kind)[1])
        return load_to_lds_op(inst, kind, location, _buffer_fetch, label)
    reg, location = ops[0].index, _buffer_location(inst, ops[1:])
    if action == "load":
        return _load(kind, reg, location, _buffer_fetch)
    if action == "store":
        return _store(kind, reg, location, _buffer_put)
    if action != "atomic":
        raise EmuError(f"unsupported instruction {inst}")
    return _atomic(kind, reg, location, reg if "sc0" in inst.modifiers else None)


def _global_address(vaddr: Operand, saddr: Operand, offset: int) -> Address:
    v, s = vaddr.index, saddr.index
    if saddr.kind == "off":
        wide = U64(offset & MASK64)
        return lambda w: (w.rows[v] | (w.rows[v + 1].astype(U64) << U64(32))) + wide
    return lambda w: (w.rows[v].astype(I64) + (per_lane(w.read_sgpr64(s), I64) + offset)).astype(
        U64
    )


def decode_global(inst: Instruction, label: str) -> MemoryOp:
    """global_* and flat_* instructions (flat addresses never mean LDS or scratch here)."""
    action, _, kind = inst.mnemonic.split("_", 1)[1].partition("_")
    ops = [parse_operand(o) for o in inst.operands]
    offset = inst.int_modifier("offset")
    if inst.mnemonic.startswith("flat_"):
        ops.append(Operand("off", "off"))
    if action == "load" and kind.startswith("lds_"):
        where = _ordered(_global_address(ops[0], ops[1], offset), type_size(kind[4:])[1])
        return load_to_lds_op(inst, kind[4:], where, _global_fetch, label)
    if action == "load":
        where = _global_address(ops[1], ops[2], offset)
        return _load(kind, ops[0].index, where, _global_fetch)
    if action == "store":
        where = _global_address(ops[0], ops[2], offset)
        return _store(kind, ops[1].index, where, _global_put)
    if action != "atomic":
        raise EmuError(f"unsupported instruction {inst}")
    dst = ops[0].index if "sc0" in inst.modifiers else None
    vaddr, vdata, saddr = ops if dst is None else ops[1:]
    return _atomic(kind, vdata.index, _global_address(vaddr, saddr, offset), dst)


def decode_scratch(inst: Instruction) -> MemoryOp:
    """scratch_* instructions: private memory of every lane (register spills)."""
    action, _, kind = inst.mnemonic[8:].partition("_")
    ops = [parse_operand(o) for o in inst.operands]
    data, vaddr = (ops[0], ops[1]) if action == "load" else (ops[1], ops[0])
    saddr, offset, size = ops[2], inst.int_modifier("offset"), type_size(kind)[1]

    def locate(w: Wave) -> np.ndarray:
        start = w.rows[vaddr.index].astype(I64) if vaddr.kind == "v" else 0 * w.lane
        start = start + offset + (per_lane(w.scalar(saddr), I64) if saddr.kind == "s" else 0)
        if np.any((start < 0) | (start + size > w.scratch_size)):
            raise EmuError(f"scratch access beyond {w.scratch_size} bytes")
        return start

    def lane_offsets(w: Wave, where: np.ndarray, mask: Lanes | None) -> np.ndarray:
        return where + compress(w.lane, mask) * w.scratch_size

    def fetch(w: Wave, where: np.ndarray, size: int, mask: Lanes | None) -> np.ndarray:
        return w.scratch.gather(lane_offsets(w, where, mask), size)

    def put(w: Wave, where: np.ndarray, size: int, values: np.ndarray, mask: Lanes | None) -> None:
        w.scratch.scatter(lane_offsets(w, where, mask), size, values)

    if action == "load":
        return load_op("vm", kind, data.index, locate, fetch)
    return store_op("vm", kind, data.index, locate, put)


def decode_scalar_load(inst: Instruction) -> MemoryOp:
    """s_load_dword* and s_buffer_load_dword*."""
    ops = [parse_operand(o) for o in inst.operands]
    width = inst.mnemonic.split("_dword")[1]
    count = int(width[1:]) if width else 1
    dst, base, offset = ops[0].index, ops[1].index, ops[2]
    extra, is_buffer = inst.int_modifier("offset"), "buffer" in inst.mnemonic

    def prepare(w: Wave) -> tuple[Any, ...]:
        start = map_waves(lambda x: (x + extra) & ~3, w.scalar(offset))
        address = w.read_sgpr64(base)
        if isinstance(address, LaneMask):
            address = address.words()
        if not is_buffer:
            return map_waves(lambda a, s: a + s, address, start), count
        left = map_waves(lambda r, s: min(max(r - s, 0) // 4, count), w.read_sgpr(base + 2), start)
        return map_waves(lambda a, s: (a & 0xFFFFFFFFFFFF) + s, address, start), left

    def load(w: Wave, address: int, readable: int) -> list[int]:
        values = [0] * count
        if readable:
            data = w.memory.load(np.array([address], U64), 4 * readable)
            values[:readable] = data[:, 0].tolist()
        return values

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        address, readable = captured
        if type(address) is int and type(readable) is int:
            for i, value in enumerate(load(w, address, readable), dst):
                w.write_sgpr(i, value)
            return
        pairs = zip(per_wave(address, w.n), per_wave(readable, w.n), strict=True)
        columns = zip(*(load(w, a, r) for a, r in pairs), strict=True)
        for i, values in enumerate(columns, dst):
            w.write_sgpr(i, uniform(values))

    return MemoryOp("lgkm", prepare, complete, in_order=False)
