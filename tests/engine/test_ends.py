"""How requests end: stop ids and strings, aborts, shutdown, failing steps, an engine that ended."""

import threading

import pytest

from inkling_rocm.engine import RequestError, SamplingParams
from inkling_rocm.engine.request import GenerationError
from tests.engine.api import GREEDY, reference
from tests.engine.history_model import (
    BLOCK_END,
    EOS,
    ByteTokenizer,
    HistoryModel,
    ScriptedModel,
    assert_empty,
    history_engine,
)


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


def test_the_other_ranks_end_where_the_cache_cannot_be_closed(monkeypatch):
    engine, ended = history_engine(), []
    monkeypatch.setattr(engine._thread, "_end", lambda: ended.append(True))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken():
        raise OSError("no space left on device")

    monkeypatch.setattr(engine._core.scheduler.cache, "close", broken)
    engine.shutdown()
    assert ended


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
