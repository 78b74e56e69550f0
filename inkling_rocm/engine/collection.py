"""Garbage collection where it disturbs: while a graph is recorded, and between decode steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection: it may come upon another engine's graphs or pinned memory, and freeing
    those ends a capture in this thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def short_collections(device: torch.device) -> Iterator[None]:
    """What is there already is not looked at by garbage collections: a full one walks the million
    objects that torch's import leaves, for a fifth of a second in which no step is started. On a
    CPU, whose steps are long, nothing changes."""
    if device.type == "cpu":
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
