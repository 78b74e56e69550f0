"""ds_* instructions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from gcn_emulator.access import (
    ADDRESS_MASK,
    Lanes,
    compress,
    load_op,
    read_stored,
    store_op,
    vgpr_address,
    write_loaded,
)
from gcn_emulator.atomics import LDS_ATOMIC, lds_atomic
from gcn_emulator.formats import LANES, U8, U16, U32, EmuError
from gcn_emulator.operands import Operand, parse_operand
from gcn_emulator.parser import Instruction
from gcn_emulator.pending import MemoryOp
from gcn_emulator.wave import Wave


def _lds_pair(inst: Instruction, match: re.Match[str], ops: list[Operand], label: str) -> MemoryOp:
    """ds_read2/ds_write2: two accesses at offset0 and offset1 in units of the element size."""
    size = int(match[3]) // 8
    unit = size * (64 if match[2] else 1)
    first, second = (inst.int_modifier(f"offset{i}") * unit for i in (0, 1))
    if match[1] == "read":
        dst, address = ops[0].index, vgpr_address(ops[1], 0)

        def complete_read(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
            where = compress(captured[0], mask)
            low = w.lds.load(w, (where + first) & ADDRESS_MASK, size, mask, label)
            high = w.lds.load(w, (where + second) & ADDRESS_MASK, size, mask, label)
            write_loaded(w, dst, np.concatenate([low, high]), mask)

        return MemoryOp("lgkm", lambda w: (address(w),), complete_read)
    address = vgpr_address(ops[0], 0)
    low_source, high_source = ops[1].index, ops[2].index

    def prepare(w: Wave) -> tuple[Any, ...]:
        stored = (read_stored(w, source, size, "") for source in (low_source, high_source))
        return address(w), *stored

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        where, low, high = (compress(c, mask) for c in captured)
        w.lds.store(w, (where + first) & ADDRESS_MASK, size, low, mask, label)
        w.lds.store(w, (where + second) & ADDRESS_MASK, size, high, mask, label)

    return MemoryOp("lgkm", prepare, complete)


def transpose_read(data: np.ndarray, bits: int) -> np.ndarray:
    """ds_read_b64_tr: words uint32[2, lanes] -> words, exchanged inside each group of 16 lanes.

    The 16 lanes of a group hold a row-major matrix of 64 / `bits` rows and 16 columns of
    `bits`-bit elements; lane c of the group receives column c.
    """
    raw = np.ascontiguousarray(data.T)
    if bits == 4:
        octets = raw.view(U8)
        nibbles = np.stack([octets & 15, octets >> 4], -1).reshape(-1, 16, 16)
        columns = np.ascontiguousarray(nibbles.transpose(0, 2, 1)).reshape(-1, 8, 2)
        out = (columns[..., 0] | (columns[..., 1] << 4)).astype(U8)
    else:
        rows = 64 // bits
        elements = raw.view(U16 if bits == 16 else U8).reshape(-1, rows, 16)
        out = np.ascontiguousarray(elements.transpose(0, 2, 1)).view(U8).reshape(-1, 8)
    return np.ascontiguousarray(np.ascontiguousarray(out).view(U32).T)


def _lds_transpose(inst: Instruction, bits: int, ops: list[Operand], label: str) -> MemoryOp:
    dst, address = ops[0].index, vgpr_address(ops[1], inst.int_modifier("offset"))

    def prepare(w: Wave) -> tuple[Any, ...]:
        if w.active is not None:
            raise EmuError("transposing LDS read with disabled lanes")
        return (address(w),)

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        data = transpose_read(w.lds.load(w, captured[0], 8, mask, label), bits)
        write_loaded(w, dst, data, None)

    return MemoryOp("lgkm", prepare, complete)


def swizzle_pattern(text: str) -> np.ndarray:
    """Source lane of every lane for a ds_swizzle offset (numeric or swizzle(...) form)."""
    match = re.fullmatch(r"swizzle\((\w+),(.*)\)", text)
    if match:
        mode, args = match[1], [a.strip('"') for a in match[2].split(",")]
        if mode == "QUAD_PERM":
            value = 0x8000 | sum(int(a) << (2 * i) for i, a in enumerate(args))
        elif mode == "SWAP":
            value = int(args[0]) << 10 | 0x1F
        elif mode == "REVERSE":
            value = (int(args[0]) - 1) << 10 | 0x1F
        elif mode == "BROADCAST":
            value = int(args[1]) << 5 | (0x1F & ~(int(args[0]) - 1))
        elif mode == "BITMASK_PERM":
            bit = {"0": 0, "1": 1 << 5, "p": 1, "i": 1 | 1 << 10}
            value = sum(bit[c] << (4 - i) for i, c in enumerate(args[0]))
        else:
            raise EmuError(f"unsupported swizzle mode {mode}")
    else:
        value = int(text, 0)
    if value & 0x8000:
        return (LANES & ~3) + np.array([(value >> (2 * i)) & 3 for i in range(4)])[LANES & 3]
    keep, force, flip = value & 31, (value >> 5) & 31, (value >> 10) & 31
    return (LANES & 32) + ((((LANES & 31) & keep) | force) ^ flip)


def _lds_lane_exchange(inst: Instruction, name: str, ops: list[Operand]) -> MemoryOp:
    """ds_bpermute, ds_permute and ds_swizzle: no LDS storage is touched."""
    dst = ops[0].index
    offset = 0 if name == "swizzle" else inst.int_modifier("offset")
    pattern = swizzle_pattern(inst.modifiers.get("offset", "0")) if name == "swizzle" else None

    def prepare(w: Wave) -> tuple[Any, ...]:
        on = True if w.active is None else w.active
        if pattern is not None:
            source = np.where(on, w.rows[ops[1].index], U32(0))
            return (source[np.tile(pattern, w.n) + w.lane_base],)
        lane = ((w.rows[ops[1].index] + U32(offset)) >> U32(2)) & U32(63)
        lane = lane + w.lane_base
        if name == "bpermute":
            return (np.where(on, w.rows[ops[2].index], U32(0))[lane],)
        out = np.zeros(w.width, U32)
        out[compress(lane, w.active)] = compress(w.rows[ops[2].index], w.active)
        return (out,)

    def complete(w: Wave, captured: tuple[Any, ...], mask: Lanes | None) -> None:
        write_loaded(w, dst, compress(captured[0], mask)[None], mask)

    return MemoryOp("lgkm", prepare, complete)


def decode_lds(inst: Instruction, label: str) -> MemoryOp:
    """ds_* instructions."""
    name = inst.mnemonic[3:]
    ops = [parse_operand(o) for o in inst.operands]
    if name in ("bpermute_b32", "permute_b32", "swizzle_b32"):
        return _lds_lane_exchange(inst, name[:-4], ops)
    if match := re.fullmatch(r"read_b64_tr_b(16|8|4)", name):
        return _lds_transpose(inst, int(match[1]), ops, label)
    if match := re.fullmatch(r"(read|write)2(st64)?_b(32|64)", name):
        return _lds_pair(inst, match, ops, label)
    if match := re.fullmatch(r"read_(b32|b64|b96|b128|[ui](?:8|16)(?:_d16)?(?:_hi)?)", name):
        address = vgpr_address(ops[1], inst.int_modifier("offset"))

        def fetch(w: Wave, where: np.ndarray, size: int, mask: Lanes | None) -> np.ndarray:
            return w.lds.load(w, where, size, mask, label)

        return load_op("lgkm", match[1], ops[0].index, address, fetch)
    if match := re.fullmatch(r"write_(b(?:32|64|96|128)|b(?:8|16)(?:_d16_hi)?)", name):
        address = vgpr_address(ops[0], inst.int_modifier("offset"))

        def put(
            w: Wave, where: np.ndarray, size: int, data: np.ndarray, mask: Lanes | None
        ) -> None:
            w.lds.store(w, where, size, data, mask, label)

        return store_op("lgkm", match[1], ops[1].index, address, put)
    if match := LDS_ATOMIC.fullmatch(name):
        return lds_atomic(inst, match, ops)
    raise EmuError(f"unsupported instruction {inst}")
