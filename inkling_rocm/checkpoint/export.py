"""Write parameters as a checkpoint in the released layout: the loader's direction reversed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from inkling_rocm.checkpoint.entry import WeightEntry, to_file_layout
from inkling_rocm.checkpoint.files import INDEX_NAME
from inkling_rocm.checkpoint.released_config import released_config
from inkling_rocm.checkpoint.table import weight_entries
from inkling_rocm.config import InklingConfig


def export_checkpoint(
    config: InklingConfig,
    weights: Mapping[str, Tensor],
    path: str | Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json, shards and their index into folder `path`; loading it gives back every
    bit.

    Convolutions and dense scales, kept in fp32, are written in the model's dtype where that loses
    nothing (as released), else in fp32.

    Args:    weights: whole parameters (tensor parallel size 1), of every part that is to be
             written; a part is written wholly or not at all.
             max_shard_bytes: a file is closed before it would exceed this, unless one tensor does;
             so much memory is needed besides the parameters.
    Raises:  ValueError: a parameter is missing, unknown or of a wrong shape, or the config says
             what config.json has no words for.
             FileExistsError: the folder already holds safetensors files.
    """
    entries = _check(config, weights)
    model_dtype = next(weights[e.name].dtype for e in entries if e.kind == "embedding")
    dtype_name = str(model_dtype).removeprefix("torch.")
    config_json = released_config(replace(config, dtype=dtype_name))
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors*")):
        raise FileExistsError(f"{folder} already holds safetensors files; choose an empty folder")
    shards = _plan_shards(entries, weights, max_shard_bytes)
    shard_of: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for entry in shard:
            for piece, view in zip(entry.pieces, entry.views(weights[entry.name]), strict=True):
                stored = _stored_dtype(entry, view, model_dtype)
                tensors[piece.name] = to_file_layout(view, piece.layout).to(stored).cpu()
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, file_name)
        total_bytes += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shard_of.items()))}
    _write_json(folder / INDEX_NAME, index)
    _write_json(folder / "config.json", config_json)


def _check(config: InklingConfig, weights: Mapping[str, Tensor]) -> list[WeightEntry]:
    """The entries to write, in the table's order."""
    entries = [e for e in weight_entries(config) if e.name in weights]
    unknown = weights.keys() - {e.name for e in entries}
    if unknown:
        raise ValueError(f"parameters {sorted(unknown)} are not in the weight table of this config")
    parts = {e.part for e in entries} | {"text"}
    for entry in weight_entries(config):
        if entry.part in parts and entry.name not in weights:
            raise ValueError(f"parameter {entry.name} is missing; wanted all of part {entry.part}")
    for entry in entries:
        shape = tuple(weights[entry.name].shape)
        if shape != entry.shape():
            raise ValueError(
                f"parameter {entry.name} is {shape}, wanted {entry.shape()}; gather the shards of "
                f"a tensor-parallel run before exporting"
            )
    return entries


def _plan_shards(
    entries: list[WeightEntry], weights: Mapping[str, Tensor], max_shard_bytes: int
) -> list[list[WeightEntry]]:
    shards: list[list[WeightEntry]] = [[]]
    used = 0
    for entry in entries:
        size = weights[entry.name].nbytes
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards


def _stored_dtype(entry: WeightEntry, view: Tensor, model_dtype: torch.dtype) -> torch.dtype:
    if entry.kind in ("conv", "mlp_scale") and torch.equal(
        view.to(model_dtype).to(view.dtype), view
    ):
        return model_dtype
    return view.dtype


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
