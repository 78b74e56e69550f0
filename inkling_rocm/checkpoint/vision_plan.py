"""Widths of the hMLP vision tower.

The tower folds a patch of [temporal_patch_size, patch_size, patch_size] pixels into depth step by
step, a linear layer after each fold. The candidate grids are the cumulative products of the patch
sides' prime factors, largest factor first: space grows to the whole patch, then time. Each layer
takes one grid, such that the volumes (in log) lie as near as possible to an even spacing.
"""

from __future__ import annotations

import math
from itertools import accumulate, combinations, pairwise
from operator import mul

from inkling_rocm.config import VisionConfig


def hmlp_dims(vision: VisionConfig, hidden_size: int) -> list[tuple[int, int]]:
    """(input width, output width) of each layer; the last one's output is hidden_size."""
    channels, layers = vision.num_channels, vision.num_layers
    # (frames, pixels a side, channels) of every candidate grid.
    grids = [(1, 1, channels)]
    for side in _cumulative_factors(vision.patch_size):
        grids.append((1, side, 64 * math.ceil(side * side * channels / 64)))
    for frames in _cumulative_factors(vision.temporal_patch_size):
        grids.append((frames, vision.patch_size, 64 * vision.patch_size**2 * channels * frames))
    chosen = _choose(grids, layers, vision)
    dims = []
    for i, ((frames, side, width), (next_frames, next_side, next_width)) in enumerate(
        pairwise(chosen)
    ):
        fold = (next_frames // frames) * (next_side // side) ** 2
        dims.append((width * fold, hidden_size if i == layers - 1 else next_width))
    return dims


def _choose(
    grids: list[tuple[int, int, int]], layers: int, vision: VisionConfig
) -> list[tuple[int, int, int]]:
    volumes = [math.log(frames * side * side) for frames, side, _ in grids]
    pixels = vision.patch_size**2 * vision.temporal_patch_size * vision.num_channels
    ideals = [math.log(pixels) * i / layers for i in range(layers + 1)]
    if layers >= len(grids):  # enough layers for every grid: each takes the nearest, some twice
        picks = [min(range(len(grids)), key=lambda g: abs(ideal - volumes[g])) for ideal in ideals]
    else:  # distinct grids of least total distance; both lists ascend, so order is kept
        picks = list(
            min(
                combinations(range(len(grids)), layers + 1),
                key=lambda c: sum(abs(a - volumes[g]) for a, g in zip(ideals, c, strict=True)),
            )
        )
    picks[0], picks[-1] = 0, len(grids) - 1
    return [grids[g] for g in picks]


def _cumulative_factors(number: int) -> list[int]:
    """Running products of the prime factors, largest first: 40 -> 5, 10, 20, 40."""
    factors, p = [], 2
    while number > 1:
        while number % p == 0:
            factors.append(p)
            number //= p
        p += 1
    return list(accumulate(reversed(factors), mul))
