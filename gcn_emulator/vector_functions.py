"""Functions behind the vector ALU table that do not fit a lambda; all work on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .formats import (
    F16,
    F32,
    F64,
    I8,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    bf16_to_f32,
)

Array = np.ndarray
TINY = F32(2.0**-126)


def flush(x: Array) -> Array:
    """Denormal float32 -> signed zero (the transcendental unit does not handle denormals)."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)


def transcendental(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Evaluate in float64, round once, flush denormals on both sides."""
    return lambda a: flush(fn(flush(a).astype(F64)).astype(F32))


def fma32(a: Array, b: Array, c: Array) -> Array:
    """float32 fused multiply-add with a single rounding."""
    product = a.astype(F64) * b.astype(F64)  # exact
    addend = c.astype(F64)
    total = product + addend
    ambiguous = (total.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    if ambiguous.any():  # exactly between two float32 values: did the addition round?
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        away = np.where(error > 0, np.inf, -np.inf)
        nudge = ambiguous & (error != 0) & np.isfinite(total)
        total = np.where(nudge, np.nextafter(total, away), total)
    return total.astype(F32)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """float64 fused multiply-add through error-free transformations."""
    product = a * b
    split = F64(134217729.0)
    ah, bh = a * split, b * split
    ah, bh = ah - (ah - a), bh - (bh - b)
    al, bl = a - ah, b - bh
    low = ((ah * bh - product) + ah * bl + al * bh) + al * bl
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    return np.where(np.isfinite(total) & np.isfinite(low), total + (error + low), a * b + c)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """float16 fused multiply-add."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16)


def median3(a: Array, b: Array, c: Array) -> Array:
    """Median for integers."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def median3_float(a: Array, b: Array, c: Array) -> Array:
    """Median for floats; the minimum if any input is NaN."""
    least = np.fmin(np.fmin(a, b), c)
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, middle)


def u24(a: Array) -> Array:
    """Low 24 bits, unsigned."""
    return a & U32(0xFFFFFF)


def i24(a: Array) -> Array:
    """Low 24 bits, sign-extended."""
    return (a << I32(8)) >> I32(8)


def bit_field_unsigned(a: Array, offset: Array, width: Array) -> Array:
    """v_bfe_u32."""
    width = width & U32(31)
    return (a >> (offset & U32(31))) & ((U32(1) << width) - U32(1))


def bit_field_signed(a: Array, offset: Array, width: Array) -> Array:
    """v_bfe_i32."""
    width = width & U32(31)
    field = bit_field_unsigned(a, offset, width)
    negative = (width != 0) & (((field >> ((width - U32(1)) & U32(31))) & U32(1)) != 0)
    return np.where(negative, field | ~((U32(1) << width) - U32(1)), field)


def reverse_bits(a: Array) -> Array:
    """v_bfrev_b32."""
    bits = np.unpackbits(np.ascontiguousarray(a).view(U8), bitorder="little")
    return np.packbits(bits).view(">u4").astype(U32)


def byte_permute(a: Array, b: Array, selector: Array) -> Array:
    """v_perm_b32: every selector byte picks a byte of {a, b}, a sign fill, 0x00 or 0xff."""
    octets = np.stack([b, a], 1).view(U8)
    choice = np.ascontiguousarray(selector).view(U8).reshape(-1, 4)
    out = np.take_along_axis(octets, choice & 7, 1)
    if (choice >= 8).any():
        fill = np.take_along_axis(octets, 2 * (choice & 3) + 1, 1) >> 7
        out = np.where(choice >= 8, fill * U8(255), out)
        out = np.where(choice == 12, U8(0), np.where(choice >= 13, U8(255), out))
    return np.ascontiguousarray(out).view(U32)[:, 0]


def leading_zeros(a: Array) -> Array:
    """v_ffbh_u32: zeros above the highest set bit, all ones for 0."""
    exponent = np.frexp(a.astype(F64))[1]
    return np.where(a == 0, -1, 32 - exponent).astype(I64).astype(U32)


def trailing_zeros(a: Array) -> Array:
    """v_ffbl_b32: zeros below the lowest set bit, all ones for 0."""
    exponent = np.frexp((a & (~a + U32(1))).astype(F64))[1]
    return np.where(a == 0, -1, exponent - 1).astype(I64).astype(U32)


def leading_sign(a: Array) -> Array:
    """v_ffbh_i32: bits equal to the sign bit at the top, all ones for 0 and -1."""
    return leading_zeros(np.where(a < 0, ~a, a).view(U32))


def popcount(a: Array) -> Array:
    """Number of set bits of every lane."""
    return np.unpackbits(np.ascontiguousarray(a).view(U8)).reshape(-1, 32).sum(1).astype(U32)


def to_int(dtype: Any) -> Callable[[Array], Array]:
    """Float -> integer: truncate, saturate, NaN becomes 0."""
    info = np.iinfo(dtype)

    def convert(a: Array) -> Array:
        wide = np.nan_to_num(np.trunc(a.astype(F64)), posinf=2.0**62, neginf=-(2.0**62))
        return np.clip(wide, info.min, info.max).astype(I64).astype(dtype)

    return convert


def sad_bytes(a: Array, b: Array) -> Array:
    """Sum of absolute differences of four bytes."""
    octets = [np.ascontiguousarray(x).view(U8).reshape(-1, 4).astype(I32) for x in (a, b)]
    return np.abs(octets[0] - octets[1]).sum(1).astype(U32)


def halves(a: Array, dtype: Any) -> Array:
    """uint32[64] -> dtype[64, 2]."""
    return np.ascontiguousarray(a).view(dtype).reshape(-1, 2)


def dot2_f16(a: Array, b: Array, c: Array) -> Array:
    """v_dot2_f32_f16."""
    return ((halves(a, F16).astype(F64) * halves(b, F16)).sum(1) + c).astype(F32)


def dot2_bf16(a: Array, b: Array, c: Array) -> Array:
    """v_dot2_f32_bf16."""
    product = bf16_to_f32(halves(a, U16)).astype(F64) * bf16_to_f32(halves(b, U16))
    return (product.sum(1) + c).astype(F32)


def dot4_i8(a: Array, b: Array, c: Array) -> Array:
    """v_dot4_i32_i8."""
    x, y = (np.ascontiguousarray(v).view(I8).reshape(-1, 4).astype(I32) for v in (a, b))
    return (x * y).sum(1).astype(I32) + c


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """v_div_fixup: restore sign and special cases of a division."""
    kind = quotient.dtype.type
    sign = np.where(np.signbit(numerator) ^ np.signbit(denominator), kind(-1), kind(1))
    n_inf, d_inf = np.isinf(numerator), np.isinf(denominator)
    n_zero, d_zero = numerator == 0, denominator == 0
    # a NaN quotient of ordinary operands can only come from an overflowing intermediate
    out = np.where(np.isnan(quotient), kind(np.inf), np.abs(quotient)) * sign
    out = np.where((d_zero & ~n_zero) | (n_inf & ~d_inf), sign * kind(np.inf), out)
    out = np.where((d_inf & ~n_inf) | (n_zero & ~d_zero), sign * kind(0), out)
    invalid = (n_zero & d_zero) | (n_inf & d_inf) | np.isnan(numerator) | np.isnan(denominator)
    return np.where(invalid, kind(np.nan), out)


def round_shift_pack(low: int, high: int) -> Callable[[Array, Array, Array], Array]:
    """v_ashr_pk_*: shift two int32 right, saturate to a byte each and pack."""

    def pack(a: Array, b: Array, n: Array) -> Array:
        shift = (n & U32(31)).astype(I32)
        x, y = (np.clip(v >> shift, low, high).view(U32) & U32(0xFF) for v in (a, b))
        return x | (y << U32(8))

    return pack


def frexp_mantissa(a: Array) -> Array:
    """v_frexp_mant."""
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def frexp_exponent(a: Array) -> Array:
    """v_frexp_exp_i32."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


def fract32(a: Array) -> Array:
    """v_fract_f32, never 1.0."""
    return np.fmin(a - np.floor(a), F32(1 - 2.0**-24))


def shift64(n: Array) -> Array:
    return (n & U32(63)).astype(U64)


def pack_halves(low: Array, high: Array) -> Array:
    return low.astype(U32) | (high.astype(U32) << U32(16))
