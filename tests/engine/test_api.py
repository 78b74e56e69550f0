"""The Python API: SGLang's dictionaries, streaming, refusals, ends."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from inkling_rocm.engine import Engine, EngineArgs, RequestError, SamplingParams, TokenLogprob
from inkling_rocm.engine.request import GenerationError
from tests.engine.history_model import (
    BLOCK_END,
    EOS,
    VOCAB,
    ByteTokenizer,
    HistoryModel,
    ScriptedModel,
    assert_empty,
    history_engine,
    history_logits,
    reference_tokens,
)

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    with history_engine(tokenizer=ByteTokenizer()) as engine:
        yield engine
        assert engine.drain(timeout=10)
        assert_empty(engine._core)


def reference(prompt, **params):
    return reference_tokens(prompt, SamplingParams(temperature=0.0, ignore_eos=True, **params))


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


def _wait_idle(engine, seconds=5):
    deadline = time.monotonic() + seconds
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


def test_exactly_the_context_fits(engine):
    context = engine.context_length
    assert context == 256
    prompt = [1] * (context - 4)
    result = engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 4})
    assert len(result["output_ids"]) == 4
    assert result["output_ids"] == reference(prompt, max_new_tokens=4)
    with pytest.raises(RequestError, match="make 257") as caught:
        engine.generate(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 5})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_new_tokens")
    with pytest.raises(RequestError) as caught:
        engine.generate(input_ids=[1] * 256, sampling_params=GREEDY)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    full = engine.generate(input_ids=[1] * 256, sampling_params={**GREEDY, "max_new_tokens": 0})
    assert full["output_ids"] == []
    assert full["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_pools_smaller_than_the_context_shorten_it():
    with history_engine(max_total_tokens=48) as engine:
        assert engine.context_length == 48
        result = engine.generate(input_ids=[1] * 40, sampling_params=GREEDY)
        assert len(result["output_ids"]) == 8
        with pytest.raises(RequestError, match="holds 48 tokens"):
            engine.generate(input_ids=[1] * 41, sampling_params=GREEDY)
    with pytest.raises(ValueError, match="holds 48 tokens"):
        history_engine(max_total_tokens=48, context_length=100)
    with pytest.raises(ValueError, match="at most 256"):
        history_engine(context_length=257)


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf")]),
        ("top_p", [-0.1, 1.1]),
        ("min_p", [-0.1, 1.1]),
        ("top_k", [-2]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [float("nan")]),
        ("repetition_penalty", [0, -1]),
        ("max_new_tokens", [-1]),
        ("min_new_tokens", [-1, 9]),
        ("n", [0, 1000]),
        ("logit_bias", [{VOCAB: 1.0}, {-1: 1.0}, {1: float("nan")}]),
        ("stop_token_ids", [[VOCAB]]),
        ("stop", ["", ["a", ""], 5]),
        ("stop_token_ids", [5]),
        ("logit_bias", [[1], {"a": 1.0}, {None: 1.0}]),
        ("sampling_seed", [1 << 63]),
        ("nonsense", [1]),
    ],
)
def test_bad_values_are_refused_by_name(engine, param, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            engine.generate("x", {**GREEDY, param: value})
        assert caught.value.param == {"sampling_seed": "seed"}.get(param, param)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("seed", 1.5),
        ("stop", (5,)),
        ("stop", "ab"),
        ("n", 2.0),
        ("max_new_tokens", 2.5),
        ("min_new_tokens", "1"),
        ("top_k", 1.5),
        ("temperature", "hot"),
        ("repetition_penalty", None),
        ("stop_token_ids", ("a",)),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "x"}),
        ("json_schema", {"type": "object"}),
    ],
)
def test_wrong_types_are_refused_by_name(engine, param, value):
    """In the engine's thread they would end every request of the batch."""
    with pytest.raises(RequestError) as caught:
        engine.submit([1, 2], SamplingParams(**{param: value}))
    assert caught.value.param == param


def test_wrong_types_of_log_probabilities_are_refused(engine):
    with pytest.raises(RequestError, match=r"logprobs 1\.5"):
        engine.generate(input_ids=[1], return_logprob=True, top_logprobs_num=1.5)


