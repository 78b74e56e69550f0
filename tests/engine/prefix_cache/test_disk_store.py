"""The disk tier: a fault of any kind is a miss of that entry, never a wrong answer."""

import errno
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inkling_rocm.engine.prefix_cache import entry_file
from inkling_rocm.engine.prefix_cache.disk_store import ASIDE, SUFFIX, DiskStore
from tests.engine.prefix_cache.entries import (
    FILE_BYTES,
    FINGERPRINT,
    OTHER,
    file_of,
    held,
    key_of,
    put,
    same_bits,
    tensors_of,
    warnings_in,
)

PLENTY = 1 << 30


def store_in(folder, capacity=PLENTY, fingerprint=FINGERPRINT) -> DiskStore:
    return DiskStore(folder, capacity, fingerprint)


def files_in(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_was_put_is_got_bit_by_bit_here_and_after_a_restart(tmp_path):
    store = store_in(tmp_path / "made" / "here")
    put(store, *range(5))
    assert held(store, range(7)) == list(range(5))
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.hits, stats.misses) == (5, 5 * FILE_BYTES, 5, 2)
    assert sum(file.stat().st_size for file in store.folder.iterdir()) == stats.bytes
    again = store_in(store.folder)
    assert again.stats().bytes == stats.bytes
    assert held(again, range(7)) == list(range(5))
    assert store.contains(key_of(4))
    assert not store.contains(key_of(5))


