"""Random weights made in place, on whatever device the parameters are.

Every value is a pure function of the seed, the released tensor's name and the element's index in
that tensor, in integer arithmetic and exactly rounded fp32. So the same weights come out on every
device, and a tensor-parallel rank gets precisely its shard of what one device would hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from inkling_rocm.checkpoint.entry import Piece, WeightEntry
from inkling_rocm.checkpoint.table import weight_entries
from inkling_rocm.config import InklingConfig

_LOW_32 = 0xFFFFFFFF
# Elements hashed at a time: temporaries stay in a CPU's cache, and are worth a GPU's launches.
_SLAB_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}


def fill_dummy(
    config: InklingConfig,
    weights: Mapping[str, Tensor],
    seed: int = 0,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    expert_parallel: bool = False,
) -> None:
    """Fill allocated parameters with random values that keep activations near unit size.

    Args:    weights: from `allocate` for the same rank.
    Raises:  ValueError: a parameter that the table does not have, or of another rank's shape.
    """
    fill_entries(
        weight_entries(config, expert_parallel),
        weights,
        seed,
        mup_multiplier=config.text.mup_multiplier,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def fill_entries(
    table: Sequence[WeightEntry],
    weights: Mapping[str, Tensor],
    seed: int = 0,
    *,
    mup_multiplier: float = 1.0,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> None:
    """The same by any table. Args: mup_multiplier: what the head's input is divided by."""
    entries = {entry.name: entry for entry in table}
    for name, parameter in weights.items():
        if name not in entries:
            raise ValueError(f"parameter {name} is not in the weight table of this config")
        entry = entries[name]
        wanted = entry.shape(tp_rank, tp_size)
        if tuple(parameter.shape) != wanted:
            raise ValueError(
                f"parameter {name} is {tuple(parameter.shape)}, wanted {wanted} for rank {tp_rank} "
                f"of {tp_size}; allocate with the same tp_rank and tp_size"
            )
        mean, std = _distribution(entry, mup_multiplier)
        views = entry.views(parameter, tp_rank, tp_size)
        for piece, view in zip(entry.pieces, views, strict=True):
            _fill(view, piece, seed, mean, std, tp_rank, tp_size)


def _distribution(entry: WeightEntry, mup_multiplier: float) -> tuple[float, float]:
    """(mean, standard deviation) of a parameter's values."""
    shape = entry.pieces[0].shape
    match entry.kind:
        case "matrix":
            return 0.0, shape[-1] ** -0.5
        case "head":  # the hidden state arrives divided by mup; logits should differ by a few nats
            return 0.0, 3.0 * mup_multiplier * shape[-1] ** -0.5
        case "rel_proj":  # [R, E] is applied from the left: its fan-in is R
            return 0.0, shape[0] ** -0.5
        case "embedding":
            return 0.0, 1.0
        case "norm":
            return 1.0, 0.1
        case "conv":
            return 0.0, 0.2
        case "gate_bias":
            return 0.0, 0.05
        case "gate_scale" | "mlp_scale":
            return 1.0, 0.05


def _fill(
    target: Tensor, piece: Piece, seed: int, mean: float, std: float, tp_rank: int, tp_size: int
) -> None:
    rows, columns = _file_indices(piece, tp_rank, tp_size, target.device)
    in_file_order = target.t() if piece.layout == "conv" else target
    target_2d = in_file_order.view(len(rows), len(columns))
    digest = hashlib.sha256(f"{seed}:{piece.name}".encode()).digest()
    keys = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    spread = std * math.sqrt(3.0)  # uniform in +-spread has standard deviation std
    step = max(1, _SLAB_ELEMENTS["cuda" if target.device.type == "cuda" else "cpu"] // len(columns))
    for begin in range(0, len(rows), step):
        index = rows[begin : begin + step, None] + columns
        values = _uniform(index, keys).mul_(spread).add_(mean)
        target_2d[begin : begin + step].copy_(values)


def _file_indices(
    piece: Piece, tp_rank: int, tp_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Flat index in the file's tensor of each element this rank holds, as (row base, column
    offset) in the parameter's order: int64 [rows] and [columns]."""
    axes = [
        torch.arange(s.start, s.stop, device=device) for s in piece.file_slice(tp_rank, tp_size)
    ]
    if piece.layout == "interleaved":
        axes[-2] = torch.cat((axes[-2][0::2], axes[-2][1::2]))
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for axis, stride in zip(axes[:-1], _strides(piece.shape)[:-1], strict=True):
        rows = (rows[:, None] + axis * stride).flatten()
    return rows, axes[-1]


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _uniform(index: Tensor, keys: tuple[int, int]) -> Tensor:
    """Counter-based noise: int64 indices to fp32 in [-1, 1), 24 bits each."""
    x = _mix((index & _LOW_32) ^ keys[0])
    x = _mix(x ^ (index >> 32) ^ keys[1])
    return (x >> 8).to(torch.float32).mul_(2.0**-23).sub_(1.0)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (murmur3's finaliser); x is int64 holding them, overwritten.
    Products wrap modulo 2^64, which leaves their low 32 bits right."""
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(_LOW_32)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(_LOW_32)
    return x.bitwise_xor_(x >> 16)