def test_a_batch_with_a_mistake_leaves_nothing_running():
    long = {**GREEDY, "max_new_tokens": 100}
    with history_engine(tokenizer=ByteTokenizer()) as engine:
        with pytest.raises(RequestError):
            engine.generate(["a", "b"], [long, {"stop": 5}])
        assert engine.drain(timeout=10)
        assert engine.stats().generated_tokens < 100


def test_bad_prompts_are_refused(engine):
    for ids in ([], [VOCAB], [-1]):
        with pytest.raises(RequestError):
            engine.generate(input_ids=ids, sampling_params=GREEDY)
    for prompt in (5, ["a", 3], {"a": 1}):
        with pytest.raises(RequestError, match="wanted a text") as caught:
            engine.generate(prompt)
        assert caught.value.param == "prompt"
    wrong = ("abc", ["a"], [1.5], 5, [True], {1: 2}, {1}, [None])
    for ids in (*wrong, [[1], [2.5]], [[1], 2]):
        with pytest.raises(RequestError, match="wanted a list of token ids") as caught:
            engine.generate(input_ids=ids)
        assert caught.value.param == "input_ids"
    for ids in wrong:
        with pytest.raises(RequestError, match="wanted a list of token ids"):
            engine.submit(ids, SamplingParams())
        with pytest.raises(RequestError, match="wanted a list of token ids"):
            engine.prompt_logits(ids)
    one = engine.generate(input_ids=[1, 2], sampling_params=GREEDY)
    same = engine.generate(input_ids=iter([1, 2]), sampling_params=GREEDY)
    assert same["output_ids"] == one["output_ids"]
    with pytest.raises(RequestError, match="keys are token ids"):
        engine.generate(input_ids=[1], sampling_params={"logit_bias": {1.7: 1}})


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


