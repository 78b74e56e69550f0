"""The tests of the tiers fail when what they test is broken.

Those of the checksum, the fingerprint and writing aside stand beside their tests.
"""

import itertools
import os
from collections import OrderedDict

import pytest

from inkling_rocm.engine.prefix_cache import disk_store, store
from inkling_rocm.engine.prefix_cache.blocks import Blocks
from tests.engine.prefix_cache import test_disk_store, test_host_store
from tests.engine.prefix_cache.writer_process import InPlace


class NeverMoved(OrderedDict):
    """The order of insertion instead of that of use."""

    def move_to_end(self, key, last=True):
        pass


def test_the_order_of_use_on_disk(tmp_path, monkeypatch):
    backwards = itertools.count(10**18, -1)
    monkeypatch.setattr(disk_store, "_use", lambda file: os.utime(file, ns=(next(backwards),) * 2))
    with pytest.raises(AssertionError):
        test_disk_store.test_the_order_of_use_outlives_the_process(tmp_path)


def test_the_order_of_use_in_memory(monkeypatch):
    monkeypatch.setattr(store, "OrderedDict", NeverMoved)
    with pytest.raises(AssertionError):
        test_host_store.test_the_least_recently_used_goes_and_the_capacity_is_exact()


def test_the_capacity_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store.DiskStore, "_make_room", lambda self, size: None)
    with pytest.raises(AssertionError):
        test_disk_store.test_the_capacity_is_kept_and_the_least_recently_used_goes(tmp_path)


def test_looking_again_at_a_shared_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "RESCAN_SHARE", 1e9)
    with pytest.raises(AssertionError):
        test_disk_store.test_several_stores_share_a_folder_and_its_capacity(tmp_path)


def test_the_write_lock_of_unfinished_files(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store.fcntl, "flock", lambda fd, operation: None)
    with pytest.raises(AssertionError):
        test_disk_store.test_an_unfinished_file_goes_only_when_its_writer_is_gone(tmp_path)


def test_a_disk_that_takes_no_more(tmp_path, monkeypatch, caplog):
    """Written under the final name, half an entry stays."""
    monkeypatch.setattr(test_disk_store, "DiskStore", InPlace)
    with pytest.raises((AssertionError, OSError)):
        test_disk_store.test_a_disk_that_takes_no_more_drops_the_entry(
            tmp_path, monkeypatch, caplog, "writev", 28
        )


def test_memory_of_an_evicted_entry(monkeypatch):
    """Blocks that two entries share give wrong bits."""
    monkeypatch.setattr(Blocks, "take", lambda self, count: list(range(count)))
    monkeypatch.setattr(Blocks, "give_back", lambda self, blocks: None)
    with pytest.raises(AssertionError):
        test_host_store.test_what_was_put_is_got_bit_by_bit(64)


def test_the_entry_being_written_stays(tmp_path, monkeypatch):
    """Without its mark its memory is taken while the disk reads it."""
    monkeypatch.setattr(
        store._Entry, "__setattr__", lambda self, name, value: _not_busy(self, name, value)
    )
    with pytest.raises(AssertionError):
        test_host_store.test_nothing_waits_for_a_slow_disk_and_the_oldest_unwritten_are_dropped(
            tmp_path
        )


def _not_busy(entry, name, value) -> None:
    object.__setattr__(entry, name, False if name == "busy" else value)
