"""Entries whose content follows from the key, so that a wrong answer is seen."""

from __future__ import annotations

import hashlib
import logging

import torch
from torch import Tensor

from inkling_rocm.engine.prefix_cache.disk_store import SUFFIX, DiskStore
from inkling_rocm.engine.prefix_cache.entry_file import file_bytes
from inkling_rocm.engine.prefix_cache.layout import Layout

FINGERPRINT, OTHER = bytes(range(32)), bytes(range(1, 33))
VALUES = 96


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"entry %d" % number).digest()


def tensors_of(key: bytes, values: int = VALUES) -> dict[str, Tensor]:
    """Random bits (NaNs too) that the key decides, in two dtypes; 6 * values bytes, values a
    multiple of 6."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7]))
    bits = torch.randint(0, 256, (6 * values,), dtype=torch.uint8, generator=generator)
    return {
        "kv": bits[: 2 * values].view(torch.bfloat16).view(2, -1),
        "rings_8": bits[2 * values :].view(torch.float32).view(1, 3, -1),
    }


def same_bits(got: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> bool:
    return (
        got is not None
        and got.keys() == wanted.keys()
        and all(
            got[name].dtype == tensor.dtype
            and got[name].shape == tensor.shape
            and torch.equal(_bytes(got[name]), _bytes(tensor))
            for name, tensor in wanted.items()
        )
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


FILE_BYTES = file_bytes(Layout.of(tensors_of(b"any")))
DATA_BYTES = Layout.of(tensors_of(b"any")).nbytes


def put(store, *numbers: int) -> None:
    for number in numbers:
        store.put(key_of(number), tensors_of(key_of(number)))


def held(store, numbers) -> list[int]:
    """Which entries the store gives; each must be right."""
    found = []
    for number in numbers:
        got = store.get(key_of(number))
        if got is not None:
            assert same_bits(got, tensors_of(key_of(number)))
            found.append(number)
    return found


def file_of(store: DiskStore, number: int):
    (file,) = store.folder.glob(f"*-{key_of(number).hex()}{SUFFIX}")
    return file


def warnings_in(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
