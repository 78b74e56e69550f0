"""How an entry's named tensors lie in one run of bytes: the safetensors format.

Header (length and JSON) and data together are a safetensors file, which that library reads. They
are kept apart here because the data of an entry in host memory lies in blocks, and because building
the file in one piece would copy it twice with the interpreter locked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Field:
    """One tensor: bytes [start, end) of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Attributes:
    fields: in the order of their bytes, widest dtype first, so that every tensor is aligned.
    """

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The layout these tensors are stored in.

        Raises:
            ValueError: a dtype that safetensors has no name for here.
        """
        fields, start = [], 0
        for name, tensor in sorted(tensors.items(), key=lambda t: (-t[1].element_size(), t[0])):
            if tensor.dtype not in DTYPE_NAMES:
                known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
                raise ValueError(f"tensor {name!r} is {tensor.dtype}; an entry holds {known}")
            end = start + tensor.numel() * tensor.element_size()
            fields.append(Field(name, tensor.dtype, tuple(tensor.shape), start, end))
            start = end
        return cls(tuple(fields))

    @classmethod
    def parse(cls, header: bytes) -> Self:
        """The layout that a safetensors header describes; the caller has checked its checksum.

        Raises:
            ValueError, KeyError, TypeError: this is no header that `header` writes.
        """
        fields = [
            Field(name, DTYPES[x["dtype"]], tuple(x["shape"]), *x["data_offsets"])
            for name, x in json.loads(header[LENGTH.size :]).items()
        ]
        return cls(tuple(sorted(fields, key=lambda field: (field.start, field.end))))

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.fields[-1].end if self.fields else 0

    @property
    def header(self) -> bytes:
        """Length and JSON, padded to a multiple of 8 bytes."""
        entries = {
            field.name: {
                "dtype": DTYPE_NAMES[field.dtype],
                "shape": list(field.shape),
                "data_offsets": [field.start, field.end],
            }
            for field in self.fields
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return LENGTH.pack(len(text)) + text

    def unpack(self, data: Tensor) -> dict[str, Tensor]:
        """The tensors, as views of the data, uint8 [nbytes]."""
        return {
            field.name: data[field.start : field.end].view(field.dtype).view(field.shape)
            for field in self.fields
        }

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The data of tensors that have this layout, uint8 [nbytes] on their device."""
        parts = [
            tensors[field.name].detach().contiguous().view(-1).view(torch.uint8)
            for field in self.fields
        ]
        if not parts:
            return torch.empty(0, dtype=torch.uint8)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
