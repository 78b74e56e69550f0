"""Several ranks give the tokens of one; a rank that ends takes the engine with it, and says so."""

import io
import json
import os
import pickle
import queue
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch

from inkling_rocm.checkpoint.released_config import released_config
from inkling_rocm.engine import (
    Engine,
    EngineArgs,
    RequestError,
    SamplingParams,
    follower,
    load,
    ranks,
)
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.ranks import RankLost
from tests.engine.tiny import tiny_config, tiny_mtp_config

PROMPTS = [[(11 * i + 5 * salt + 3) % 150 for i in range(length)] for salt, length in
           enumerate((3, 40, 17, 1))]  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=10, seed=5, top_k=20, repetition_penalty=1.3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder without weights: both layer kinds, dense and MoE layers; 2 kv heads in
    the local layers and 1 in the global one, so TP2 replicates the latter and TP4 both."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(released_config(even_experts())))
    return folder


def even_experts():
    """The tiny model with 8 experts, which 2 and 4 ranks can share."""
    config = tiny_config()
    moe = replace(config.text.moe, num_experts=8)
    local = replace(config.text.local_attention, log_alpha=0.3)  # config.json has one for both
    text = replace(config.text, moe=moe, local_attention=local)
    return replace(config, text=text, mtp=tiny_mtp_config().mtp)


def engine(folder, **args) -> Engine:
    settings = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "page_size": 16,
        "max_running_requests": 3,
        "chunked_prefill_size": 16,
        "random_seed": 3,
        "dist_timeout": 60,
        "check_invariants": True,
        **args,
    }
    return Engine(EngineArgs(model_path=str(folder), **settings))


def answers(running: Engine) -> list:
    """Tokens of prompts together in a batch, greedy and drawn, and forked continuations."""
    handles = [running.submit(prompt, GREEDY) for prompt in PROMPTS]
    handles.append(running.submit(PROMPTS[1], DRAWN))
    handles.append(running.submit(PROMPTS[2], replace(DRAWN, n=2)))
    found = []
    for handle in handles:
        updates = list(handle)
        assert all(u.error is None for u in updates), [u.error for u in updates]
        by_index = {}
        for update in updates:
            by_index.setdefault(update.index, []).extend(update.token_ids)
        found.append(by_index)
    return found


@pytest.mark.parametrize("rejection", [False, True])
def test_speculation(folder, alone, rejection):
    """The ranks agree on drafts and on what is accepted; shards of the draft blocks add up."""
    settings = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2}
    settings["speculative_use_rejection_sampling"] = rejection
    with engine(folder, **settings) as running:
        want = answers(running)
    if not rejection:
        assert want == alone[0]
    with engine(folder, tp_size=2, **settings) as running:
        assert answers(running) == want


@pytest.fixture(scope="module")
def alone(folder):
    with engine(folder) as running:
        return answers(running), running.prompt_logits(PROMPTS[1])


@pytest.mark.parametrize(
    ("tp", "ep"), [(2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.full),
                   pytest.param(4, 4, marks=pytest.mark.full)]
)  # fmt: skip
def test_ranks_agree_with_one(folder, alone, tp, ep):
    with engine(folder, tp_size=tp, ep_size=ep) as running:
        tokens = answers(running)
        logits = running.prompt_logits(PROMPTS[1])
    assert tokens == alone[0]
    torch.testing.assert_close(logits, alone[1], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lost_rank_ends_the_engine_with_the_reason(folder):
    running = engine(folder, tp_size=2)
    try:
        handle = running.submit(PROMPTS[0], replace(GREEDY, max_new_tokens=400))
        updates = iter(handle)
        next(updates)
        (process,) = running._ranks._processes
        os.kill(process.pid, signal.SIGKILL)
        begin = time.monotonic()
        last = list(updates)[-1]
        assert time.monotonic() - begin < 30
        assert last.finish_reason == "error"
        assert "rank 1" in last.error
        assert "-9" in last.error
        with pytest.raises(RequestError, match="rank 1"):
            running.submit(PROMPTS[0], GREEDY)
    finally:
        running.shutdown()


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_never_starts_is_named_with_its_log(folder, early, monkeypatch):
    """It ends before it is told anything, or before it says that it is ready."""
    started = []

    class Broken(subprocess.Popen):
        def __init__(self, command, **pipes):
            code = (
                "import sys; sys.exit(7)" if early else "import sys; sys.stdin.read(1); sys.exit(7)"
            )
            super().__init__([command[0], "-c", code], **pipes)
            started.append(self)
            if early:
                self.wait()

    monkeypatch.setattr(ranks.subprocess, "Popen", Broken)
    with pytest.raises(RankLost, match=r"rank 1 .* exit code 7; its log is on .* standard error"):
        engine(folder, tp_size=2)
    assert all(process.poll() is not None for process in started)


def test_followers_end_with_the_engine(folder):
    running = engine(folder, tp_size=2)
    (process,) = running._ranks._processes
    assert process.poll() is None
    running.shutdown()
    assert process.poll() == 0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("lost", [0, 1, 2000])
def test_a_follower_ends_with_a_rank_0_that_is_killed(lost, monkeypatch):
    """Between two messages, or while it writes one: the pipe ends in the middle of it."""
    first, second = pickle.dumps("plan"), pickle.dumps(list(range(5000)))
    inbox = queue.SimpleQueue()

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(follower.os, "_exit", ended)
    cut = second[: len(second) - lost] if lost else b""
    with pytest.raises(SystemExit) as end:
        follower._read(io.BytesIO(first + cut), inbox)
    assert end.value.code == 0
    assert inbox.get_nowait() == "plan"
    assert inbox.empty()


def test_steps_and_graphs_end_before_the_group(folder, monkeypatch):
    """NCCL waits for graphs that use it; followers that are gone finish no step."""
    order = []

    def noted(owner, name):
        original = getattr(owner, name)

        def call(*args):
            order.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    running = engine(folder, tp_size=2)
    noted(LocalExecutor, "finish")
    noted(LocalExecutor, "release")
    noted(torch.distributed, "destroy_process_group")
    running.shutdown()
    assert order == ["finish", "release", "destroy_process_group"]


def test_a_rank_uses_its_own_gpu_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(load, "choose_device", lambda name: asked.append(name))
    for rank in range(2):
        load.rank_device(EngineArgs(model_path="x", tp_size=2), rank)
    assert asked == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tp_size": 3}, "4 query heads"),
        ({"tp_size": 8}, "4 query heads"),
        ({"tp_size": 2, "ep_size": 3}, "ep_size 3"),
        ({"tp_size": 2, "rank_slice": 2}, "leave out tp_size"),
        ({"tp_size": 2, "model_path": "/nonexistent"}, "nonexistent"),
        ({"json_model_override_args": "[1]"}, "wanted an object"),
    ],
)
def test_refusals_have_reasons(folder, args, message):
    args = dict(args)
    path = args.pop("model_path", folder)
    with pytest.raises((ValueError, OSError), match=message):
        engine(path, **args).shutdown()
    assert not torch.distributed.is_initialized()


def test_rank_slice_has_one_ranks_weights_and_says_what_it_is(folder, caplog):
    with engine(folder, rank_slice=2, json_model_override_args='{"num_hidden_layers": 2}') as run:
        assert run.config.text.num_layers == 2
        assert "meaningless" in run.model_name
        assert "meaningless" in caplog.text
        model = run._core.executor.model
        assert model.weights["lm_head"].shape[0] == run.config.text.vocab_size // 2
        (update,) = list(run.submit(PROMPTS[1], GREEDY, stream=False))
        assert len(update.token_ids) == GREEDY.max_new_tokens
