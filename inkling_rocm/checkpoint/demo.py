"""The demo checkpoint: a small Inkling with random weights, written once into the user's cache.

It has everything the released checkpoints have (the real vocabulary, local and global layers, dense
and MoE, draft blocks, both towers), so that every path of the server can be tried without a
download. What it says is noise, though made of common tokens and of a chat answer's length.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from inkling_rocm.checkpoint.dummy import fill_dummy
from inkling_rocm.checkpoint.export import export_checkpoint
from inkling_rocm.checkpoint.released_config import released_config
from inkling_rocm.checkpoint.table import allocate, weight_entries
from inkling_rocm.config import (
    AttentionConfig,
    AudioConfig,
    InklingConfig,
    MoEConfig,
    MTPConfig,
    TextConfig,
    VisionConfig,
)

_VERSION = 2  # raise it when the way the weights are made changes
_MANIFEST = "demo.json"  # size and digest of every other file, written last; touched when used
_UNUSED_SECONDS = 30 * 24 * 3600
_SHARD_BYTES = 64_000_000
_END_OF_TURN = 200006
_ANSWER_TOKENS = 256  # mean length of an answer sampled at temperature 1


def demo_config() -> InklingConfig:
    """The released models' shape in small; the towers' input side (patches, mel bins) and the
    vocabulary are theirs exactly."""
    local_attention = AttentionConfig(
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        d_rel=16,
        extent=64,
        window=64,
        log_floor=None,
        log_alpha=0.1,
    )
    text = TextConfig(
        hidden_size=128,
        num_layers=6,
        vocab_size=201024,
        unpadded_vocab_size=200058,
        context_length=8192,
        rms_norm_eps=1e-6,
        conv_taps=4,
        dense_intermediate_size=512,
        mup_multiplier=2.0,
        local_attention=local_attention,
        # A floor below the context, so that long prompts reach the logarithmic scaling.
        global_attention=replace(
            local_attention, num_kv_heads=2, extent=128, window=0, log_floor=512
        ),
        layer_is_local=tuple((i + 1) % 6 != 0 for i in range(6)),
        layer_is_moe=tuple(i >= 2 for i in range(6)),
        moe=MoEConfig(
            num_experts=16, top_k=4, num_shared_experts=2, intermediate_size=64, route_scale=8.0
        ),
    )
    return InklingConfig(
        text=text,
        mtp=MTPConfig(num_blocks=2, block_is_local=(True, False), chain_hidden_post_norm=False),
        audio=AudioConfig(num_mel_bins=80, num_levels=16),
        vision=VisionConfig(patch_size=40, temporal_patch_size=2, num_channels=3, num_layers=4),
        dtype="bfloat16",
        eos_token_ids=(_END_OF_TURN,),
    )


def demo_checkpoint(cache_dir: str | Path | None = None) -> Path:
    """Folder of the demo checkpoint; writes it unless an intact copy is there. Copies of other
    versions are removed once nothing has used them for a month.

    Args:    cache_dir: where to keep it; None = this user's cache folder.
    Raises:  OSError: the folder cannot be written.
    """
    parent = Path(cache_dir) if cache_dir is not None else user_cache_dir()
    config_text = json.dumps(released_config(demo_config()), sort_keys=True)
    key = hashlib.sha256(f"{_VERSION}:{config_text}".encode()).hexdigest()[:12]
    folder = parent / f"demo-{key}"
    if _is_intact(folder):
        with suppress(OSError):  # a shared copy may be for reading only
            os.utime(folder / _MANIFEST)
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: whoever sees the folder sees all of it.
    staging = Path(tempfile.mkdtemp(prefix=".demo-", dir=parent))
    try:
        written = staging / "new"
        _write(written)
        if not _is_intact(folder):
            with suppress(FileNotFoundError):
                folder.rename(staging / "damaged")
        try:
            written.rename(folder)
        except OSError:
            # Another process may have put the same folder there meanwhile.
            if not _is_intact(folder):
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _remove_unused(parent)
    return folder


def resolve_model_path(model_path: str | Path) -> Path:
    """The checkpoint folder that a --model-path means: a folder, or "demo".

    Raises: FileNotFoundError, NotADirectoryError: what is wrong with the path, and what to do.
    """
    if str(model_path) == "demo":
        return demo_checkpoint()
    path = Path(model_path).expanduser()
    if path.is_file():
        raise NotADirectoryError(
            f"model path {path} is a file; wanted the checkpoint's folder, here {path.parent}"
        )
    if not path.is_dir():
        looks_like_hub_id = not path.is_absolute() and len(path.parts) == 2
        advice = (
            f"nothing is downloaded here: fetch it first, e.g. `hf download {model_path} "
            f"--local-dir {path.name}`, and pass that folder"
            if looks_like_hub_id
            else 'pass the folder of a checkpoint, or "demo"'
        )
        raise FileNotFoundError(f"model path {model_path}: no such folder; {advice}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"model path {path} has no config.json; wanted a checkpoint folder with config.json "
            f"and safetensors files"
        )
    return path


def user_cache_dir() -> Path:
    """Where this platform keeps a user's cached files, with our name below it."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the specification says to ignore relative paths
        base = Path(xdg)
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "inkling-rocm"


