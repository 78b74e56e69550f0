"""The tiers behind the tree of a real model: what was given up comes back bit by bit, what is lost
or damaged is computed again, and what is wrong would be seen."""

import pytest
import torch

from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.engine import engine as engine_module
from inkling_rocm.engine.prefix_cache.checks import check_books
from inkling_rocm.engine.prefix_cache.disk_store import SUFFIX
from tests.engine.prefix_cache.test_hits import ask, branch, cold, prompt_of
from tests.engine.test_numerics import assert_close
from tests.engine.tiny import tiny_engine, tiny_mtp_config, whole_logits

PROMPT = prompt_of(70)
ARGS = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "enable_hierarchical_cache": True,
    "hicache_size": 0.01,
    "load_format": "dummy",
}


def disk(folder):
    return {"hicache_storage_backend": "file", "hicache_storage_dir": str(folder)}


def push_out(engine):
    """Other prompts until the device has nothing of PROMPT."""
    cache = engine._core.scheduler.cache
    for salt in range(1, 40):
        ask(engine, prompt_of(60, salt))
        if cache.tree.match(PROMPT, 69)[1] is cache.tree.root:
            return
    raise AssertionError("it is still there")


@pytest.fixture(scope="module")
def want():
    return cold(PROMPT, page_size=16, chunked_prefill_size=64)


@pytest.mark.parametrize("short", [{"max_total_tokens": 96}, {"prefix_snapshots": 3}])
def test_what_was_given_up_comes_back(want, short):
    with tiny_engine(**ARGS, **short) as engine:
        ask(engine, PROMPT)
        push_out(engine)
        tokens, logits, cached = ask(engine, PROMPT)
        assert cached == 64
        assert tokens == want[0]
        assert torch.equal(logits, want[1])
        assert engine.stats().prefix_cache.tiers.loads == 1
        check_books(engine._core.scheduler.cache, ())


def test_a_longer_prefix_than_the_tree_has(want):
    """Its beginning is on the device, its end in the host tier."""
    with tiny_engine(**ARGS, prefix_snapshots=2) as engine:
        ask(engine, PROMPT)
        for _ in range(3):
            ask(engine, branch(PROMPT, 36))
        cache = engine._core.scheduler.cache
        _, deepest = cache.tree.match(PROMPT, 69)
        assert 0 < deepest.depth < 4
        tokens, logits, cached = ask(engine, PROMPT)
    assert cached == 64
    assert tokens == want[0]
    assert_close(logits, want[1])


def test_after_a_restart(want, tmp_path):
    with tiny_engine(**ARGS, **disk(tmp_path)) as engine:
        ask(engine, PROMPT)
    with tiny_engine(**ARGS, **disk(tmp_path)) as engine:
        tokens, logits, cached = ask(engine, PROMPT)
        assert cached == 64
        assert tokens == want[0]
        assert torch.equal(logits, want[1])
        assert engine.stats().prefix_cache.tiers.disk.hits > 0
    with tiny_engine(**ARGS, **disk(tmp_path), random_seed=1) as engine:
        assert ask(engine, PROMPT)[2] == 0, "other weights"


@pytest.mark.parametrize("what", ["put", "get"])
def test_no_memory_for_a_copy_costs_the_entry_only(want, what, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("planted")

    with tiny_engine(**ARGS, prefix_snapshots=3) as engine:
        ask(engine, PROMPT)
        cache = engine._core.scheduler.cache
        monkeypatch.setattr(cache.tiers.store, what, full)
        push_out(engine)
        tokens, _, cached = ask(engine, PROMPT)
        assert (tokens, cached) == (want[0], 0)
        assert engine.failure is None
        check_books(cache, ())


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_lost_file_is_computed_again(want, how, tmp_path):
    with tiny_engine(**ARGS, **disk(tmp_path)) as engine:
        ask(engine, PROMPT)
    files = sorted(tmp_path.rglob(f"*{SUFFIX}"))
    assert len(files) >= 6
    for number, file in enumerate(files):
        kept = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(kept[:-40] + bytes(8) + kept[-32:])
        with tiny_engine(**ARGS, **disk(tmp_path)) as engine:
            tokens, logits, cached = ask(engine, PROMPT)
        assert cached in (0, 16, 32, 48, 64), number
        assert tokens == want[0]
        assert_close(logits, want[1])
        file.write_bytes(kept)


def test_wrong_entries_would_be_seen(want):
    with tiny_engine(**ARGS, prefix_snapshots=3) as engine:
        ask(engine, PROMPT)
        push_out(engine)
        store = engine._core.scheduler.cache.tiers.store
        get = store.get

        def zeros(*args):
            return {name: torch.zeros_like(x) for name, x in get(*args).items()}

        store.get = zeros
        _, logits, cached = ask(engine, PROMPT)
        store.get = get
    assert cached == 64
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(logits[:1], want[1][:1])


def test_draft_blocks_state_comes_back():
    config = tiny_mtp_config()
    with tiny_engine(config, **ARGS, prefix_snapshots=3, speculative_num_steps=3) as engine:
        ask(engine, PROMPT)
        push_out(engine)
        tokens, logits, cached = ask(engine, PROMPT)
        assert cached == 64
        again = ask(engine, PROMPT)
    assert again[0] == tokens
    assert_close(logits[:1], whole_logits(PROMPT, config)[-1:])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hicache_size": 1.0}, "wanted only with enable_hierarchical_cache"),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": True}, "leave it out"),
        ({"enable_hierarchical_cache": True, "tp_size": 2}, "2 ranks"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "nixl"}, 'only "file"'),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, "both"),
        ({"enable_hierarchical_cache": True, "hicache_storage_size": 5.0}, "storage_size 5.0: wa"),
        ({"enable_hierarchical_cache": True, "hicache_size": -1.0}, "more than 0"),
        ({"enable_hierarchical_cache": True, "hicache_size": float("nan")}, "more than 0"),
        (
            {
                "enable_hierarchical_cache": True,
                "hicache_storage_backend": "file",
                "hicache_storage_dir": "x",
                "hicache_storage_size": float("inf"),
            },
            "more than 0",
        ),
    ],
)
def test_refusals(args, message):
    with pytest.raises(ValueError, match=message):
        EngineArgs(model_path="x", **args)


def test_a_folder_that_cannot_be_used_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(engine_module, "load_parts", lambda args: pytest.fail("loaded"))
    with pytest.raises(OSError, match=r"hicache_storage_dir .*file/sub: .*; name a folder this"):
        Engine(
            EngineArgs(
                model_path="demo", enable_hierarchical_cache=True, **disk(tmp_path / "file" / "sub")
            )
        )


def test_a_folder_may_be_named_from_the_users_own(tmp_path, monkeypatch):
    """A shell leaves --hicache-storage-dir=~/kept as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with tiny_engine(**ARGS, **disk("~/kept")) as engine:
        ask(engine, PROMPT)
    assert list((tmp_path / "kept").glob(f"*{SUFFIX}"))
