"""One row of the weight table: a parameter, the released tensors it is made of, and their shards.

A parameter is a stack, along its first axis, of pieces; most have one piece, only the packed qkvr
projection has four. Each piece is one released tensor, laid out in the file as `plain` (as we keep
it), `conv` ([C,1,W], kept as [W,C]: a tap's channels lie together) or `interleaved` (rows
g0,u0,g1,u1,... along the second to last axis, kept as all gate rows then all up rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Part = Literal["text", "mtp", "audio", "vision", "draft"]
Layout = Literal["plain", "conv", "interleaved"]
Kind = Literal[
    "matrix",
    "head",
    "embedding",
    "norm",
    "conv",
    "rel_proj",
    "gate_bias",
    "gate_scale",
    "mlp_scale",
]

# Kept in fp32 whatever the model's dtype: the mathematics reads them in fp32.
FP32_KINDS = frozenset({"conv", "gate_bias", "gate_scale", "mlp_scale"})


@dataclass(frozen=True, kw_only=True)
class Split:
    """How tensor parallelism cuts one released tensor.

    Attributes:
        dim: axis of the tensor in the file.
        units: indivisible units along it, named by `what` for error messages; each is
            shape[dim] / units elements (a head, an interleaved gate/up pair, a vocabulary row).
        replicate: with more ranks than units, neighbouring ranks hold the same unit.
    """

    dim: int
    units: int
    what: str
    replicate: bool = False

    def unit_range(self, tp_rank: int, tp_size: int) -> tuple[int, int]:
        """The units [lo, hi) of one rank.

        Raises: ValueError: the units cannot be shared out evenly.
        """
        if self.units % tp_size == 0:
            count = self.units // tp_size
            return tp_rank * count, (tp_rank + 1) * count
        if self.replicate and tp_size % self.units == 0:
            unit = tp_rank // (tp_size // self.units)
            return unit, unit + 1
        also = f" nor is {tp_size} a multiple of {self.units}" if self.replicate else ""
        raise ValueError(
            f"{self.units} {self.what} are not divisible by tensor parallel size {tp_size}{also}"
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One released tensor: its name and shape in the file, layout and split (None = whole on every
    rank)."""

    name: str
    shape: tuple[int, ...]
    layout: Layout = "plain"
    split: Split | None = None

    def file_slice(self, tp_rank: int, tp_size: int) -> tuple[slice, ...]:
        """What one rank reads of the file's tensor: one slice an axis."""
        slices = [slice(0, n) for n in self.shape]
        if self.split is not None:
            lo, hi = self.split.unit_range(tp_rank, tp_size)
            unit = self.shape[self.split.dim] // self.split.units
            slices[self.split.dim] = slice(lo * unit, hi * unit)
        return tuple(slices)

    def local_shape(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """Shape of this piece inside the parameter of one rank."""
        shape = tuple(s.stop - s.start for s in self.file_slice(tp_rank, tp_size))
        return (shape[2], shape[0]) if self.layout == "conv" else shape


@dataclass(frozen=True, kw_only=True)
class WeightEntry:
    """A parameter of the model: its key in the weights dict and the pieces stacked into it.

    Attributes:
        part: what it belongs to; parts are allocated on request.
        kind: decides the dtype it is kept in (FP32_KINDS), the dtypes a file may hold it in, and
            the values of a dummy.
    """

    name: str
    part: Part
    kind: Kind
    pieces: tuple[Piece, ...]

    def shape(self, tp_rank: int = 0, tp_size: int = 1) -> tuple[int, ...]:
        """Shape of the parameter on one rank.

        Raises: ValueError: the shape cannot be split so; names the parameter and the reason.
        """
        try:
            shapes = [piece.local_shape(tp_rank, tp_size) for piece in self.pieces]
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return (sum(s[0] for s in shapes), *shapes[0][1:])

    def kept_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.kind in FP32_KINDS else model_dtype

    def views(self, parameter: Tensor, tp_rank: int = 0, tp_size: int = 1) -> list[Tensor]:
        """The part of the parameter that each piece fills, in the order of `pieces`."""
        rows = [piece.local_shape(tp_rank, tp_size)[0] for piece in self.pieces]
        return list(parameter.split(rows))


def copy_from_file(target: Tensor, source: Tensor, layout: Layout) -> None:
    """Write a slice of a file's tensor into its place, converting layout and dtype in one pass."""
    if layout == "interleaved":
        width = target.shape[-2] // 2
        target[..., :width, :].copy_(source[..., 0::2, :])
        target[..., width:, :].copy_(source[..., 1::2, :])
    elif layout == "conv":
        target.copy_(source.squeeze(1).t())
    else:
        target.copy_(source)


def to_file_layout(view: Tensor, layout: Layout) -> Tensor:
    """The inverse of copy_from_file for a whole (unsplit) piece; contiguous."""
    if layout == "interleaved":
        gate, up = view.chunk(2, dim=-2)
        return torch.stack((gate, up), dim=-2).flatten(-3, -2)
    if layout == "conv":
        return view.t().unsqueeze(1).contiguous()
    return view.contiguous()
