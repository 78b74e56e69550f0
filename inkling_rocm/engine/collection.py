"""Garbage collection where it disturbs: while a graph is recorded, and between decode steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_pauses = threading.Lock()
_paused = 0  # pauses that have begun and not ended, in any thread
_resumes = False  # whether garbage was collected before the first of them


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection, in any thread: it may come upon another engine's graphs or pinned
    memory, and freeing those ends a capture in this thread. Engines may be captured side by side:
    collection goes on when the last of them is done."""
    global _paused, _resumes
    with _pauses:
        if not _paused:
            _resumes = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _pauses:
            _paused -= 1
            if not _paused and _resumes:
                gc.enable()


@contextmanager
def short_collections(device: torch.device) -> Iterator[None]:
    """What is there already is not looked at by garbage collections: a full one walks the million
    objects that torch's import leaves, for a fifth of a second in which no step is started. On a
    CPU, whose steps are long, nothing changes."""
    if device.type == "cpu":
        yield
        return
    with _pauses:
        if not _paused:  # a collection asked for is not held by gc.disable()
            gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
