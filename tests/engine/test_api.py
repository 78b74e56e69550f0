"""The Python API: SGLang's dictionaries, streaming, handles, asyncio, threads."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from inkling_rocm.engine import RequestError, SamplingParams, TokenLogprob
from tests.engine.api import GREEDY, reference
from tests.engine.history_model import (
    ByteTokenizer,
    history_engine,
    history_logits,
)


def test_one_prompt_one_dictionary(engine):
    result = engine.generate("Hello", GREEDY)
    ids = reference(list(b"Hello"), max_new_tokens=8)
    assert result["output_ids"] == ids
    assert result["text"] == ByteTokenizer().decode([i for i in ids if i < 256])
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 8, 0)
    assert isinstance(meta["id"], str)
    assert meta["e2e_latency"] > 0
    assert "output_token_logprobs" not in meta


def test_lists_of_prompts_parameters_and_names(engine):
    results = engine.generate(
        ["a", "bc"], [GREEDY, {**GREEDY, "max_new_tokens": 2}], rid=["first", "second"]
    )
    assert [r["meta_info"]["id"] for r in results] == ["first", "second"]
    assert [len(r["output_ids"]) for r in results] == [8, 2]
    (single,) = engine.generate(input_ids=[[97]], sampling_params=GREEDY)
    assert single["output_ids"] == results[0]["output_ids"]
    with pytest.raises(RequestError, match="1 given for 2 prompts"):
        engine.generate(["a", "b"], [GREEDY])


def test_continuations_come_flat(engine):
    results = engine.generate(["a", "b"], {"n": 2, "max_new_tokens": 3, "sampling_seed": 1})
    assert len(results) == 4
    assert results[0]["meta_info"]["id"] == results[1]["meta_info"]["id"]
    assert results[0]["output_ids"] != results[1]["output_ids"]


def test_logprobs(engine):
    prompt = list(b"Hello")
    result = engine.generate(
        "Hello",
        {**GREEDY, "frequency_penalty": 1.5},
        return_logprob=True,
        top_logprobs_num=3,
        logprob_start_len=0,
    )
    meta, tokens = result["meta_info"], prompt + result["output_ids"]
    expected = [history_logits(tokens[:i]).double().log_softmax(-1) for i in range(1, len(tokens))]
    assert meta["input_token_logprobs"][0] == (None, prompt[0], None)
    assert meta["input_top_logprobs"][0] is None
    entries = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    assert len(entries) == len(tops) == len(expected)
    for (logprob, token, _), top, wanted, real in zip(
        entries, tops, expected, tokens[1:], strict=True
    ):
        assert token == real
        assert logprob == pytest.approx(wanted[token].item(), abs=1e-5)
        assert [t for _, t, _ in top] == wanted.topk(3).indices.tolist()
    later = engine.generate("Hello", GREEDY, return_logprob=True, logprob_start_len=3)
    assert [x[1] for x in later["meta_info"]["input_token_logprobs"]] == prompt[3:]
    none = engine.generate("Hello", GREEDY, return_logprob=True)
    assert none["meta_info"]["input_token_logprobs"] == []
    assert len(none["meta_info"]["output_token_logprobs"]) == 8


def test_streaming_is_cumulative_and_ends_like_the_whole(engine):
    whole = engine.generate("Hello", GREEDY, return_logprob=True)
    parts = list(engine.generate("Hello", GREEDY, return_logprob=True, stream=True))
    assert [len(p["output_ids"]) for p in parts] == list(range(1, 9))
    for key in ("text", "output_ids"):
        assert parts[-1][key] == whole[key]
        assert all(whole[key][: len(p[key])] == p[key] for p in parts)
    assert [p["meta_info"]["finish_reason"] for p in parts[:-1]] == [None] * 7
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "length"
    logprobs = [p["meta_info"]["output_token_logprobs"] for p in (parts[-1], whole)]
    assert logprobs[0] == logprobs[1]


def test_streaming_a_batch_says_which(engine):
    last = {}
    for part in engine.generate(["a", "bc"], {**GREEDY, "n": 2}, stream=True):
        last[part["index"]] = part
    assert set(last) == {0, 1, 2, 3}
    assert last[2]["output_ids"] == reference(list(b"bc"), max_new_tokens=8)


def test_leaving_a_stream_aborts(engine):
    stream = engine.generate("Hello", {**GREEDY, "max_new_tokens": 200}, stream=True)
    next(stream)
    stream.close()
    assert _wait_idle(engine)


async def test_async_forms(engine):
    whole = engine.generate("Hello", GREEDY)
    result = await engine.async_generate("Hello", GREEDY)
    assert result["output_ids"] == whole["output_ids"]
    parts = [p async for p in await engine.async_generate("Hello", GREEDY, stream=True)]
    assert parts[-1]["output_ids"] == whole["output_ids"]
    many = await asyncio.gather(
        *(engine.async_generate(input_ids=[i], sampling_params=GREEDY) for i in range(12))
    )
    assert [m["output_ids"] for m in many] == [reference([i], max_new_tokens=8) for i in range(12)]


async def test_cancelling_aborts(engine):
    task = asyncio.create_task(engine.async_generate("Hello", {**GREEDY, "max_new_tokens": 240}))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(_wait_idle, engine)


def _wait_idle(engine):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not engine._thread.open and engine._core.idle:
            return True
        time.sleep(0.005)
    return False


async def test_an_interrupted_wait_loses_nothing(engine):
    handle = engine.submit([5], SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True))
    ids = []
    while True:
        try:
            update = await asyncio.wait_for(anext(handle), 0.0005)
        except TimeoutError:
            continue
        except StopAsyncIteration:
            break
        ids += update.token_ids
    assert ids == reference([5], max_new_tokens=30)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_waiting_prompt_does_not_hold_up_another(asynchronous):
    """One that runs is read to its end while the other is still queued."""
    long = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    with history_engine(max_running_requests=1) as engine:
        given = {"input_ids": [[1], [2]], "sampling_params": long, "stream": True}
        if asynchronous:

            async def collect():
                return [part["index"] async for part in await engine.async_generate(**given)]

            order = asyncio.run(collect())
        else:
            order = [part["index"] for part in engine.generate(**given)]
    assert order == sorted(order)
    assert set(order) == {0, 1}


def test_updates_of_a_handle(engine):
    params = SamplingParams(max_new_tokens=5, temperature=0.0, n=2, ignore_eos=True)
    handle = engine.submit([1, 2], params, logprobs=1, prompt_logprobs=True)
    updates = list(handle)
    for index in (0, 1):
        mine = [u for u in updates if u.index == index]
        assert [len(u.prompt_logprobs) for u in mine] == [2, 0, 0, 0, 0]
        assert mine[0].prompt_logprobs[0] == TokenLogprob(token_id=1, logprob=None)
        assert [u.completion_tokens for u in mine] == [1, 2, 3, 4, 5]
        assert [u.finish_reason for u in mine] == [None] * 4 + ["length"]
        assert all(len(u.logprobs) == len(u.token_ids) == 1 for u in mine)
    assert list(handle) == []


def test_metrics_are_told():
    calls = {}

    class Recorder:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.setdefault(name, []).append((args, kwargs))

    with history_engine(metrics=Recorder()) as engine:
        engine.generate(input_ids=[1], sampling_params={**GREEDY, "n": 2})
        engine.drain()
    assert len(calls["first_token"]) == 2
    assert len(calls["inter_token"]) == 14
    assert [kwargs["completion_tokens"] for _, kwargs in calls["finished"]] == [8, 8]
    last_stats = calls["step"][-1][0][0]
    assert last_stats.running == 0
    assert (last_stats.generated_tokens, last_stats.requests_finished) == (16, 2)
    assert calls["step"][-1][1]["tokens"] == 0


def test_without_a_tokenizer_text_is_refused_and_ids_work():
    with history_engine() as engine:
        result = engine.generate(input_ids=[1], sampling_params=GREEDY)
        assert result["text"] == ""
        assert result["output_ids"] == reference([1], max_new_tokens=8)
        for params in ({"stop": "a"}, {"json_object": True}, {"regex": "a"}):
            with pytest.raises(RequestError, match="needs a tokenizer"):
                engine.generate(input_ids=[1], sampling_params={**GREEDY, **params})
        with pytest.raises(RequestError, match="needs a tokenizer"):
            engine.generate("text", GREEDY)


def test_many_threads(engine):
    results = {}

    def work(i):
        results[i] = engine.generate(input_ids=[i], sampling_params=GREEDY)["output_ids"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: reference([i], max_new_tokens=8) for i in range(30)}


def test_importing_the_engine_needs_no_server_tokenizer_or_grammar_package():
    code = """
import sys
blocked = ("tml_renderers", "fastapi", "llguidance", "uvicorn", "transformers")
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import inkling_rocm.engine
from tests.engine.tiny import tiny_engine
with tiny_engine() as engine:
    print(engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})["output_ids"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(",") == 2
