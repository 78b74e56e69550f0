"""Bad input is answered with 4xx in OpenAI's form; harmless oddities are accepted."""

import json
import socket

import pytest
from pydantic import ValidationError

from inkling_rocm.engine.request import Update
from inkling_rocm.server.context import ServerSettings, engine_failure, failure
from inkling_rocm.server.protocol import ChatBody, CompletionBody, GenerateBody
from tests.server.live import serving
from tests.server.scripted import saying

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP = json.loads("[" * 500 + "]" * 500)


@pytest.fixture(scope="module")
def http():
    settings = ServerSettings(max_body_bytes=1_000_000)
    engine = saying("<content_text>ok<content_model_end_sampling>")
    with serving(engine, settings) as live, live.http() as client:
        yield client


NULLABLE = (
    "temperature",
    "top_p",
    "n",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "logit_bias",
    "seed",
    "tools",
    "user",
    "tool_choice",
    "response_format",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "model",
    "reasoning_effort",
    "presence_penalty",
    "frequency_penalty",
    "parallel_tool_calls",
)


def check(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, None),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"messages": HI, "temperature": -0.1}, "temperature"),
    ({"messages": HI, "temperature": -0.1, "top_p": 5}, "temperature"),
    ({"messages": HI, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": HI, "tool_choice": {"function": {}}}, "tool_choice.function.name"),
    ({"messages": HI, "temperature": "hot"}, "temperature"),
    ({"messages": HI, "temperature": 1e308}, "temperature"),
    ({"messages": HI, "top_p": 1.01}, "top_p"),
    ({"messages": HI, "top_p": -0.1}, "top_p"),
    ({"messages": HI, "min_p": 2}, "min_p"),
    ({"messages": HI, "top_k": -2}, "top_k"),
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "n": 129}, "n"),
    ({"messages": HI, "n": 1.5}, "n"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": -1}, "max_tokens"),
    ({"messages": HI, "max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"messages": HI, "max_tokens": 2**70}, "max_tokens"),
    ({"messages": HI, "stop": ["x"] * 17}, "stop"),
    ({"messages": HI, "stop": [1]}, None),
    ({"messages": HI, "presence_penalty": 2.1}, "presence_penalty"),
    ({"messages": HI, "frequency_penalty": -2.1}, "frequency_penalty"),
    ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
    ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"200058": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"١": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"1": 101}}, "logit_bias"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "seed": 2**63}, "seed"),
    ({"messages": HI, "stream": "yes"}, "stream"),
    ({"messages": HI, "reasoning_effort": "much"}, "reasoning_effort"),
    ({"messages": HI, "reasoning_effort": 2}, "reasoning_effort"),
    ({"messages": HI, "chat_template_kwargs": {"reasoning_effort": []}}, "chat_template_kwargs"),
    ({"messages": HI, "continue_final_message": True}, "continue_final_message"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HI, "tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": HI, "tools": [TOOL, TOOL]}, "tools"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "tool_choice": {"function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": HI, "regex": "("}, "regex"),
    ({"messages": HI, "use_beam_search": True}, "use_beam_search"),
    ({"messages": HI, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"messages": HI, "json_schema": "{}"}, "json_schema"),
]
BAD_SCHEMAS = [
    {"type": "nonsense"},
    {"$ref": "#/nowhere"},
    {"type": "string", "pattern": "("},
    {"enum": []},
    {"minimum": "x"},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"properties": DEEP},
    {"items": {"not": {}}},
]


@pytest.mark.parametrize(("body", "param"), BAD_CHAT, ids=lambda v: json.dumps(v)[:60])
def test_bad_chat_fields(http, body, param):
    check(http.post(CHAT, json=body), 400, param)


@pytest.mark.parametrize("bad", BAD_SCHEMAS, ids=lambda v: json.dumps(v)[:40])
def test_bad_schemas(http, bad):
    body = {"messages": HI, "response_format": schema(bad)}
    check(http.post(CHAT, json=body), 400, "response_format.json_schema.schema")


def test_schemas_that_would_take_minutes_to_compile(http):
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}
    body = {"messages": HI, "response_format": schema(wide)}
    answer = http.post(CHAT, json=body)
    check(answer, 400, "response_format.json_schema.schema")
    assert "at most 262144 are compiled" in answer.json()["error"]["message"]


