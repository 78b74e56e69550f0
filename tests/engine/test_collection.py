"""When garbage is not collected, and what of it stays."""

import gc
import threading
import weakref
from contextlib import suppress

import pytest
import torch

from inkling_rocm.engine.collection import collection_paused, short_collections


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_meanwhile(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with suppress(RuntimeError), collection_paused():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_two_engines_pause_it_at_once(enabled):
    """The one that ends first does not switch collection on under the other."""
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    inside, leave = threading.Event(), threading.Event()

    def longer():
        with collection_paused():
            inside.set()
            leave.wait()

    other = threading.Thread(target=longer)
    try:
        with collection_paused():
            other.start()
            inside.wait()
        assert not gc.isenabled()
        leave.set()
        other.join()
        assert gc.isenabled() == enabled
    finally:
        leave.set()
        (gc.enable if was else gc.disable)()


class Cycle:
    def __init__(self):
        self.me = self


def test_what_was_there_is_left_alone_until_the_end():
    old = weakref.ref(Cycle())  # garbage: collected before
    kept = Cycle()
    seen = weakref.ref(kept)
    with short_collections(torch.device("meta")):
        assert old() is None
        assert gc.get_freeze_count() > 1000
        new = weakref.ref(Cycle())
        del kept
        gc.collect()
        assert new() is None
        assert seen() is not None
    gc.collect()
    assert seen() is None


def test_nothing_changes_on_a_cpu():
    with short_collections(torch.device("cpu")):
        assert gc.get_freeze_count() == 0
