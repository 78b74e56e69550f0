"""Definitions of vector instructions in plain Python, shared by their tests."""

import math
from fractions import Fraction

from harness import (
    M32,
    same_float,
    signed,
)

INF, NAN = float("inf"), float("nan")


def lanes(row):
    return [int(x) for x in row]


def check(got, want, kind="u"):
    for lane, (g, x) in enumerate(zip(lanes(got), want, strict=True)):
        ok = same_float(g, x, kind) if kind in "fhF" else g == x & M32
        assert ok, f"lane {lane}: got {g:#x}, want {x & M32:#x}"


def field(a, offset, width, sign):
    offset, width = offset % 32, width % 32
    bits = (a >> offset) % (1 << width) if width else 0
    return signed(bits, width) if sign and width else bits


def s24(a):
    return signed(a, 24)


def u24(a):
    return a % (1 << 24)


def bits_below(a):
    return next((i for i in range(32) if a >> i & 1), -1)


def bits_above(a):
    return next((i for i in range(32) if a >> (31 - i) & 1), -1)


def perm(a, b, s):
    octets = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    out = []
    for x in s.to_bytes(4, "little"):
        if x < 8:
            out.append(octets[x])
        elif x < 12:
            out.append(0xFF * (octets[2 * (x - 8) + 1] >> 7))
        else:
            out.append(0 if x == 12 else 0xFF)
    return int.from_bytes(bytes(out), "little")


def clip(x, low, high):
    return max(low, min(high, x))


def sad(a, b):
    return sum(
        abs(x - y) for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=False)
    )


def dot4(a, b):
    pair = zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"), strict=True)
    return sum(signed(x, 8) * signed(y, 8) for x, y in pair)


S, L16 = signed, 0xFFFF


def guarded(fn):
    """Evaluate on floats exactly where possible: finite -> Fraction, else float rules."""

    def inner(*args):
        if all(math.isfinite(x) for x in args):
            result = fn(*map(Fraction, args))
            return result if result else fn(*args)
        return fn(*args)

    return inner


def fmax(*args):
    kept = [x for x in args if x == x]
    return max(kept) if kept else NAN


def fmin(*args):
    kept = [x for x in args if x == x]
    return min(kept) if kept else NAN


def med3(a, b, c):
    return fmin(a, b, c) if any(x != x for x in (a, b, c)) else sorted((a, b, c))[1]


def rounding(fn):
    return lambda x: x if not math.isfinite(x) else float(fn(x))
