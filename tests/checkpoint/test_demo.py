"""The demo checkpoint and what a --model-path may be."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from inkling_rocm.checkpoint import allocate, demo, demo_checkpoint, load_weights
from inkling_rocm.checkpoint.demo import demo_config, resolve_model_path, user_cache_dir
from inkling_rocm.config import load_config


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, seconds of processor time that writing it took on one thread: other tests share the
    machine, and threads that wait for each other count as busy)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.thread_time()
        folder = demo_checkpoint(tmp_path_factory.mktemp("cache"))
        return folder, time.thread_time() - start
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def small_demo(monkeypatch):
    """A demo that is quick to write, for tests of the cache and not of its content."""

    def write(folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_bytes(bytes(1000))
        files = {
            name: {"bytes": (folder / name).stat().st_size, "sha256": demo._sha256(folder / name)}
            for name in ("config.json", "weights")
        }
        (folder / "demo.json").write_text(json.dumps(files))
        writes.append(folder)

    writes = []
    monkeypatch.setattr(demo, "_write", write)
    return writes


def test_size_and_time(written):
    folder, seconds = written
    assert sum(file.stat().st_size for file in folder.iterdir()) < 200e6
    assert seconds < 20


def test_it_has_everything_a_release_has(written):
    config = load_config(written[0])
    assert config == demo_config()
    assert (config.text.vocab_size, config.text.unpadded_vocab_size) == (201024, 200058)
    assert set(config.text.layer_is_local) == {True, False}
    assert set(config.text.layer_is_moe) == {True, False}
    assert config.mtp.num_blocks == 2
    assert set(config.mtp.block_is_local) == {True, False}
    assert config.eos_token_ids == (200006,)
    weights = allocate(
        config, dtype=torch.bfloat16, device="cpu", parts=("text", "mtp", "audio", "vision")
    )
    report = load_weights(written[0], config, weights, progress=False)
    assert not report.unused
    assert len(list(written[0].glob("*.safetensors"))) > 1
    assert all(weight.isfinite().all() for weight in weights.values())


def test_channel_0_is_left_alone_by_every_layer(written):
    """It carries the logits' bias, so no layer may write it."""
    config = load_config(written[0])
    weights = allocate(config, dtype=torch.bfloat16, device="cpu")
    load_weights(written[0], config, weights, progress=False)
    assert (weights["embed"][:, 0] == 4).all()
    for name, weight in weights.items():
        if name.endswith(("o_proj", "mlp.down")):
            assert (weight[0] == 0).all(), name
        elif name.endswith("w2"):
            assert (weight[:, 0] == 0).all(), name
    bias = weights["lm_head"][:, 0]
    assert bias[200006] > bias[200007] + 4
    assert bias[300] > bias[150000] + 4


@pytest.mark.full
def test_writing_it_twice_gives_the_same_bytes(written, tmp_path):
    again = demo_checkpoint(tmp_path)
    assert (again / "demo.json").read_text() == (written[0] / "demo.json").read_text()


def test_reused_when_intact(small_demo, tmp_path):
    first = demo_checkpoint(tmp_path)
    assert demo_checkpoint(tmp_path) == first
    assert len(small_demo) == 1
    assert list(tmp_path.iterdir()) == [first]  # nothing is left of the staging


def test_other_copies_are_removed_once_unused_for_a_month(small_demo, tmp_path):
    def copy(name, days, manifest):
        folder = tmp_path / name
        folder.mkdir()
        file = folder / "demo.json" if manifest else folder
        if manifest:
            file.write_text("{}")
        os.utime(file, (time.time() - days * 86400,) * 2)
        return folder

    gone = [copy("demo-1", 31, True), copy(".demo-2", 31, False)]
    kept = [copy("demo-3", 29, True), copy(".demo-4", 29, False), copy("other", 99, True)]
    kept.append(demo_checkpoint(tmp_path))
    assert not any(folder.exists() for folder in gone)
    assert all(folder.exists() for folder in kept)
    os.utime(kept[-1] / "demo.json", (0, 0))
    demo_checkpoint(tmp_path)  # it is there, and that counts as a use
    assert time.time() - (kept[-1] / "demo.json").stat().st_mtime < 60
    assert len(small_demo) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").write_bytes(bytes(999)),
        lambda folder: (folder / "weights").write_bytes(bytes(999) + b"1"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "demo.json").unlink(),
        lambda folder: (folder / "demo.json").write_text("{"),
        lambda folder: (folder / "demo.json").write_text("[]"),
        lambda folder: (folder / "demo.json").write_text("{}"),
        lambda folder: (folder / "demo.json").write_text("[" * 50_000),
        lambda folder: (folder / "model.safetensors").write_bytes(b"left over"),
    ],
)
def test_written_anew_when_damaged(small_demo, tmp_path, damage):
    folder = demo_checkpoint(tmp_path)
    damage(folder)
    assert demo_checkpoint(tmp_path) == folder
    assert len(small_demo) == 2
    assert (folder / "weights").read_bytes() == bytes(1000)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_failed_write_leaves_nothing(small_demo, tmp_path, monkeypatch):
    def fail(folder):
        folder.mkdir()
        (folder / "weights").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(demo, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_writers_at_once(small_demo, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(demo_checkpoint, [tmp_path] * 8))
    assert len(folders) == 1
    assert list(tmp_path.iterdir()) == list(folders)


def test_another_config_gets_another_folder(small_demo, tmp_path, monkeypatch):
    first = demo_checkpoint(tmp_path)
    monkeypatch.setattr(demo, "_VERSION", demo._VERSION + 1)
    assert demo_checkpoint(tmp_path) != first


@pytest.mark.skipif(sys.platform != "linux", reason="another platform's folder")
def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "inkling-rocm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_dir() == Path.home() / ".cache" / "inkling-rocm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == Path.home() / ".cache" / "inkling-rocm"


@pytest.mark.parametrize(
    ("platform", "variable", "wanted"),
    [("darwin", None, "Library/Caches"), ("win32", "local", "local")],
)
def test_cache_folder_elsewhere(monkeypatch, tmp_path, platform, variable, wanted):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    if variable:
        monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / variable))
    assert user_cache_dir() == tmp_path / wanted / "inkling-rocm"


def test_resolve_demo(small_demo, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model_path("demo")
    assert folder.parent == tmp_path / "inkling-rocm"
    assert (folder / "config.json").exists()


def test_resolve_a_folder(checkpoint):
    assert resolve_model_path(checkpoint) == checkpoint
    assert resolve_model_path(str(checkpoint) + os.sep) == checkpoint


def test_resolve_refusals(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"hf download org/Model --local-dir Model"):
        resolve_model_path("org/Model")
    with pytest.raises(FileNotFoundError, match=r'no such folder; pass the folder .* or "demo"'):
        resolve_model_path(tmp_path / "nowhere" / "else")
    with pytest.raises(NotADirectoryError, match="is a file"):
        resolve_model_path(checkpoint / "config.json")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        resolve_model_path(tmp_path)
