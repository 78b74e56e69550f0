"""What lies in a checkpoint folder: every tensor's file, dtype and shape, read from the headers.

All damage that headers can show (truncated or missing shards, names held twice, an index that
disagrees with its shards) is found here, before a byte of weights is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Bytes an element, of the dtypes a safetensors header can name.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
    "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names file, tensor, got, wanted, next
    step."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        dtype: the header's name for it, e.g. "BF16".
        offset: of its first byte in the file's data section; loading in this order reads forward.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def scan_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files, by name.

    Raises: CheckpointError: no files, damaged or missing files, contradictions between them.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; wanted a checkpoint's folder")
    index_file, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index_file.exists():
        if not single.exists():
            raise CheckpointError(
                f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there; download the "
                f"checkpoint's safetensors files completely"
            )
        return read_header(single)
    shard_of = _read_index(index_file)
    shards = sorted(set(shard_of.values()))
    if single.exists() and SINGLE_NAME not in shards:
        raise CheckpointError(
            f"{folder}: {SINGLE_NAME} is there but {INDEX_NAME} does not name it; remove the one "
            f"that is left over from another save"
        )
    stored: dict[str, StoredTensor] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            name = next(n for n, s in shard_of.items() if s == shard)
            raise CheckpointError(
                f"{index_file}: tensor {name} is said to be in {shard}, which does not exist as a "
                f"file; download it"
            )
        for name, tensor in read_header(folder / shard).items():
            if name in stored:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in two files, {stored[name].file.name} and "
                    f"{shard}; wanted one; remove the file that does not belong"
                )
            stored[name] = tensor
    _check_index(index_file, shard_of, stored)
    return stored


def _read_index(index_file: Path) -> dict[str, str]:
    try:
        index = json.loads(
            index_file.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates
        )
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{index_file}: {error}; download it again") from error
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(
            f"{index_file}: weight_map is {shard_of!r}, wanted tensor names with their files; "
            f"download it again"
        )
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise CheckpointError(
                f"{index_file}: tensor {name} is in {shard!r}, wanted the name of a file in the "
                f"same folder"
            )
    return shard_of


def _check_index(
    index_file: Path, shard_of: dict[str, str], stored: dict[str, StoredTensor]
) -> None:
    for name, shard in shard_of.items():
        if name not in stored:
            raise CheckpointError(
                f"{index_file}: tensor {name} is said to be in {shard}, whose header does not have "
                f"it; download both files again"
            )
        if stored[name].file.name != shard:
            raise CheckpointError(
                f"{index_file}: tensor {name} is said to be in {shard} but is in "
                f"{stored[name].file.name}; download the index again"
            )
    for name, tensor in stored.items():
        if name not in shard_of:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is not in {index_file.name}; download the index "
                f"again, or remove the file if it does not belong"
            )


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises: CheckpointError: a file that cannot be opened, is cut short, longer than its header says
            or not safetensors.
    """
    try:
        return _read_header(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise CheckpointError(
                f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
            )
        header_bytes = int.from_bytes(start, "little")
        if len(start) < 8 or header_bytes > size - 8:
            raise CheckpointError(
                f"{file} is cut short: {size} bytes, its header alone needs {8 + header_bytes}; "
                f"download it again"
            )
        text = stream.read(header_bytes)
    try:
        header = json.loads(text, object_pairs_hook=_refuse_duplicates)
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, name, fields) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the safetensors header is damaged ({error}); download it again"
        ) from error
    data_bytes = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
    wanted = 8 + header_bytes + data_bytes
    if size != wanted:
        last = max(tensors.values(), key=lambda t: t.offset, default=None)
        raise CheckpointError(
            f"{file} is {'cut short' if size < wanted else 'too long'}: {size} bytes, wanted "
            f"{wanted}, up to the end of tensor {last.name if last else None}; download it again"
        )
    return tensors


def _stored(file: Path, name: str, fields: dict[str, Any]) -> StoredTensor:
    shape = tuple(int(n) for n in fields["shape"])
    begin, end = fields["data_offsets"]
    dtype = fields["dtype"]
    wanted = math.prod(shape) * DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else end - begin
    if end - begin != wanted:
        raise ValueError(f"tensor {name}: {end - begin} bytes for {dtype} {shape}, wanted {wanted}")
    return StoredTensor(
        name=name, file=file, dtype=dtype, shape=shape, offset=begin, num_bytes=end - begin
    )


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json's last-one-wins would hide a tensor that is named twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        name = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"{name} is there twice")
    return found
