"""From an engine's arguments to the tiers of its prefix cache."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

from inkling_rocm.checkpoint.demo import resolve_model_path
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.free_memory import GIB, free_bytes
from inkling_rocm.engine.load import EngineParts
from inkling_rocm.engine.prefix_cache.blocks import block_bytes_for
from inkling_rocm.engine.prefix_cache.cache import PrefixCache
from inkling_rocm.engine.prefix_cache.disk_store import DiskStore, make_folder
from inkling_rocm.engine.prefix_cache.fingerprint import StateFingerprint, weights_identity
from inkling_rocm.engine.prefix_cache.store import HostStore
from inkling_rocm.engine.prefix_cache.tiers import Tiers
from inkling_rocm.engine.prefix_cache.transfer import entry_bytes, page_views, slot_views

GB = 10**9  # SGLang's unit
# Of the device's pages and snapshots, when no size is given.
DEFAULT_RATIO = 2
DEFAULT_STORAGE_GB = 100.0


def check_storage(args: EngineArgs) -> None:
    """Raises: OSError: the folder of the disk tier cannot be made or written to."""
    if args.hicache_storage_dir is None:
        return
    try:
        make_folder(Path(args.hicache_storage_dir).expanduser())
    except OSError as error:
        raise OSError(f"hicache_storage_dir {error}") from error


def open_tiers(cache: PrefixCache, parts: EngineParts, args: EngineArgs) -> None:
    """Give a cache the tiers that args ask for.

    Raises: ValueError: more memory than there is. OSError: the folder cannot be used.
    """
    if not args.enable_hierarchical_cache:
        return
    pages = [entry_bytes(page_views(pool, 0)) for pool in cache.pools]
    snapshot = entry_bytes(slot_views(cache.rings, 0))
    snapshots = len(cache.rings.snapshot_slots)
    on_device = sum(size * pool.total for size, pool in zip(pages, cache.pools, strict=True))
    size = int((args.hicache_size or 0) * GB)
    size = size or DEFAULT_RATIO * (on_device + snapshot * snapshots)
    if size > (free := free_bytes(torch.device("cpu"))):
        raise ValueError(
            f"the prefix cache's host tier of {size / GIB:.2f} GiB: only {free / GIB:.2f} GiB of "
            "memory are free; set hicache_size (GB)"
        )
    fingerprint = state_fingerprint(cache, parts, args).digest()
    disk = None
    if args.hicache_storage_backend == "file":
        assert args.hicache_storage_dir is not None
        capacity = int((args.hicache_storage_size or DEFAULT_STORAGE_GB) * GB)
        folder = Path(args.hicache_storage_dir).expanduser()
        disk = DiskStore(folder, capacity, fingerprint)
    store = HostStore(
        size,
        disk,
        block_bytes=block_bytes_for([*pages, snapshot]),
        pin_memory=parts.device.type == "cuda",
    )
    cache.tiers = Tiers(store, cache.tree, cache.rings, fingerprint)


def state_fingerprint(cache: PrefixCache, parts: EngineParts, args: EngineArgs) -> StateFingerprint:
    """What decides the bits of this engine's K/V."""
    variants = [f"{choice.op}: {choice.variant}" for choice in parts.model.ops.choices]
    return StateFingerprint(
        model=repr(parts.config) + repr(parts.block_draft and parts.block_draft.config),
        weights=weights_of(args),
        variants=", ".join([version("inkling-rocm"), parts.device.type, *variants]),
        dtype=str(parts.dtype),
        page_size=cache.page_size,
        ring_rows=cache.rings.rows,
        lookahead=cache.tree.lookahead,
        tp_rank=0,
        tp_size=args.ranks,
    )


def weights_of(args: EngineArgs) -> str:
    """Which weights a model and its draft have: their files, or the seed they are made with."""
    dummy = f"dummy, seed {args.random_seed}"
    if args.load_format == "dummy":  # the draft's too
        return dummy
    weights = weights_identity(resolve_model_path(args.model_path))
    draft = args.speculative_draft_model_path
    if draft is None:
        return weights
    drafts = dummy if draft == "demo" else weights_identity(resolve_model_path(draft))
    return f"{weights} {drafts}"
