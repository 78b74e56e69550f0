"""Matrix instructions v_mfma_* and v_mfma_scale_*.

Layouts (lane l, M = rows = columns of one block, G = 64 / (M * blocks) lane groups along k):
  A: lane l holds row l % M, B: lane l holds column l % M; group (l // M) % G holds k values
     [g * K/G, (g + 1) * K/G), and with several blocks lane l belongs to block l // M.
  C/D: lane l holds column l % M; register r of a block holds row 8 * (r // 4) + 4 * (l // 32)
     + r % 4 for M = 32, row 4 * (l // 16) + r for M = 16, and row r for M = 4.
  8-bit operands of the f8f6f4 instructions hold two runs of 16 k values that are K/2 apart.
  f64 16x16x4: register pair r of lane l holds row 4 * r + l // 16.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gcn_emulator.formats import (
    F16,
    F32,
    F64,
    FP4,
    FP8,
    I8,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    WAVE_SIZE,
    EmuError,
    fp8_kinds,
)
from gcn_emulator.operands import Operand, parse_operand, read_raw
from gcn_emulator.parser import Instruction
from gcn_emulator.wave import Action, Wave

_NAME = re.compile(r"v_mfma_(scale_)?(f32|i32|f64)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w+)")
_F8F6F4 = {0: "e4m3", 1: "e5m2", 4: "fp4"}
_BITS = {"f32": 32, "xf32": 32, "f16": 16, "bf16": 16, "bf16_1k": 16, "i8": 8, "fp4": 4}

Decoder = Callable[[np.ndarray], np.ndarray]


def element_decoder(kind: str) -> Decoder:
    """uint32[registers, lanes] -> float32[lanes, elements per lane] (i8 is exact in float32)."""

    def lanes_first(regs: np.ndarray, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(regs.T).view(dtype)

    if kind in ("f32", "xf32"):
        return lambda regs: lanes_first(regs, F32)
    if kind == "f16":
        return lambda regs: lanes_first(regs, F16).astype(F32)
    if kind in ("bf16", "bf16_1k"):
        return lambda regs: (lanes_first(regs, U16).astype(U32) << U32(16)).view(F32)
    if kind == "i8":
        return lambda regs: lanes_first(regs, I8).astype(F32)
    if kind == "fp4":

        def fp4(regs: np.ndarray) -> np.ndarray:
            octets = lanes_first(regs, U8)
            return FP4[np.stack([octets & 15, octets >> 4], -1).reshape(regs.shape[1], -1)]

        return fp4
    table = FP8[kind]
    return lambda regs: table[lanes_first(regs, U8)]


def _to_registers(product: np.ndarray) -> np.ndarray:
    """[waves, blocks, rows, columns] -> [registers, waves * 64] as destinations hold it."""
    waves, blocks, m, _ = product.shape
    if m == 32:
        parts = product.reshape(waves, blocks, 4, 2, 4, 32).transpose(1, 2, 4, 0, 3, 5)
    elif m == 16:
        parts = product.reshape(waves, blocks, 4, 4, 16).transpose(1, 3, 0, 2, 4)
    else:
        parts = product.transpose(2, 0, 1, 3)
    return parts.reshape(-1, waves * WAVE_SIZE)


def _accumulator(op: Operand, count: int, dtype: type) -> Callable[[Wave], np.ndarray]:
    if op.kind == "v":
        return lambda w: w.vgprs[op.index : op.index + count].view(dtype)
    constant: np.ndarray = np.full((1, 1), op.constant_bits(32), U32).view(dtype)
    return lambda w: constant


def _decode_f64(ops: list[Operand]) -> Action:
    d, a, b, c = ops

    def wide(w: Wave, index: int) -> np.ndarray:
        return (w.rows[index] | (w.rows[index + 1].astype(U64) << U64(32))).view(F64)

    def execute(w: Wave) -> None:
        left = wide(w, a.index).reshape(w.n, 4, 16).transpose(0, 2, 1)
        product = left @ wide(w, b.index).reshape(w.n, 4, 16)
        results = []
        for r in range(4):
            acc = wide(w, c.index + 2 * r) if c.kind == "v" else F64(c.value)
            rows = product[:, 4 * r : 4 * r + 4].reshape(w.width)
            results.append((rows + acc).view(U64))
        for r, bits in enumerate(results):
            w.rows[d.index + 2 * r][:] = (bits & U64(0xFFFFFFFF)).astype(U32)
            w.rows[d.index + 2 * r + 1][:] = (bits >> U64(32)).astype(U32)

    return execute


def _operand_kinds(inst: Instruction, kind: str, arch: str) -> tuple[str, str]:
    if kind == "f8f6f4":
        codes = inst.int_modifier("cbsz"), inst.int_modifier("blgp")
        for code in codes:
            if code not in _F8F6F4:
                raise EmuError(f"6-bit matrix format {code}")
        return _F8F6F4[codes[0]], _F8F6F4[codes[1]]
    if re.fullmatch(r"[bf]f?p?8_[bf]f?p?8", kind):
        first, second = kind.split("_")
        return fp8_kinds(arch)[first], fp8_kinds(arch)[second]
    if kind not in _BITS:
        raise EmuError(f"unsupported matrix element type {kind}")
    return kind, kind


def decode_mfma(inst: Instruction, arch: str) -> Action:
    """Decode a matrix instruction."""
    match = _NAME.fullmatch(inst.mnemonic.removesuffix("_e64"))
    if not match:
        raise EmuError(f"unsupported instruction {inst}")
    scaled, out_type, kind = match[1], match[2], match[7]
    m, n, k = (int(match[i]) for i in (3, 4, 5))
    blocks = int(match[6] or 1)
    ops = [parse_operand(o) for o in inst.operands]
    if any(o.neg or o.abs for o in ops) or "neg_lo" in inst.modifiers:
        raise EmuError(f"unsupported modifiers in {inst}")
    if out_type == "f64":
        if (m, n, k, blocks) != (16, 16, 4, 1) or "blgp" in inst.modifiers:
            raise EmuError(f"unsupported instruction {inst}")
        return _decode_f64(ops)
    if m != n or m not in (4, 16, 32) or 64 % (m * blocks):
        raise EmuError(f"unsupported instruction {inst}")
    is_f8f6f4 = kind == "f8f6f4"
    if not is_f8f6f4 and "blgp" in inst.modifiers:
        raise EmuError(f"blgp in {inst}")
    kind_a, kind_b = _operand_kinds(inst, kind, arch)
    groups = 64 // (m * blocks)
    per_lane = k // groups
    size_a, size_b = (per_lane * _BITS.get(x, 8) // 32 for x in (kind_a, kind_b))
    decode_a, decode_b = element_decoder(kind_a), element_decoder(kind_b)
    d, a, b = (o.index for o in ops[:3])
    count = m * m * blocks // 64
    integer = out_type == "i32"
    acc = _accumulator(ops[3], count, I32 if integer else F32)
    source_block = np.arange(blocks)
    if "cbsz" in inst.modifiers and not is_f8f6f4:
        span = 1 << inst.int_modifier("cbsz")  # broadcast one A block to a span of blocks
        source_block = source_block // span * span + inst.int_modifier("abid")
    scale_a = scale_b = None
    if scaled:
        low, high = inst.list_modifier("op_sel", 2, 0), inst.list_modifier("op_sel_hi", 2, 0)
        scale_a = _scale_reader(ops[4], low[0] + 2 * high[0], groups, m)
        scale_b = _scale_reader(ops[5], low[1] + 2 * high[1], groups, m)

    def matrix(values: np.ndarray, element: str) -> np.ndarray:
        """[lanes, per_lane] -> [wave, block, row, group, per_lane] in k order."""
        x = values.reshape(-1, blocks, groups, m, per_lane).transpose(0, 1, 3, 2, 4)
        if is_f8f6f4 and element != "fp4":
            halves = x.reshape(-1, blocks, m, groups, 2, 16).transpose(0, 1, 2, 4, 3, 5)
            x = halves.reshape(-1, blocks, m, groups, 32)
        return x

    broadcasts_block = bool((source_block != np.arange(blocks)).any())

    def execute(w: Wave) -> None:
        x = matrix(decode_a(w.vgprs[a : a + size_a]), kind_a)
        y = matrix(decode_b(w.vgprs[b : b + size_b]), kind_b)
        if scale_a is not None and scale_b is not None:
            x, y = x * scale_a(w), y * scale_b(w)
        x, y = x.reshape(w.n, blocks, m, k), y.reshape(w.n, blocks, m, k)
        if broadcasts_block:
            x = x[:, source_block]
        out = _to_registers(x @ y.swapaxes(2, 3))
        if integer:
            result = (out.astype(I64) + acc(w)).astype(I32)
        else:
            result = out + acc(w)
        w.vgprs[d : d + count] = result.view(U32)

    return execute


def _scale_reader(op: Operand, byte: int, groups: int, m: int) -> Callable[[Wave], np.ndarray]:
    """Block scales 2**(e - 127): float32[wave, 1, row, group, 1] from one byte of each lane."""
    raw = read_raw(op, "u")

    def read(w: Wave) -> np.ndarray:
        exponent = ((raw(w) >> U32(8 * byte)) & U32(255)).astype(I32) - 127
        scale = np.exp2(exponent.astype(F32)).reshape(w.n, groups, m).swapaxes(1, 2)
        return scale[:, None, :, :, None]

    return read
