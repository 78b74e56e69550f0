"""Whatever decides the bits of K/V changes the fingerprint."""

import os
from dataclasses import fields, replace

from inkling_rocm.engine import EngineArgs
from inkling_rocm.engine.prefix_cache.fingerprint import StateFingerprint, weights_identity
from inkling_rocm.engine.prefix_cache.open_tiers import weights_of

FACTS = StateFingerprint(
    model="{}",
    weights="abc",
    variants="torch",
    dtype="bfloat16",
    page_size=64,
    ring_rows=3,
    lookahead=0,
    tp_rank=0,
    tp_size=1,
)


def test_every_fact_counts_and_the_same_facts_agree():
    changed = [
        replace(FACTS, **{f.name: "other" if f.type == "str" else 7}).digest()
        for f in fields(FACTS)
    ]
    assert len({FACTS.digest(), *changed}) == len(changed) + 1
    assert replace(FACTS).digest() == FACTS.digest()
    assert len(FACTS.digest()) == 32


def test_weights_are_known_by_their_files(tmp_path):
    (tmp_path / "part").mkdir()
    first, second = tmp_path / "a.safetensors", tmp_path / "part" / "b.safetensors"
    first.write_bytes(b"123")
    second.write_bytes(b"456")
    before = weights_identity(tmp_path)
    (tmp_path / "log.txt").write_text("something else")
    assert weights_identity(tmp_path) == before
    os.utime(second, ns=(1, 1))
    touched = weights_identity(tmp_path)
    second.write_bytes(b"4567")
    os.utime(second, ns=(1, 1))
    grown = weights_identity(tmp_path)
    second.rename(tmp_path / "part" / "c.safetensors")
    assert len({before, touched, grown, weights_identity(tmp_path)}) == 4


def test_drafts_are_told_apart(tmp_path, monkeypatch):
    """By their files wherever the path begins, those without files by the seed of their weights."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("model", "one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "weights.safetensors").write_text(name)

    def weights(draft, **fields):
        given = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": draft, **fields}
        return weights_of(EngineArgs(model_path="~/model", **given))

    assert weights("~/one") != weights("~/two")
    assert weights("~/one") == weights(str(tmp_path / "one"))
    assert weights("demo", random_seed=1) != weights("demo", random_seed=2)
    assert weights("~/one", random_seed=1) == weights("~/one", random_seed=2)
    dummy = {"load_format": "dummy"}
    assert weights("~/one", random_seed=1, **dummy) != weights("~/one", random_seed=2, **dummy)
    assert weights("~/one/config.json", **dummy)
