"""Conformance of the real engine on the demo checkpoint, through the openai client."""

import asyncio
import json
import math
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.server.scripted import TOKENIZER

HI = [{"role": "user", "content": "Say something."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["colour", "count", "ok", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("paint", "count_things")
]


@pytest.fixture(scope="module")
def client(demo):
    return demo.openai()


def chat(client, **options):
    return client.chat.completions.create(
        **{"model": "demo", "messages": HI, "max_tokens": 24, **options}
    )


def complete(client, **options):
    return client.completions.create(
        **{"model": "demo", "prompt": "Once upon", "max_tokens": 12, "temperature": 0, **options}
    )


def text_of(stream):
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


def test_streamed_chat_equals_the_whole_one(client):
    whole = chat(client, temperature=0)
    chunks = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.completion_tokens <= 24
    assert whole.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens(client, limit):
    answer = chat(client, max_completion_tokens=limit, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == limit


def test_stop_string_across_tokens(client):
    entries = complete(client, logprobs=0).choices[0].logprobs
    text = complete(client).choices[0].text
    border = entries.text_offset[6]
    stop = text[border - 1 : border + 2]
    assert text.index(stop) == border - 1, "the demo repeats itself here; choose another place"
    for stream in (False, True):
        answer = complete(client, stop=[stop, "never there"], stream=stream)
        if stream:
            chunks = list(answer)
            got = "".join(c.choices[0].text for c in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            got, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert (got, reason) == (text[: border - 1], "stop")


def test_chat_logprobs(client):
    entries = chat(client, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert entries
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert values[0] <= 0
        assert entry.logprob == values[0]  # greedy: the token is the likeliest
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token


def test_completion_echo_and_prompt_logprobs(client):
    ids = [791, 4062, 14198, 3000]
    answer = complete(client, prompt=ids, echo=True, logprobs=2, max_tokens=5)
    choice = answer.choices[0]
    assert len(choice.logprobs.tokens) == len(ids) + answer.usage.completion_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert [len(top) for top in choice.logprobs.top_logprobs[1:]] == [2] * (
        len(choice.logprobs.tokens) - 1
    )
    # Scoring alone gives the same numbers, and generates nothing.
    scored = complete(client, prompt=ids, echo=True, logprobs=2, max_tokens=0)
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].finish_reason == "length"
    values = choice.logprobs.token_logprobs[1 : len(ids)]
    for got, wanted in zip(scored.choices[0].logprobs.token_logprobs[1:], values, strict=True):
        assert math.isclose(got, wanted, abs_tol=1e-4)


def test_completion_prompts(client):
    single = [complete(client, prompt=p).choices[0].text for p in ("Once upon", "The end")]
    both = complete(client, prompt=["Once upon", "The end"])
    assert [c.text for c in both.choices] == single
    assert [c.index for c in both.choices] == [0, 1]
    streamed = {0: "", 1: ""}
    for chunk in complete(client, prompt=["Once upon", "The end"], stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == single


def test_n_differ_and_are_reproducible(client):
    options = {"n": 3, "seed": 7, "temperature": 1.0}
    first, second = complete(client, **options), complete(client, **options)
    texts = [c.text for c in first.choices]
    assert len(set(texts)) == 3
    assert texts == [c.text for c in second.choices]
    assert first.usage.completion_tokens <= 36
    assert first.usage.prompt_tokens == complete(client).usage.prompt_tokens


async def test_seed_alone_is_seed_in_a_batch_of_32(demo):
    async with demo.async_openai() as client:

        async def one(seed, prompt):
            answer = await client.completions.create(
                model="demo", prompt=prompt, max_tokens=10, temperature=1.0, seed=seed
            )
            return answer.choices[0].text

        alone = await one(1234, "Once upon")
        others = [one(seed, f"Story {seed}: " * (1 + seed % 5)) for seed in range(31)]
        batch = await asyncio.gather(one(1234, "Once upon"), *others)
    assert batch[0] == alone
    assert len(set(batch)) > 16


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls(client, choice, stream):
    named = {"type": "function", "function": {"name": "count_things"}}
    answer = chat(
        client,
        tools=TOOLS,
        tool_choice=named if choice == "named" else "required",
        parallel_tool_calls=False,
        reasoning_effort="none",
        max_tokens=200,
        stream=stream,
        seed=3,
    )
    if stream:
        deltas = [c.choices[0].delta for c in answer]
        assert not any(d.content for d in deltas)
        calls = [d.tool_calls[0] for d in deltas if d.tool_calls]
        name, arguments = calls[0].function.name, "".join(c.function.arguments for c in calls)
        assert len(calls) > 3
    else:
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name in ({"count_things"} if choice == "named" else {"paint", "count_things"})
    jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(client, seed):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    choice = chat(
        client, response_format=form, reasoning_effort="none", max_tokens=200, seed=seed
    ).choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


class Paint(BaseModel):
    colour: Literal["red", "green"]
    glossy: bool


def test_the_clients_own_parsing(client):
    answer = client.chat.completions.parse(
        model="demo",
        messages=HI,
        response_format=Paint,
        reasoning_effort="none",
        max_tokens=600,
        seed=1,
    )
    assert isinstance(answer.choices[0].message.parsed, Paint)
    tool = openai.pydantic_function_tool(Paint)
    with client.chat.completions.stream(
        model="demo",
        messages=HI,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="none",
        max_tokens=600,
        seed=1,
    ) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert isinstance(call.function.parsed_arguments, Paint)


def test_completion_stream_usage(client):
    chunks = list(complete(client, stream=True, n=2, stream_options={"include_usage": True}))
    assert [bool(c.choices) for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage == complete(client, n=2).usage


def test_text_offsets_point_into_the_text(client):
    """Also after special tokens, which are in an echo only, and inside characters."""
    emoji = [172, 253, 246, 222]  # one token a byte
    prompt = [*TOKENIZER.encode("a b"), 200006, *emoji, *TOKENIZER.encode(" c"), 172]
    end_message, word = 200010, TOKENIZER.encode(" word")[0]
    answer = complete(
        client, prompt=prompt, echo=True, logprobs=0, max_tokens=3, logit_bias={end_message: 100}
    )
    choice = answer.choices[0]
    text = "a b<|content_model_end_sampling|>😀 c\ufffd"
    assert choice.text == text
    at = [text.index(piece) for piece in ("a", " b", "<", "😀", "😀", "😀", "😀", " c", "\ufffd")]
    assert choice.logprobs.text_offset == [*at, len(text), len(text), len(text)]
    answer = complete(
        client, logprobs=0, max_tokens=40, logit_bias={end_message: 95, word: 95}, temperature=5
    )
    choice = answer.choices[0]
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    assert {token for token, _ in pairs} == {"<|end_message|>", " word"}
    assert all(choice.text[at : at + 5] == " word" for token, at in pairs if token == " word")


def test_regex_and_continued_message(client):
    messages = [*HI, {"role": "assistant", "content": "The date is "}]
    extra = {"continue_final_message": True, "regex": r"20[0-9]{2}-[01][0-9]"}
    message = chat(client, messages=messages, extra_body=extra).choices[0].message
    assert message.content.startswith("20")
    assert len(message.content) == 7


def test_min_tokens_against_a_finished_grammar_is_a_bad_request(client):
    extra = {"continue_final_message": True, "regex": "[0-9]", "min_tokens": 20}
    messages = [*HI, {"role": "assistant", "content": "x"}]
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=messages, extra_body=extra)


def test_a_schema_beyond_the_parsers_limits_is_a_bad_request(client):
    fields = {f"k{i}": {"type": "string", "pattern": "^[a-z]{1,50}$"} for i in range(2000)}
    schema = {"type": "object", "properties": fields}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="Parser Error"):
        chat(client, response_format=form, reasoning_effort="none")


def test_logit_bias_forces_a_token(client):
    word = 24912  # any ordinary token
    answer = complete(client, logit_bias={str(word): 100}, logprobs=0, max_tokens=4)
    tokens = answer.choices[0].logprobs.tokens
    assert len(set(tokens)) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1e-30},
        {"temperature": 100},
        {"top_p": 0},
        {"top_k": 2**30, "temperature": 1, "seed": 0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 100, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": dict.fromkeys(map(str, range(0, 200058, 50)), -100)},
    ],
    ids=lambda values: "-".join(values),
)
def test_extreme_values_are_served(client, values):
    answer = complete(client, extra_body=values, max_tokens=6)
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_context_overflow(client, demo):
    limit = demo.engine.context_length
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=[5] * (limit + 1))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=[5] * 10, max_tokens=limit - 9)
    assert caught.value.param == "max_tokens"


