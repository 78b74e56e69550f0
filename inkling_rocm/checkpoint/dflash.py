"""A DFlash draft's weights: their table, loading, random values, and random drafts on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from inkling_rocm.checkpoint.dummy import fill_entries
from inkling_rocm.checkpoint.entry import Kind, Piece, WeightEntry
from inkling_rocm.checkpoint.files import SINGLE_NAME, CheckpointError, scan_checkpoint
from inkling_rocm.checkpoint.loader import LoadReport, load_entries, refuse_quantised
from inkling_rocm.config_dflash import ARCHITECTURE, DFlashConfig, parse_dflash_config
from inkling_rocm.config_types import TextConfig

_PREFIX = "model."  # some writers put it before every name


@lru_cache(maxsize=4)
def dflash_entries(config: DFlashConfig) -> tuple[WeightEntry, ...]:
    """Every parameter of the draft; none is split over ranks."""
    return tuple(_entries(config))


def _entry(kind: Kind, name: str, *pieces: tuple[str, tuple[int, ...]]) -> WeightEntry:
    made = tuple(Piece(name=f"{released}.weight", shape=shape) for released, shape in pieces)
    return WeightEntry(name=name, part="draft", kind=kind, pieces=made)


def _entries(config: DFlashConfig) -> Iterator[WeightEntry]:
    H, I, D = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    yield _entry("matrix", "fc", ("fc", (H, len(config.target_layer_ids) * H)))
    yield _entry("norm", "hidden_norm", ("hidden_norm", (H,)))
    for i in range(config.num_layers):
        name = f"layers.{i}."
        attn, mlp = name + "self_attn.", name + "mlp."
        yield _entry("norm", name + "attn_norm", (name + "input_layernorm", (H,)))
        yield _entry("norm", name + "mlp_norm", (name + "post_attention_layernorm", (H,)))
        yield _entry(
            "matrix",
            name + "qkv",
            (attn + "q_proj", (q, H)),
            (attn + "k_proj", (kv, H)),
            (attn + "v_proj", (kv, H)),
        )
        yield _entry("norm", name + "q_norm", (attn + "q_norm", (D,)))
        yield _entry("norm", name + "k_norm", (attn + "k_norm", (D,)))
        yield _entry("matrix", name + "o_proj", (attn + "o_proj", (H, q)))
        yield _entry(
            "matrix", name + "gate_up", (mlp + "gate_proj", (I, H)), (mlp + "up_proj", (I, H))
        )
        yield _entry("matrix", name + "down", (mlp + "down_proj", (H, I)))
    yield _entry("norm", "final_norm", ("norm", (H,)))


def allocate_dflash(
    config: DFlashConfig, *, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Tensor]:
    """Uninitialised parameters by name."""
    return {
        entry.name: torch.empty(entry.shape(), dtype=entry.kept_dtype(dtype), device=device)
        for entry in dflash_entries(config)
    }


def dflash_bytes(config: DFlashConfig, dtype: torch.dtype) -> int:
    """Memory of the draft's parameters."""
    return sum(
        math.prod(entry.shape()) * entry.kept_dtype(dtype).itemsize
        for entry in dflash_entries(config)
    )


def load_dflash_weights(
    path: str | Path, config: DFlashConfig, weights: Mapping[str, Tensor], *, progress: bool = True
) -> LoadReport:
    """Fill parameters of `allocate_dflash` from the draft in folder `path`.

    Raises: CheckpointError: names file, tensor, got, wanted and the next step.
    """
    stored = scan_checkpoint(Path(path))
    refuse_quantised(stored)
    by_name = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    if len(by_name) < len(stored):
        raise CheckpointError(f"{path}: a tensor is there with and without {_PREFIX!r}; wanted one")
    return load_entries(path, dflash_entries(config), weights, by_name, progress=progress)


def fill_dflash_dummy(config: DFlashConfig, weights: Mapping[str, Tensor], seed: int = 0) -> None:
    """Random values, the same on every device and rank."""
    fill_entries(dflash_entries(config), weights, seed)


def dflash_json(config: DFlashConfig) -> dict[str, Any]:
    """The config.json of a draft: the inverse of parse_dflash_config.

    Raises: ValueError: the config says something config.json has no words for.
    """
    types = ["sliding_attention" if window else "full_attention" for window in config.windows]
    result: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "attention_bias": False,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": config.dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": types,
        "max_position_embeddings": config.context_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": max(config.windows) or None,
        "vocab_size": config.vocab_size,
    }
    if config.causal != tuple(window > 0 for window in config.windows):
        result["is_causal"] = config.causal[0]
    if parse_dflash_config(result) != config:
        raise ValueError(
            f"this config cannot be written as a draft's config.json: {config} would be read back "
            f"as {parse_dflash_config(result)}"
        )
    return result


def random_dflash(text: TextConfig, *, block_size: int = 8) -> DFlashConfig:
    """A tiny draft that fits a target: for tests and trials of what surrounds it."""
    H, L = text.hidden_size, text.num_layers
    return DFlashConfig(
        hidden_size=H,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=2 * H,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        target_layer_ids=tuple(sorted({L // 4, L // 2, L - 1})),
        block_size=block_size,
        mask_token_id=text.vocab_size - 1,
        # Both kinds of layer, and both kinds of block: full layers see all of it.
        windows=(0, 64),
        causal=(False, True),
        context_length=text.context_length,
        num_target_layers=L,
        vocab_size=text.vocab_size,
    )


def write_random_dflash(
    path: str | Path, config: DFlashConfig, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a draft with random weights into folder `path`, as a published one lies on disk.

    Returns: the folder.
    Raises: FileExistsError: the folder already holds safetensors files.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors*")):
        raise FileExistsError(f"{folder} already holds safetensors files; choose an empty folder")
    weights = allocate_dflash(config, dtype=dtype, device="cpu")
    fill_dflash_dummy(config, weights, seed)
    tensors = {
        piece.name: view.contiguous()
        for entry in dflash_entries(config)
        for piece, view in zip(entry.pieces, entry.views(weights[entry.name]), strict=True)
    }
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    text = json.dumps(dflash_json(config), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    return folder