def test_bad_tool_parameters(http):
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "nonsense"}}}}
    body = {"messages": HI, "tools": [{"type": "function", "function": function}]}
    assert http.post(CHAT, json=body).status_code == 200  # nothing has to be enforced
    body["tool_choice"] = "required"
    check(http.post(CHAT, json=body), 400, "tools[0].function.parameters")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [200058]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [5, 1e30]}, "prompt[1]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [[1], [2, -3]]}, "prompt[1][1]"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "regex": "b"}, "regex"),
        ({"prompt": "a", "guided_json": {}, "guided_regex": "b"}, "guided_regex"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 20, "n": 26}, "n"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "max_tokens": 4096}, "max_tokens"),
        ({"prompt": [1] * 5000}, "prompt"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_bad_completion_fields(http, body, param):
    check(http.post(COMPLETE, json=body), 400, param)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"prompt": [True, 2]}, "prompt[0]", "a valid string, a valid integer or a valid list"),
        ({"prompt": [2, True]}, "prompt[1]", "a valid integer"),
        ({"prompt": [[2, True]]}, "prompt[0][1]", "a valid integer"),
        ({"prompt": {"a": 1}}, "prompt", "a valid string or a valid list"),
        ({"prompt": "a", "stop": 3}, "stop", "a valid string or a valid list"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_every_form_that_a_value_could_have_is_named(http, body, param, reason):
    """None of the forms was meant more than another where all end at the same value."""
    answer = http.post(COMPLETE, json=body)
    check(answer, 400, param)
    assert answer.json()["error"]["message"] == f"{param}: Input should be {reason}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": ["a"], "sampling_params": [{"n": 0}]}, "sampling_params[0].n"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"ebnf": "root ::= x"}}, "sampling_params.ebnf"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, None),
        ({"text": "a", "image_data": "cat.png"}, "image_data"),
        ({"text": "a", "lora_path": "adapter"}, "lora_path"),
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_bad_generate_fields(http, body, param):
    check(http.post("/generate", json=body), 400, param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"nul",
        b'{"messages": NaN}',
        b"\xff\xfe",
        b'{"messages": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 20_000,
    ],
    ids=lambda raw: raw[:20].decode("latin-1"),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE, "/generate", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json_objects(http, path, raw):
    check(http.post(path, content=raw), 400, code="invalid_json")


def test_context_overflow(http):
    body = {"messages": [{"role": "user", "content": "word " * 5000}]}
    check(http.post(CHAT, json=body), 400, "prompt", "context_length_exceeded")
    fits = http.post("/tokenize", json={"messages": HI}).json()
    room = fits["max_model_len"] - fits["count"]
    assert http.post(CHAT, json={"messages": HI, "max_tokens": room}).status_code == 200
    over = http.post(CHAT, json={"messages": HI, "max_tokens": room + 1})
    check(over, 400, "max_tokens", "context_length_exceeded")


def test_body_too_large(http):
    raw = json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_001}]})
    check(http.post(CHAT, content=raw), 413, code="body_too_large")
    pieces = (raw[i : i + 100_000].encode() for i in range(0, len(raw), 100_000))  # no length told
    check(http.post(CHAT, content=pieces), 413, code="body_too_large")
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=5) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**12}\r\n\r\n{{"
        sock.sendall(head.encode())
        assert b" 413 " in sock.recv(100)  # it is not waited for


def test_routes(http):
    check(http.get("/v1/nothing"), 404, code="not_found")
    check(http.post(f"{CHAT}/", json={"messages": HI}), 404, code="not_found")
    check(http.get(CHAT), 405, code="method_not_allowed")
    check(http.post("/v1/models"), 405, code="method_not_allowed")
    assert http.head("/health").status_code == 200
    check(http.post(CHAT, json={"model": "gpt-4", "messages": HI}), 404, "model", "model_not_found")


def test_no_cors_by_default(http):
    answer = http.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "extra",
    [
        {"never_heard_of": {"a": 1}, "store": True, "metadata": {}},
        dict.fromkeys(NULLABLE),
        {"stop": []},
        {"stop": ["", "x"]},
        {"seed": -(2**63)},
        {"logit_bias": {}},
        {"tools": [], "tool_choice": "auto"},
        {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0},
        {"response_format": {"type": "text"}},
        {"reasoning_effort": 0},
        {"stream_options": {"include_usage": True}},
    ],
    ids=lambda v: json.dumps(v)[:50],
)
def test_accepted(http, extra):
    answer = http.post(CHAT, json={"messages": HI, **extra})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "ok"


def test_metrics_and_health(http):
    assert http.get("/health").json() == {"status": "ok"}
    text = http.get("/metrics").text
    for name in (
        "inkling_queue_requests 0.0",
        "inkling_running_requests ",
        'inkling_pages{pool="global"} 10.0',
        'inkling_pages_used{pool="window"} 0.0',
        "inkling_conv_slots 4.0",
        "inkling_time_to_first_token_seconds_bucket",
        "inkling_inter_token_latency_seconds_bucket",
        "inkling_generation_tokens_total",
    ):
        assert name in text


def test_health_tells_when_the_engine_is_gone():
    engine = saying("x")
    engine.failure = "the engine stopped: planted"
    with serving(engine) as live, live.http() as http:
        assert http.get("/health").status_code == 503
        assert http.get("/health").json() == {"status": engine.failure}


def test_draining_takes_no_new_requests():
    with serving(saying("x")) as live, live.http() as http:
        live.context.draining = True
        health = http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        answers = [health]
        for path, body in ((CHAT, {"messages": HI}), ("/generate", {"text": "a"})):
            answers.append(http.post(path, json=body))
            check(answers[-1], 503, code="shutting_down")
        for answer in answers:
            assert answer.headers["retry-after"]
            # A client's next request must not come over this connection: it could be another
            # server's behind a load balancer.
            assert answer.headers["connection"] == "close"


BODIES = {
    CHAT: {"messages": HI},
    COMPLETE: {"prompt": ["a", "b"]},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 4}},
}


