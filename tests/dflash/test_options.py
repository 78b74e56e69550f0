"""From `--speculative-*` to a loaded draft, or to a message that says what to change."""

import json
from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.dflash import dflash_json, random_dflash, write_random_dflash
from inkling_rocm.checkpoint.released_config import released_config
from inkling_rocm.engine import Engine, EngineArgs, SamplingParams
from inkling_rocm.engine.load import load_parts
from inkling_rocm.engine.memory import plan_memory
from tests.engine.tiny import tiny_config

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def released(config=None):
    config = config or tiny_config()
    local = replace(config.text.local_attention, log_alpha=0.3)  # config.json has one for both
    return released_config(replace(config, text=replace(config.text, local_attention=local)))


@pytest.fixture
def folder(tmp_path):
    """A target's folder without weights."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(released()))
    return folder


def args(folder, draft, **fields):
    fields = {"speculative_algorithm": "DFLASH", "load_format": "dummy", "device": "cpu"} | fields
    return EngineArgs(
        model_path=str(folder),
        speculative_draft_model_path=str(draft),
        skip_tokenizer_init=True,
        **fields,
    )


def outputs(engine_args):
    with Engine(engine_args) as engine:
        handle = engine.submit(PROMPT, GREEDY)
        return [token for update in handle for token in update.token_ids]


def test_a_dummy_target_with_any_draft(folder, tmp_path, monkeypatch):
    plain = EngineArgs(
        model_path=str(folder), load_format="dummy", device="cpu", skip_tokenizer_init=True
    )
    want = outputs(plain)
    assert outputs(args(folder, "demo")) == want
    config = random_dflash(tiny_config().text, block_size=4)
    draft = write_random_dflash(tmp_path / "draft", config)
    assert outputs(args(folder, draft)) == want
    (tmp_path / "alone.json").write_text(json.dumps(dflash_json(config)))
    assert outputs(args(folder, tmp_path / "alone.json")) == want
    monkeypatch.setenv("HOME", str(tmp_path))
    assert outputs(args("~/target/config.json", "~/alone.json")) == want


def test_weights_are_read_from_the_draft(folder, tmp_path):
    config = random_dflash(tiny_config().text)
    draft = write_random_dflash(tmp_path / "draft", config, seed=9)
    dummy = load_parts(args(folder, draft)).block_draft
    target = load_parts(args(folder, draft))
    from inkling_rocm.checkpoint.export import export_checkpoint

    export_checkpoint(target.config, target.model.weights, tmp_path / "whole")
    loaded = load_parts(args(tmp_path / "whole", draft, load_format="auto")).block_draft
    assert loaded.config == dummy.config == config
    assert not torch.equal(loaded.weights["fc"], dummy.weights["fc"])
    assert loaded.weights["fc"].dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculative_draft_model_path": None}, "needs speculative_draft_model_path"),
        ({"speculative_num_steps": 3}, "drafts a block in one step"),
        ({"speculative_num_draft_tokens": 1}, "wanted at least 2"),
        ({"speculative_eagle_topk": 4}, "not a tree"),
        ({"speculative_algorithm": "EAGLE"}, "inside the model's own checkpoint"),
        ({"speculative_algorithm": None}, "means nothing without speculative_algorithm"),
        ({"speculative_algorithm": "DSPARK"}, "choose from EAGLE, DFLASH"),
    ],
)
def test_arguments_that_contradict(fields, message):
    fields = {
        "speculative_algorithm": "DFLASH", "speculative_draft_model_path": "demo", **fields
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        EngineArgs(model_path="x", **fields)


def test_drafts_that_do_not_fit(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_parts(args(folder, tmp_path / "nothing"))
    with pytest.raises(ValueError, match="made for blocks of 8"):
        load_parts(args(folder, "demo", speculative_num_draft_tokens=9))
    other = replace(random_dflash(tiny_config().text), hidden_size=64)
    (tmp_path / "other.json").write_text(json.dumps(dflash_json(other)))
    with pytest.raises(ValueError, match="hidden_size is 64, the target's is 32"):
        load_parts(args(folder, tmp_path / "other.json"))
    windows = tiny_config(layer_is_local=(True, True, True))
    (folder / "config.json").write_text(json.dumps(released(windows)))
    with pytest.raises(ValueError, match="this model has none"):
        load_parts(args(folder, "demo"))


def test_the_plan_has_room_for_the_draft():
    text, gib = tiny_config().text, 1 << 30
    settings = {"dtype": torch.float32, "device": torch.device("cpu"), "free": gib}
    fields = {"model_path": "x", "mem_fraction_static": 0.01, "max_running_requests": 200}
    engine_args = EngineArgs(**fields, context_length=512)
    plain = plan_memory(text, engine_args, **settings)
    block = plan_memory(text, engine_args, block_drafts=7, block_token_bytes=1024, **settings)
    assert (plain.most_drafts, plain.draft_tokens) == (0, 0)
    assert (block.most_drafts, block.draft_tokens) == (7, 7)
    assert 1 < block.global_pages < plain.global_pages


@pytest.mark.full
def test_two_ranks_draft_as_one(tmp_path):
    """Both hold all of the draft, share embedding and head, and are told what was drawn."""
    config = tiny_config()
    moe = replace(config.text.moe, num_experts=8)
    folder = tmp_path / "even"
    folder.mkdir()
    even = replace(config, text=replace(config.text, moe=moe))
    (folder / "config.json").write_text(json.dumps(released(even)))
    one = outputs(args(folder, "demo"))
    assert outputs(args(folder, "demo", tp_size=2, dist_timeout=60)) == one