def flip(file, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(bits=st.sets(st.integers(0, FILE_BYTES * 8 - 1), min_size=1, max_size=8))
def test_flipped_bits_are_a_miss_and_the_file_goes(tmp_path, bits):
    store = store_in(tmp_path)
    put(store, 0, 1)
    for bit in bits:
        flip(file_of(store, 0), bit)
    assert held(store, [0, 1]) == [1]
    assert store.stats().corrupt == 1
    assert not store.contains(key_of(0))
    put(store, 0)
    assert held(store, [0, 1]) == [0, 1]


def test_every_bit_of_the_prefix_counts(tmp_path):
    store = store_in(tmp_path)
    prefix = entry_file.PREFIX.size + entry_file.CHECKSUM_BYTES + 8
    for bit in range(prefix * 8):
        put(store, 0)
        flip(file_of(store, 0), bit)
        assert held(store, [0]) == []
    assert store.stats().corrupt == prefix * 8


def test_without_the_checksum_a_flipped_bit_is_a_wrong_answer(tmp_path, monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(entry_file, "checksum", lambda parts: bytes(32))
    store = store_in(tmp_path)
    put(store, 0)
    flip(file_of(store, 0), FILE_BYTES * 8 - 1)
    with pytest.raises(AssertionError):
        held(store, [0])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(length=st.integers(0, FILE_BYTES - 1), longer=st.booleans())
def test_a_cut_or_lengthened_file_is_a_miss(tmp_path, length, longer):
    store = store_in(tmp_path)
    put(store, 0, 1)
    os.truncate(file_of(store, 0), FILE_BYTES + 1 + length if longer else length)
    assert held(store, [0, 1]) == [1]
    assert store.stats().corrupt == 1


def test_a_missing_file_is_a_miss_and_not_counted_as_damage(tmp_path, caplog):
    store = store_in(tmp_path)
    put(store, 0)
    file_of(store, 0).unlink()
    assert held(store, [0]) == []
    stats = store.stats()
    assert (stats.entries, stats.bytes, stats.misses, stats.corrupt) == (0, 0, 1, 0)
    assert not warnings_in(caplog)


def test_a_file_of_another_fingerprint_is_a_miss_under_any_name(tmp_path):
    foreign, store = store_in(tmp_path, fingerprint=OTHER), store_in(tmp_path)
    put(foreign, 0)
    assert held(store, [0]) == []
    assert held(foreign, [0]) == [0]
    put(store, 0)
    mine = [name for name in files_in(tmp_path) if name.startswith(FINGERPRINT[:8].hex())]
    theirs = [name for name in files_in(tmp_path) if name not in mine]
    os.replace(tmp_path / theirs[0], tmp_path / mine[0])
    assert held(store, [0]) == []
    assert store.stats().corrupt == 1
    assert files_in(tmp_path) == []


def test_without_the_comparison_another_fingerprint_is_taken(tmp_path, monkeypatch):
    """So the test above can fail."""
    monkeypatch.setattr(entry_file, "_difference", lambda got, wanted: "")
    put(store_in(tmp_path, fingerprint=OTHER), 0)
    (name,) = files_in(tmp_path)
    os.replace(tmp_path / name, tmp_path / name.replace(OTHER[:8].hex(), FINGERPRINT[:8].hex()))
    assert held(store_in(tmp_path), [0]) == [0]


def test_a_file_under_another_key_is_a_miss(tmp_path):
    store = store_in(tmp_path)
    put(store, 0, 1)
    os.replace(file_of(store, 1), file_of(store, 0))
    assert held(store, [0, 1]) == []
    assert store.stats().corrupt == 1


def test_a_name_that_cannot_be_read_is_a_miss(tmp_path, caplog):
    store = store_in(tmp_path)
    put(store, 0, 1)
    file = file_of(store, 0)
    file.unlink()
    (file / "folder").mkdir(parents=True)
    assert held(store, [0, 0, 1]) == [1]
    assert store.stats().errors == 2
    gives_none, cannot_remove = warnings_in(caplog)
    assert "gives no entry" in gives_none
    assert "cannot be removed" in cannot_remove


@pytest.mark.parametrize(
    ("number", "removed"), [(errno.EIO, True), (errno.ENOMEM, False), (errno.EAGAIN, False)]
)
def test_reading_that_fails_is_a_miss(tmp_path, monkeypatch, number, removed):
    """A broken disk costs the file; a process short of memory does not."""
    store = store_in(tmp_path)
    put(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", raising(number))
        assert held(store, [0]) == []
    assert store.stats().errors == 1
    assert held(store, [0]) == ([] if removed else [0])


def raising(number: int):
    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return fail


def test_damage_is_logged_once_and_counted_always(tmp_path, caplog):
    store = store_in(tmp_path)
    put(store, *range(4))
    for number in range(4):
        flip(file_of(store, number), 8 * FILE_BYTES - 9)
    assert held(store, range(4)) == []
    assert store.stats().corrupt == 4
    (message,) = warnings_in(caplog)
    assert "gives no entry (checksum)" in message


def test_the_capacity_is_kept_and_the_least_recently_used_goes(tmp_path):
    store = store_in(tmp_path, 4 * FILE_BYTES + 1)
    put(store, 0, 1, 2, 3)
    assert held(store, [0, 2]) == [0, 2]
    put(store, 1)  # stored already: recently used
    put(store, 4)
    assert held(store, [3]) == []
    put(store, 5)
    assert held(store, range(6)) == [1, 2, 4, 5]
    assert store.stats().evictions == 2
    assert len(files_in(tmp_path)) == 4


def test_the_order_of_use_outlives_the_process(tmp_path):
    store = store_in(tmp_path)
    put(store, 0, 1, 2, 3)
    assert held(store, [1, 0]) == [1, 0]
    smaller = store_in(tmp_path, 2 * FILE_BYTES)
    assert smaller.stats().evictions == 2
    assert held(smaller, range(4)) == [0, 1]


def test_an_entry_larger_than_the_tier_is_dropped(tmp_path):
    store = store_in(tmp_path, FILE_BYTES - 1)
    put(store, 0)
    assert store.stats().dropped == 1
    assert files_in(tmp_path) == []


def test_several_stores_share_a_folder_and_its_capacity(tmp_path):
    capacity = 40 * FILE_BYTES
    first, second = store_in(tmp_path, capacity), store_in(tmp_path, capacity, OTHER)
    for number in range(60):
        put(first, number)
        put(second, number)
        assert len(files_in(tmp_path)) <= 40 + 2 * 2  # each looks again after 1/32, two entries
    assert held(first, range(60)) == list(range(60 - len(held(first, range(60))), 60))
    assert held(second, [59]) == [59]


def test_what_another_store_wrote_is_found_and_what_it_removed_is_a_miss(tmp_path):
    first, second = store_in(tmp_path), store_in(tmp_path)
    put(first, 0)
    assert second.contains(key_of(0))
    assert held(second, [0]) == [0]
    file_of(first, 0).unlink()
    assert held(first, [0]) == []
    put(second, 0)
    assert held(first, [0]) == [0]
    file_of(first, 0).unlink()
    assert held(second, [0]) == []
    assert second.stats().errors == 0


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("x" * 1000)
    store = store_in(tmp_path, 2 * FILE_BYTES)
    put(store, 0, 1, 2)
    assert held(store, range(3)) == [1, 2]
    assert (tmp_path / "notes.txt").exists()


def test_an_unfinished_file_goes_only_when_its_writer_is_gone(tmp_path):
    store = store_in(tmp_path)
    (tmp_path / f"1-1-1{ASIDE}").write_bytes(b"half")
    with store._write_aside() as (_, aside):
        store_in(tmp_path)
        assert files_in(tmp_path) == [aside.name]


@pytest.mark.parametrize("call", ["writev", "fsync", "replace", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_no_more_drops_the_entry(tmp_path, monkeypatch, caplog, call, number):
    store = store_in(tmp_path)
    put(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, raising(number))
        put(store, 1, 2)
    assert store.stats().errors == 2
    assert len(files_in(tmp_path)) == 1
    (message,) = warnings_in(caplog)
    assert os.strerror(number) in message
    put(store, 3)
    assert held(store, range(4)) == [0, 3]


def test_a_kernel_that_stops_a_write_half_way_drops_the_entry(tmp_path):
    """RLIMIT_FSIZE makes the kernel itself write a part, then refuse."""
    script = f"""
        import os, resource
        from tests.engine.prefix_cache.entries import FINGERPRINT, held, put
        from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
        store = DiskStore({str(tmp_path)!r}, 1 << 30, FINGERPRINT)
        put(store, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES // 2}, resource.RLIM_INFINITY))
        put(store, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        put(store, 2)
        assert held(store, range(3)) == [0, 2], held(store, range(3))
        assert store.stats().errors == 1
        assert len(os.listdir({str(tmp_path)!r})) == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_a_folder_that_is_gone_loses_entries_only(tmp_path):
    store = store_in(tmp_path / "folder")
    put(store, 0)
    file_of(store, 0).unlink()
    store.folder.rmdir()
    put(store, 1)
    assert held(store, range(2)) == []
    assert store.stats().errors == 1


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        store_in(tmp_path / "file")
    with pytest.raises(ValueError, match="capacity_bytes 0 of the disk tier"):
        store_in(tmp_path, 0)
    with pytest.raises(ValueError, match="fingerprint of 3 bytes"):
        store_in(tmp_path, fingerprint=b"abc")
    with pytest.raises(ValueError, match="key of 65 bytes"):
        store_in(tmp_path).get(bytes(65))


def test_threads_write_read_and_evict_at_once(tmp_path):
    store = store_in(tmp_path, 10 * FILE_BYTES)
    failed = []

    def work(first: int) -> None:
        try:
            for number in range(first, 60, 3):
                put(store, number)
                held(store, range(number - 5, number + 1))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    stats = store.stats()
    assert (stats.corrupt, stats.errors) == (0, 0)
    on_disk = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert stats.bytes == on_disk <= 10 * FILE_BYTES
    assert all(name.endswith(SUFFIX) for name in files_in(tmp_path))
    assert same_bits(store.get(key_of(59)), tensors_of(key_of(59))) or not store.contains(
        key_of(59)
    )
