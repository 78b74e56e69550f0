"""The disk tier among processes: killed while they write, and writing the same keys."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inkling_rocm.engine.prefix_cache.disk_store import ASIDE, DiskStore
from tests.engine.prefix_cache.entries import FINGERPRINT, key_of, same_bits
from tests.engine.prefix_cache.writer_process import CONTENTS, PLENTY, content_of

MOST_AWAITED, LONGEST_WAIT_S = 4, 0.02
ROUND = 1000  # entries of one process are numbered from a multiple of this


@pytest.fixture(scope="module")
def writer():
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.prefix_cache.writer_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield process
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def begin(process, folder: Path, first: int, mode: str = "aside") -> int:
    """Let a process write from a number on; returns its id."""
    process.stdin.write(f"{mode} {first} {folder}\n".encode())
    process.stdin.flush()
    _, pid = process.stdout.readline().split()
    return int(pid)


def end(process, pid: int) -> list[int]:
    """Kill it; returns what it said was stored and was not read yet."""
    os.kill(pid, signal.SIGKILL)
    stored = []
    while (line := process.stdout.readline()) != b"ended\n":
        stored.append(int(line))
    return stored


def lives_of(process, folder: Path, kills: int, mode: str) -> tuple[list[list[int]], int]:
    """What each of several processes stored before it was killed, a random time after a random
    number of entries, and how many unfinished files the kills left."""
    rng = random.Random(kills)
    lives, unfinished = [], set()
    for turn in range(kills):
        pid = begin(process, folder, turn * ROUND, mode)
        stored = [int(process.stdout.readline()) for _ in range(rng.randrange(MOST_AWAITED))]
        time.sleep(rng.uniform(0, LONGEST_WAIT_S))
        lives.append(stored + end(process, pid))
        unfinished |= {file.name for file in folder.glob(f"*{ASIDE}")}
    return lives, len(unfinished)


def check(folder: Path, lives: list[list[int]]) -> None:
    """Whatever was said to be stored is there and right; the one under way is right or absent."""
    store = DiskStore(folder, PLENTY, FINGERPRINT)
    assert not list(folder.glob(f"*{ASIDE}"))
    contents = [content_of(number) for number in range(CONTENTS)]
    for turn, stored in enumerate(lives):
        assert stored == list(range(turn * ROUND, turn * ROUND + len(stored)))
        for number in stored:
            assert same_bits(store.get(key_of(number)), contents[number % CONTENTS])
        number = turn * ROUND + len(stored)
        got = store.get(key_of(number))
        assert got is None or same_bits(got, contents[number % CONTENTS])
        assert store.get(key_of(number + 1)) is None
    assert (store.stats().corrupt, store.stats().errors) == (0, 0)


def kill_often(writer, folder: Path, kills: int) -> None:
    lives, unfinished = lives_of(writer, folder, kills, "aside")
    assert sum(map(len, lives)) > kills
    assert unfinished > kills // 10, "the kills did not meet writes"
    check(folder, lives)


def test_a_killed_process_loses_nothing_but_the_entry_it_was_writing(writer, tmp_path):
    kill_often(writer, tmp_path, 20)


@pytest.mark.full
def test_many_killed_processes_lose_nothing_but_what_they_were_writing(writer, tmp_path):
    kill_often(writer, tmp_path, 500)


def test_writing_in_place_would_not_survive_kills(writer, tmp_path):
    """So the test above can fail."""
    lives, _ = lives_of(writer, tmp_path, 20, "in-place")
    with pytest.raises(AssertionError):
        check(tmp_path, lives)


def test_two_processes_write_the_same_keys(writer, tmp_path):
    count = 30
    store = DiskStore(tmp_path, PLENTY, FINGERPRINT)
    contents = [content_of(number) for number in range(CONTENTS)]
    pid = begin(writer, tmp_path, 0)
    for number in range(count):
        store.put(key_of(number), contents[number % CONTENTS])
        assert same_bits(store.get(key_of(number)), contents[number % CONTENTS])
    while int(writer.stdout.readline()) < count:
        pass
    end(writer, pid)
    for number in range(count):
        assert same_bits(store.get(key_of(number)), contents[number % CONTENTS])
    assert (store.stats().corrupt, store.stats().errors) == (0, 0)