def test_generate_in_sglangs_form(demo):
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    with demo.http() as http:
        one = http.post("/generate", json={"text": "Once upon", "sampling_params": params}).json()
        assert set(one) == {"text", "output_ids", "meta_info"}
        assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
        ids = http.post("/tokenize", json={"prompt": "Once upon"}).json()["tokens"]
        body = {"input_ids": [ids, ids], "sampling_params": params, "return_logprob": True}
        body |= {"logprob_start_len": 0, "top_logprobs_num": 2}
        both = http.post("/generate", json=body).json()
        assert [r["output_ids"] for r in both] == [one["output_ids"]] * 2
        meta = both[0]["meta_info"]
        assert [e[1] for e in meta["output_token_logprobs"]] == one["output_ids"]
        assert len(meta["input_token_logprobs"]) == len(ids)
        stream = {"text": "Once upon", "sampling_params": params, "stream": True}
        with http.stream("POST", "/generate", json=stream) as response:
            lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["text"] == one["text"]
    assert all(events[-1]["text"].startswith(e["text"]) for e in events)


def test_sglangs_names_for_the_seed_and_for_texts(demo):
    params = {"max_new_tokens": 6, "sampling_seed": 5}
    body = {"text": "Once upon", "return_logprob": True, "return_text_in_logprobs": True}
    with demo.http() as http:
        first, again, other = (
            http.post("/generate", json={**body, "sampling_params": {**params, **more}}).json()
            for more in ({}, {"seed": 5}, {"sampling_seed": 6})
        )
        entries = first["meta_info"]["output_token_logprobs"]
        assert http.post("/detokenize", json={"tokens": first["output_ids"]}).json()["prompt"] == (
            "".join(text for _, _, text in entries)
        )
    assert first["output_ids"] == again["output_ids"] != other["output_ids"]