@pytest.mark.parametrize("path", BODIES)
def test_draining_begins_with_requests_that_come_after_it(path):
    """One that is rendered or tokenised when the signal comes is open; a later one costs no such
    work."""
    with (
        serving(saying("<content_text>ok<content_model_end_sampling>")) as live,
        live.http() as http,
    ):
        in_thread, begun = live.context.in_thread, []

        async def signal_comes_first(work):
            begun.append(path)
            live.context.draining = True
            return await in_thread(work)

        live.context.in_thread = signal_comes_first
        assert http.post(path, json=BODIES[path]).status_code == 200
        check(http.post(path, json=BODIES[path]), 503, code="shutting_down")
        assert len(begun) == 1


def test_what_the_server_ended_may_be_tried_again_elsewhere():
    aborted = engine_failure(Update(index=0, token_ids=(), text="", finish_reason="abort"))
    for error in (aborted, failure("the engine stopped", "engine_failed")):
        headers = error.response().headers
        assert (headers["retry-after"], headers["connection"]) == ("1", "close")
    assert "retry-after" not in failure("a step failed", "step_failed").response().headers


def test_tokenize_round_trip(http):
    text = "naïve 🙂 <|end_message|>"
    ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert max(ids) < 199998  # names of special tokens are plain text
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    check(http.post("/detokenize", json={"tokens": [200058]}), 400, "tokens")
    check(http.post("/tokenize", json={}), 400)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionBody, {"prompt": [0.5] * 5000}),
        (CompletionBody, {"prompt": [[0.5] * 50] * 100}),
        (ChatBody, {"messages": [3] * 5000}),
        (ChatBody, {"messages": [{"role": "user", "content": [3] * 5000}]}),
        (ChatBody, {"messages": HI, "stop": [3] * 5000, "tools": [3] * 5000}),
        (ChatBody, {"messages": HI, "logit_bias": {str(i): "x" for i in range(5000)}}),
        (GenerateBody, {"input_ids": [0.5] * 5000}),
        (GenerateBody, {"text": "a", "sampling_params": [3] * 5000}),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_long_wrong_list_is_not_reported_entry_by_entry(model, body):
    """An error object for each entry of a 3 MB body took over a minute and 3 GB."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10


def test_cors_lets_browsers_ask_without_the_key():
    origin = "http://page.example"
    settings = ServerSettings(api_key="k", cors_origins=(origin,))
    with serving(saying("x"), settings) as live, live.http(headers={"Origin": origin}) as http:
        asks = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        preflight = http.options(CHAT, headers=asks)
        assert preflight.status_code == 200, preflight.text
        refused = http.post(CHAT, json={"messages": HI})
        check(refused, 401, code="invalid_api_key")
        for answer in (preflight, refused):
            assert answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_does_not_mean_no_key(key):
    with pytest.raises(ValueError, match="API key is empty"):
        ServerSettings(api_key=key)
