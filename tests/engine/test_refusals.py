"""What the engine refuses, by name: values, types, lengths, a full queue, its own arguments."""

from fractions import Fraction

import numpy as np
import pytest

from inkling_rocm.engine import Engine, EngineArgs, RequestError, SamplingParams
from tests.engine.api import GREEDY, reference
from tests.engine.history_model import (
    VOCAB,
    ByteTokenizer,
    history_engine,
)


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


@pytest.mark.parametrize("value", [10**400, Fraction(10**400, 3)], ids=["an integer", "a fraction"])
@pytest.mark.parametrize("param", ["temperature", "repetition_penalty", "logit_bias"])
def test_numbers_beyond_floats_are_refused(engine, param, value):
    with pytest.raises(RequestError, match=f"{param} .*float") as caught:
        engine.submit([1, 2], SamplingParams(**{param: {5: value} if param[0] == "l" else value}))
    assert caught.value.param == param


def test_numbers_of_other_types_count_as_pythons(engine):
    """In the engine's thread torch refuses a fraction, and a seed of numpy's overflows."""
    plain = SamplingParams(max_new_tokens=5, seed=7, temperature=0.5, logit_bias={3: 1.0}, n=2)
    other = SamplingParams(
        max_new_tokens=np.int32(5), seed=np.int64(7), temperature=Fraction(1, 2),
        logit_bias={np.int64(3): np.float32(1)}, n=np.int8(2),
    )  # fmt: skip
    outputs = []
    for params, logprobs in ((plain, 2), (other, np.int16(2))):
        updates = list(engine.submit([1, 2], params, logprobs=logprobs))
        assert not [u.error for u in updates if u.error]
        outputs.append([[u.token_ids for u in updates if u.index == index] for index in (0, 1)])
    assert outputs[0] == outputs[1]


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
    for arguments in ({}, {"prompt": "a", "input_ids": [1]}):
        with pytest.raises(RequestError, match="exactly one"):
            engine.generate(sampling_params=GREEDY, **arguments)


def test_a_batch_with_a_mistake_leaves_nothing_running():
    long = {**GREEDY, "max_new_tokens": 100}
    with history_engine(tokenizer=ByteTokenizer()) as engine:
        with pytest.raises(RequestError):
            engine.generate(["a", "b"], [long, {"stop": 5}])
        assert engine.drain(timeout=10)
        assert engine.stats().generated_tokens < 100


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