def _write(folder: Path) -> None:
    print(f"writing the demo checkpoint to {folder.parent.parent}, once", file=sys.stderr)
    config = demo_config()
    weights = allocate(
        config, dtype=torch.bfloat16, device="cpu", parts=("text", "mtp", "audio", "vision")
    )
    fill_dummy(config, weights)
    _prefer_common_tokens(config.text, weights)
    for entry in weight_entries(config):
        if entry.kind in ("conv", "mlp_scale"):  # published in bf16
            weights[entry.name].copy_(weights[entry.name].to(torch.bfloat16))
    export_checkpoint(config, weights, folder, max_shard_bytes=_SHARD_BYTES)
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.iterdir())
    }
    (folder / _MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")


def _prefer_common_tokens(text: TextConfig, weights: dict[str, Tensor]) -> None:
    """Give the logits a bias: frequent tokens likely, special tokens but the turn's end unlikely.

    The model has no bias terms, so hidden channel 0 becomes one: the same in every embedding row,
    left alone by every layer, and read by the head's column 0. A token's id grows with its rank
    among the tokenizer's merges, so 1/id is a rough frequency; ids below 256 are single bytes.
    """
    weights["embed"][:, 0] = 4.0
    weights["embed_norm"][0] = 1.0
    weights["final_norm"][0] = 1.0
    for name, parameter in weights.items():
        if name.startswith("layers."):
            if name.endswith(("o_proj", "mlp.down")):
                parameter[0, :] = 0.0
            elif name.endswith("w2"):
                parameter[:, 0, :] = 0.0
    ids = torch.arange(text.vocab_size, dtype=torch.float64)
    log_prior = -ids.clamp(min=256.0).log()
    log_prior[:256] -= 8.0
    log_prior[199998:] -= 8.0
    # The other logits spread by 2 nats (normally distributed, so their mean weight is e^2).
    weights["lm_head"].mul_(2 / 3)
    log_prior[_END_OF_TURN] = log_prior.logsumexp(0) + 2.0 - math.log(_ANSWER_TOKENS)
    weights["lm_head"][_END_OF_TURN] = 0.0
    channel_0 = 0.8  # its usual value after the final norm
    log_prior -= log_prior.max()
    weights["lm_head"][:, 0] = (log_prior * (text.mup_multiplier / channel_0)).bfloat16()


def _is_intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        there = {file.name for file in folder.iterdir()}
        return there == {*files, _MANIFEST} and all(
            (folder / name).stat().st_size == facts["bytes"]
            and _sha256(folder / name) == facts["sha256"]
            for name, facts in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # damaged in whatever way: it is written anew


def _remove_unused(parent: Path) -> None:
    """Remove copies that nothing has used lately, and what a killed process left of one."""
    for folder in [*parent.glob("demo-*"), *parent.glob(".demo-*")]:
        manifest = folder / _MANIFEST
        with suppress(FileNotFoundError):  # another process removes it as well
            used = (manifest if manifest.exists() else folder).stat().st_mtime
            if time.time() - used > _UNUSED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
