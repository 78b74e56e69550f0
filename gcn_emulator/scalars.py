"""Values of scalar registers in a batch of waves.

A batch executes several waves at once, so a scalar register may hold one value for all of them or a
different one per wave:

  int        the same in every wave
  tuple      one int per wave
  LaneMask   a 64-bit lane mask of every wave, kept as bool lanes; only in aligned register pairs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gcn_emulator.formats import MASK64, U8, U64, WAVE_SIZE, bits_to_lanes


class LaneMask:
    """A 64-bit mask per wave as bool[waves * 64], lane 0 of the first wave first."""

    __slots__ = ("lanes",)

    def __init__(self, lanes: np.ndarray) -> None:
        self.lanes = lanes

    def words(self) -> tuple[int, ...]:
        """One 64-bit integer per wave."""
        return tuple(np.packbits(self.lanes, bitorder="little").view(U64).tolist())

    def nonzero(self) -> int | tuple[int, ...]:
        """1 where a wave's mask has a bit set."""
        any_lane: Any = self.lanes.reshape(-1, WAVE_SIZE).any(1)
        return uniform([int(x) for x in any_lane])


Scalar = int | tuple[int, ...] | LaneMask


def uniform(values: Sequence[int]) -> int | tuple[int, ...]:
    """Per-wave values -> a plain int if all are equal."""
    first = values[0]
    if all(v == first for v in values):
        return first
    return tuple(values)


def per_wave(value: Scalar, waves: int) -> Sequence[int]:
    """The value in each wave."""
    if isinstance(value, int):
        return (value,) * waves
    return value.words() if isinstance(value, LaneMask) else value


def map_waves(fn: Callable[..., int], *values: Scalar) -> int | tuple[int, ...]:
    """Apply a function of integers wave by wave; no LaneMask."""
    for value in values:
        if type(value) is tuple:
            waves = len(value)
            return uniform(
                [fn(*x) for x in zip(*(per_wave(v, waves) for v in values), strict=True)]
            )
    return fn(*values)


def mask_lanes(value: Scalar, waves: int) -> np.ndarray:
    """A 64-bit mask -> bool[waves * 64]; the result must not be modified."""
    if isinstance(value, LaneMask):
        return value.lanes
    if type(value) is int:
        if value == MASK64:
            return np.ones(waves * WAVE_SIZE, bool)
        return np.tile(bits_to_lanes(value), waves)
    return np.unpackbits(np.array(value, U64).view(U8), bitorder="little").view(bool)


def per_lane(value: Scalar, dtype: Any) -> Any:
    """A 32- or 64-bit scalar for use with vectors: a Python int, or one element per lane."""
    if type(value) is int:
        return value
    words = value.words() if isinstance(value, LaneMask) else value
    return np.repeat(np.array(words, U64).astype(dtype), WAVE_SIZE)


def take_waves(value: Any, waves: Sequence[int]) -> Any:
    """The part of a scalar value that belongs to some waves of a batch."""
    if type(value) is tuple:
        return uniform([value[i] for i in waves])
    if isinstance(value, LaneMask):
        lanes = value.lanes.reshape(-1, WAVE_SIZE)[list(waves)]
        return LaneMask(np.ascontiguousarray(lanes).reshape(-1))
    return value