def test_an_engine_that_ends_with_an_abort_queued_ends_every_request():
    """The abort works on the books that may be broken: it is not done, and nothing hangs on it."""
    entered, go = threading.Event(), threading.Event()

    def before(meta):
        entered.set()
        go.wait()
        raise KeyboardInterrupt  # ends the engine, not only a step

    engine = history_engine(model=HistoryModel(before=before))
    handles = [engine.submit([1], SamplingParams(max_new_tokens=5))]
    entered.wait()

    def broken(sequence):
        raise AssertionError("the books are broken")

    engine._core.scheduler.release = broken
    engine.abort(handles[0].rid)
    handles.append(engine.submit([2], SamplingParams(max_new_tokens=5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        go.set()
        ends = [list(handle)[-1] for handle in handles]
        engine._thread.join(20)
    assert [end.error_code for end in ends] == ["engine_failed"] * 2
    assert engine.drain(timeout=10)
    for arguments in ({}, {"prompt": "a", "input_ids": [1]}):
        with pytest.raises(RequestError, match="exactly one"):
            engine.generate(sampling_params=GREEDY, **arguments)


def test_stop_ids_and_their_text(engine):
    ids = reference(list(b"Hello"), max_new_tokens=8)
    stop = ids[4]
    result = engine.generate("Hello", {**GREEDY, "stop_token_ids": [stop]})
    assert result["output_ids"] == ids[: ids.index(stop) + 1]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = engine.generate("Hello", {**GREEDY, "stop_token_ids": [stop], "no_stop_trim": True})
    assert len(kept["text"].encode("utf-8", "replace")) >= len(result["text"].encode())


def test_the_models_own_end_and_ignoring_it(engine):
    params = {"temperature": 0, "max_new_tokens": 9, "logit_bias": {EOS: 50}}
    result = engine.generate("Hello", params)
    assert result["output_ids"] == [EOS]
    assert result["text"] == ""
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert engine.generate("Hello", {**params, "ignore_eos": True})["output_ids"] == [EOS] * 9
    held = engine.generate("Hello", {**params, "min_new_tokens": 4})["output_ids"]
    assert len(held) == 5
    assert EOS not in held[:4]
    assert held[4] == EOS


def test_stop_strings_across_token_borders():
    params = {"temperature": 0, "max_new_tokens": 8}
    model = ScriptedModel(list(b"abcdefgh"))
    with history_engine(model=model, tokenizer=ByteTokenizer()) as engine:
        assert engine.generate("x", params)["text"] == "abcdefgh"
        result = engine.generate("x", {**params, "stop": ["zz", "cde", "e"]})
        assert result["text"] == "ab"
        assert result["output_ids"] == list(b"abcde")
        assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cde"}
        kept = engine.generate("x", {**params, "stop": "cde", "no_stop_trim": True})
        assert kept["text"] == "abcde"
        late = engine.generate("x", {**params, "stop": ["b", "g"], "min_new_tokens": 4})
        assert late["text"] == "abcdef"
        texts = [p["text"] for p in engine.generate("x", {**params, "stop": "cdx"}, stream=True)]
        assert texts == ["a", "ab", "ab", "ab", "abcde", "abcdef", "abcdefg", "abcdefgh"]
        ended = list(engine.generate("x", {**params, "stop": "hx"}, stream=True))
        assert ended[-1]["text"] == "abcdefgh"


def test_characters_spread_over_tokens():
    text = "aé日😀"
    model = ScriptedModel(list(text.encode()))
    with history_engine(model=model, tokenizer=ByteTokenizer()) as engine:
        params = {"temperature": 0, "max_new_tokens": len(text.encode())}
        parts = [p["text"] for p in engine.generate("x", params, stream=True)]
        assert parts[-1] == text
        assert not any("\ufffd" in part for part in parts)
        cut = engine.generate("x", {**params, "max_new_tokens": 5})
        assert cut["text"] == "aé\ufffd"


def test_special_tokens_in_text(engine):
    params = {"temperature": 0, "max_new_tokens": 1, "logit_bias": {BLOCK_END: 90}}
    assert engine.generate("x", params)["text"] == ""
    assert engine.generate("x", {**params, "skip_special_tokens": False})["text"] == "<257>"


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


def test_abort_reports_what_there_was(engine):
    handle = engine.submit([1], SamplingParams(max_new_tokens=250, n=2, ignore_eos=True))
    next(handle)
    handle.abort()
    updates = list(handle)
    assert sorted(u.index for u in updates if u.finish_reason == "abort") == [0, 1]
    engine.abort(handle.rid)
    engine.abort("never heard of")
    handle = engine.submit([1], SamplingParams(max_new_tokens=9, n=2, ignore_eos=True))
    engine.abort(handle.rid, 7)
    engine.abort(handle.rid, 1)
    ends = {u.index: u.finish_reason for u in handle if u.finish_reason}
    assert ends[0] == "length"
    assert ends[1] in ("abort", "length")  # it may have been quicker
    handle = engine.submit([1], SamplingParams(max_new_tokens=250, ignore_eos=True))
    handle.abort(0, reason="stop")
    assert list(handle)[-1].finish_reason == "stop"


def test_names_are_unique_while_in_use(engine):
    handle = engine.submit([1], SamplingParams(max_new_tokens=250), rid="mine")
    with pytest.raises(RequestError, match="in use"):
        engine.submit([1], SamplingParams(), rid="mine")
    handle.abort()
    list(handle)
    list(engine.submit([1], SamplingParams(max_new_tokens=1), rid="mine"))


def test_the_queue_has_a_limit():
    with history_engine(max_running_requests=2, max_queued_requests=3) as engine:
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        handles = [engine.submit([i], params) for i in range(5)]
        with pytest.raises(RequestError) as caught:
            engine.submit([9], params)
        assert caught.value.code == "queue_full"
        handles[0].abort()
        list(handles[0])
        list(engine.submit([9], SamplingParams(max_new_tokens=1)))


def test_drain_finishes_what_is_open_and_refuses_more():
    with history_engine() as engine:
        handles = [
            engine.submit([i], SamplingParams(max_new_tokens=20, ignore_eos=True)) for i in range(9)
        ]
        assert not engine.drain(timeout=0.0)
        with pytest.raises(RequestError) as caught:
            engine.submit([1], SamplingParams())
        assert caught.value.code == "shutting_down"
        assert engine.drain(timeout=20)
        assert all(list(h)[-1].finish_reason == "length" for h in handles)


def test_shutdown_ends_every_handle():
    engine = history_engine()
    handles = [engine.submit([i], SamplingParams(max_new_tokens=250)) for i in range(20)]
    engine.shutdown()
    assert all(list(h)[-1].finish_reason in ("abort", "stop", "length") for h in handles)
    engine.shutdown()
    with pytest.raises(RequestError):
        engine.submit([1], SamplingParams())


def test_a_failing_step_ends_its_batch_and_nothing_else():
    fail_at = {3}
    steps = []

    def before(meta):
        steps.append(meta.num_tokens)
        if len(steps) in fail_at:
            raise RuntimeError("out of memory: tried to allocate 7 GiB")

    with history_engine(model=HistoryModel(before=before), max_running_requests=2) as engine:
        params = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
        handles = [engine.submit([i], params) for i in range(6)]
        ends = [list(h)[-1] for h in handles]
        failed = [end for end in ends if end.finish_reason == "error"]
        assert 1 <= len(failed) <= 2
        assert all("7 GiB" in end.error for end in failed)
        assert all(end.error_code == "step_failed" for end in failed)
        assert [end.finish_reason for end in ends].count("length") == 6 - len(failed)
        fail_at.add(len(steps) + 1)
        with pytest.raises(GenerationError, match="7 GiB") as caught:
            engine.generate(input_ids=[1], sampling_params=GREEDY)
        assert caught.value.code == "step_failed"
        fail_at.add(len(steps) + 1)
        with pytest.raises(RuntimeError, match="7 GiB"):
            engine.prompt_logits([1, 2])
        assert engine.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"]
        assert_empty(engine._core)


def test_logits_that_are_not_finite_end_one_request_only():
    class Broken(HistoryModel):
        def logits(self, hidden, host):
            logits = super().logits(hidden, host)
            logits[hidden[:, 0] == float(5)] = float("nan")  # the hash of the prompt [4]
            return logits

    with history_engine(model=Broken()) as engine:
        good = engine.submit([7], SamplingParams(max_new_tokens=5, ignore_eos=True))
        bad = engine.submit([4], SamplingParams(max_new_tokens=5, ignore_eos=True))
        assert list(good)[-1].finish_reason == "length"
        (end,) = list(bad)
        assert end.finish_reason == "error"
        assert "not finite" in end.error
        assert end.error_code == "logits_not_finite"
        held = SamplingParams(max_new_tokens=5, min_new_tokens=2, logit_bias={0: float("inf")})
        tiny = SamplingParams(max_new_tokens=5, repetition_penalty=5e-324)
        for params in (held, tiny):
            *_, end = engine.submit([7], params)
            assert end.error_code == "no_token_possible"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_hangs_nobody():
    def before(meta):
        raise KeyboardInterrupt

    engine = history_engine(model=HistoryModel(before=before))
    handle = engine.submit([1], SamplingParams())
    (end,) = list(handle)
    assert end.finish_reason == "error"
    assert "KeyboardInterrupt" in end.error
    assert end.error_code == "engine_failed"
    engine._thread.join(5)
    with pytest.raises(RequestError) as caught:
        engine.submit([1], SamplingParams())
    assert caught.value.code == "engine_failed"
    engine.shutdown()


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
    assert last_stats.generated_tokens == 16
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 32),
        ("chunked_prefill_size", 0),
        ("max_running_requests", 0),
        ("mem_fraction_static", 1.0),
        ("load_format", "gguf"),
        ("tokenizer_path", "elsewhere"),
    ],
)
def test_wrong_arguments_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        EngineArgs(model_path="x", **{field: value})
    with pytest.raises(ValueError, match="not both"):
        Engine(EngineArgs(model_path="x"), page_size=16)


@pytest.mark.parametrize(
    "other",
    [
        {"disable_cuda_graph": True},
        {"disable_prefill_cuda_graph": True},
        {"speculative_algorithm": "EAGLE"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_size_of_prompt_graphs_is_refused_where_there_are_none(other):
    (name,) = other
    with pytest.raises(ValueError, match=f"cuda_graph_max_bs_prefill 64: .*{name}"):
        EngineArgs(model_path="x", cuda_graph_max_bs_prefill=64, **other)


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
