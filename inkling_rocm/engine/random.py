"""Counter-based randomness: a number is a hash of what it is for, not of what was drawn before.

A sampled token is a function of (seed, position, logits), so it does not depend on the batch, on
preemption or on the order of requests. The mixing function is splitmix64's finaliser (Steele, Lea,
Flood 2014), computed in int64, whose products wrap like uint64's.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_DRAFT = 0xD1B54A32D192ED03


def signed64(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> int:
    """The key of one token of one sequence, as a signed 64-bit number."""
    return signed64(_mix(_mix(seed + _STEP) + (position + 1) * _STEP))


def draft_seed(seed: int) -> int:
    """The seed of a sequence's draft tokens, where these must not depend on its own noise."""
    return signed64(_mix((seed ^ _DRAFT) + _STEP))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys_n: Tensor, counters_nm: Tensor, *, stream: int) -> Tensor:
    """Uniform numbers in (0, 1), one for each counter; arguments and result as of `gumbel`."""
    x = (counters_nm + 1) * signed64(_STEP) + (keys_n[:, None] ^ signed64(_mix(stream)))
    for bits, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ _shift_right(x, bits)) * signed64(factor)
    x = x ^ _shift_right(x, 31)
    return (_shift_right(x, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbel(keys_n: Tensor, counters_nm: Tensor, *, stream: int) -> Tensor:
    """Standard Gumbel numbers, one for each counter.

    Args:    keys_n: int64 [n], row keys. counters_nm: int64 [n, m] or [m]. stream: separates uses
                 of the same key.
    Returns: float64 [n, m]; each is a function of its row's key, its counter and stream alone.
    """
    return -torch.log(-torch.log(uniform(keys_n, counters_nm, stream=stream)))
