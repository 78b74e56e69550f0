"""The weight order of aiter's bf16 expert kernels ("shuffled", layout (16, 16)) and its inverse.

Of a [..., N, K] weight with 2-byte elements, tiles of 16 rows x 32 columns lie one after another,
each as
4 column groups of 8 x 16 rows: the order in which 64 lanes of a 16x16 matrix instruction read 16
    bytes.

    flat(n, k) = ((((n // 16) * (K // 32) + k // 32) * 4 + (k % 32) // 8) * 16 + n % 16) * 8 + k % 8
"""

from __future__ import annotations

import torch

TILE_N, TILE_K, GROUP_K = 16, 32, 8


def check_layout(w: torch.Tensor) -> None:
    """Raise ValueError if the weight has no shuffled form."""
    N, K = w.shape[-2:]
    if w.element_size() != 2 or N % TILE_N or K % TILE_K:
        raise ValueError(
            f"aiter layout: weight {tuple(w.shape)} {w.dtype}; wanted 2-byte elements, rows a "
            f"multiple of {TILE_N} and columns a multiple of {TILE_K}"
        )


def shuffle(w: torch.Tensor) -> torch.Tensor:
    """A shuffled copy of [..., N, K], same shape, marked as aiter's own helper marks it.

    Releases since 2026 choose their kernel by the mark, and it does not survive
    `torch.nn.Parameter`,
    views or slices: hand this very tensor to the call.
    """
    check_layout(w)
    N, K = w.shape[-2:]
    tiles = w.reshape(-1, N // TILE_N, TILE_N, K // TILE_K, TILE_K // GROUP_K, GROUP_K)
    out = tiles.permute(0, 1, 3, 4, 2, 5).contiguous().view(w.shape)
    out.is_shuffled = True  # type: ignore[attr-defined]
    return out


def unshuffle(w: torch.Tensor) -> torch.Tensor:
    """The inverse of `shuffle`."""
    check_layout(w)
    N, K = w.shape[-2:]
    tiles = w.reshape(-1, N // TILE_N, K // TILE_K, TILE_K // GROUP_K, TILE_N, GROUP_K)
    return tiles.permute(0, 1, 4, 2, 3, 5).contiguous().view(w.shape)
