"""The chat endpoint over scripted turns, through the real client and a real socket."""

import json
import threading
import time

import openai
import pytest

from inkling_rocm.engine.request import RequestError
from inkling_rocm.server.blocks import INVOKE_TOOL_JSON
from inkling_rocm.server.context import ServerSettings
from tests.server.live import serving
from tests.server.scripted import TOKENIZER, ScriptedEngine, encode, saying

THINK = "<message_model><content_thinking>Let me think.<end_message>"
TEXT = "<message_model><content_text>Hello 🙂 wörld, ok<end_message>"
CALL_F = (
    '<message_model>f<content_invoke_tool_json>{"name":"f","args":{"city":"San José","n":[1,2]}}'
    "<end_message>"
)
CALL_G = '<message_model>g<content_invoke_tool_json>{"name":"g","args":{}}<end_message>'
END = "<content_model_end_sampling>"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
HI = [{"role": "user", "content": "hi"}]


class Switch:
    """Stands before the engine that the current test wants."""

    inner = saying("")

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def live():
    with serving(Switch()) as server:
        yield server


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


@pytest.fixture
def say(live, client):
    """Makes the engine say a text; returns (client, engine)."""

    def set_up(text, **options):
        engine = saying(text)
        for name, value in {"chunk": 1, "delay": 0.0, "finish": "stop", **options}.items():
            setattr(engine, name, value)
        live.engine.inner = engine
        return client, engine

    return set_up


def ask(client, **options):
    return client.chat.completions.create(model="scripted", messages=HI, **options)


def gather(stream):
    """Concatenate a stream as a client would: (message fields, finish reasons, usage, chunks)."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons, usage, chunks = [], None, list(stream)
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(message["tool_calls"]):
                    assert call.id.startswith("call_")
                    assert call.type == "function"
                    message["tool_calls"].append([call.function.name, ""])
                message["tool_calls"][call.index][1] += call.function.arguments or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return message, reasons, usage, chunks


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "turn", [TEXT, THINK + TEXT, THINK + CALL_F + CALL_G, CALL_F, TEXT + CALL_G, THINK, "Hi there"]
)
def test_stream_and_whole_answer_agree(say, turn, chunk):
    client, _ = say(turn + END, chunk=chunk)
    whole = ask(client, tools=TOOLS).choices[0]
    streamed, reasons, _, chunks = gather(ask(client, tools=TOOLS, stream=True))
    assert streamed["content"] == (whole.message.content or "")
    reasoning = getattr(whole.message, "reasoning_content", None)
    assert streamed["reasoning_content"] == (reasoning or "")
    calls = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
    assert [tuple(call) for call in streamed["tool_calls"]] == calls
    assert reasons == [whole.finish_reason]
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    assert chunks[0].choices[0].delta.role == "assistant"
    for _, arguments in calls:
        json.loads(arguments)


def test_reasoning_content_and_tools_come_out_whole(say):
    client, _ = say(THINK + TEXT + CALL_F + CALL_G + END)
    message = ask(client, tools=TOOLS).choices[0].message
    assert message.reasoning_content == "Let me think."
    assert message.content == "Hello 🙂 wörld, ok"
    first, second = message.tool_calls
    assert (first.function.name, second.function.name) == ("f", "g")
    assert json.loads(first.function.arguments) == {"city": "San José", "n": [1, 2]}
    assert first.id != second.id


def test_turn_that_opens_with_a_call_has_no_content(say):
    client, _ = say(CALL_F.removeprefix("<message_model>") + END)
    message = ask(client, tools=TOOLS).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.name == "f"


def test_plain_answers_stream_token_by_token(say):
    client, _ = say("<content_text>one two three four five" + END)
    *_, chunks = gather(ask(client, stream=True))
    pieces = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    assert pieces == ["one", " two", " three", " four", " five"]


def test_chunks_arrive_while_the_engine_works(say):
    client, _ = say("<content_text>one two three four five" + END, delay=0.05)
    arrivals = []
    for chunk in ask(client, stream=True):
        if chunk.choices[0].delta.content:
            arrivals.append(time.monotonic())
    assert arrivals[-1] - arrivals[0] > 0.15


def test_usage(say):
    client, engine = say(THINK + TEXT + END)
    engine.cached = 3
    whole = ask(client).usage
    ids = encode(THINK + TEXT + END)
    prompt = engine.submitted[0][0]
    assert (whole.prompt_tokens, whole.completion_tokens) == (len(prompt), len(ids))
    assert whole.total_tokens == len(prompt) + len(ids)
    assert whole.prompt_tokens_details.cached_tokens == 3
    thought = TOKENIZER.encode("Let me think.")
    assert whole.completion_tokens_details.reasoning_tokens == len(thought)
    *_, usage, chunks = gather(ask(client, stream=True, stream_options={"include_usage": True}))
    assert usage == whole
    assert [bool(c.choices) for c in chunks] == [True] * (len(chunks) - 1) + [False]
    *_, usage, chunks = gather(ask(client, stream=True))
    assert usage is None
    assert all(c.choices for c in chunks)


def test_usage_counts_the_prompt_once_for_n(say):
    client, engine = say(TEXT + END)
    answer = ask(client, n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == len(engine.submitted[0][0])
    assert answer.usage.completion_tokens == 3 * len(encode(TEXT + END))
    chunks = list(ask(client, n=3, stream=True))
    assert {c.choices[0].index for c in chunks} == {0, 1, 2}
    assert sum(c.choices[0].finish_reason is not None for c in chunks) == 3


@pytest.mark.parametrize("chunk", [1, 2, 50])
@pytest.mark.parametrize("stop", [" wörld", "🙂", "ö", ["zzz", "lo 🙂 w"], "Hello", "ok"])
def test_stop_strings(say, stop, chunk):
    client, engine = say(THINK + TEXT + END, chunk=chunk)
    cut = stop if isinstance(stop, str) else stop[1]
    wanted = "Hello 🙂 wörld, ok".split(cut)[0]
    choice = ask(client, stop=stop).choices[0]
    assert choice.message.content == wanted
    assert choice.finish_reason == "stop"
    streamed, reasons, _, _ = gather(ask(client, stop=stop, stream=True))
    assert (streamed["content"], reasons) == (wanted, ["stop"])
    assert len(engine.aborted) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_has_ended_is_not_generated_on(live, client, stream):
    """Its siblings may take long."""
    texts = ["one STOP" + " two" * 200, "three" + " four" * 50, "five STOP" + " six" * 200]
    engine = ScriptedEngine(lambda *_: [encode("<content_text>" + text + END) for text in texts])
    live.engine.inner = engine
    answer = ask(client, n=3, stop="STOP", stream=stream)
    found = ["", "", ""]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            found[choice.index] += (choice.delta if stream else choice.message).content or ""
    assert found == ["one ", texts[1], "five "]
    assert engine.stopped == [(0, "stop"), (2, "stop")]


def test_stop_strings_leave_reasoning_and_near_misses_alone(say):
    client, _ = say(THINK + TEXT + END)
    message = ask(client, stop=["think", "Hello 🙂 wörld, okay"]).choices[0].message
    assert message.reasoning_content == "Let me think."
    assert message.content == "Hello 🙂 wörld, ok"


def test_length_in_the_middle_of_anything(say):
    turn = THINK + TEXT + CALL_F + END
    for limit in range(1, len(encode(turn))):
        client, _ = say(turn)
        choice = ask(client, tools=TOOLS, max_tokens=limit).choices[0]
        assert choice.finish_reason == "length"
        assert "�" not in (choice.message.content or "")
        streamed, reasons, _, _ = gather(ask(client, tools=TOOLS, max_tokens=limit, stream=True))
        assert reasons == ["length"]
        assert streamed["content"] == (choice.message.content or "")


def test_logprobs_are_of_the_answer_only(say):
    client, _ = say(THINK + TEXT + CALL_F + END)
    choice = ask(client, tools=TOOLS, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content
    assert [len(e.top_logprobs) for e in entries] == [2] * len(entries)
    stream = ask(client, tools=TOOLS, logprobs=True, top_logprobs=2, stream=True)
    streamed = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == entries
    assert ask(client).choices[0].logprobs is None


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("turn", "content"),
    [
        ("<content_text>we will ST<end_message><content_model_end_sampling>", "we will ST"),
        ("<content_text>ST<end_message><message_model>f<content_invoke_tool_json>{", "ST"),
        ("Sure<end_message><message_model>S<content_thinking>hm<end_message>", "Sure"),
        ("<content_text>a<content_image>é<content_model_end_sampling>", None),
        ("ST<content_model_end_sampling>", "ST"),
        ("<message_user>no<end_message><message_model><content_text>yes", "yes"),
    ],
)
def test_log_probabilities_cover_the_content(say, turn, content, stream, chunk):
    """Also of text held back because it may begin a stop string, and of special tokens that are
    literal text."""
    client, engine = say(turn)
    engine.chunk = chunk
    answer = ask(client, logprobs=True, stop="STOP", stream=stream)
    if stream:
        choices = [c.choices[0] for c in answer]
        text = "".join(c.delta.content or "" for c in choices)
        entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
    else:
        text, entries = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert content is None or text == content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == text


def test_tool_choice(say):
    client, engine = say(CALL_F + END)
    ask(client, tools=TOOLS)
    ask(client, tools=TOOLS, tool_choice="none")
    ask(client, tools=TOOLS, tool_choice="required")
    ask(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
    (auto, auto_params), (none, none_params), (_, required), (_, named) = engine.submitted
    assert len(auto) > len(none)  # without calls the tools are not declared
    assert not auto_params.logit_bias
    assert none_params.logit_bias[INVOKE_TOOL_JSON] < -1e6
    assert auto_params.grammar is None
    assert '"f"' in required.grammar
    assert '"f"' not in named.grammar


def test_tools_stay_callable_beside_a_response_format(say):
    client, engine = say(CALL_F + END)
    ask(client, tools=TOOLS, response_format={"type": "json_object"})
    ask(client, tools=TOOLS, response_format={"type": "json_object"}, tool_choice="none")
    (_, auto), (_, none) = engine.submitted
    assert "call_0" in auto.grammar
    assert "call_0" not in none.grammar


def test_one_call_when_calls_may_not_be_parallel(say):
    client, engine = say(CALL_F + CALL_G + END)
    choice = ask(client, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert [c.function.name for c in choice.message.tool_calls] == ["f"]
    assert choice.finish_reason == "tool_calls"
    assert engine.aborted


def test_a_call_that_is_cut_off_is_not_a_finished_turn(say):
    client, _ = say(CALL_F + END)
    choice = ask(client, tools=TOOLS, parallel_tool_calls=False, max_tokens=12).choices[0]
    assert choice.finish_reason == "length"
    assert '{"city":"San José"'.startswith(choice.message.tool_calls[0].function.arguments)


def test_engine_errors(say):
    client, engine = say(TEXT, finish="error")
    with pytest.raises(openai.InternalServerError, match="planted"):
        ask(client)
    with pytest.raises(openai.APIError, match="planted"):
        list(ask(client, stream=True))
    engine.error_code = "no_token_possible"  # the request's own doing
    with pytest.raises(openai.BadRequestError, match="planted") as caught:
        ask(client)
    assert caught.value.code == "no_token_possible"
    engine.refusal = RequestError("too many", code="queue_full")
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client)
    assert caught.value.code == "queue_full"
    assert caught.value.response.headers["retry-after"]


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts(say, live, stream):
    _, engine = say("<content_text>" + "word " * 2000, delay=0.01)
    body = {"messages": HI, "stream": stream}
    with live.http() as client:
        connection = client.stream("POST", "/v1/chat/completions", json=body)
        if stream:
            with connection as response:
                next(response.iter_lines())
        else:
            client.timeout = 0.3
            with pytest.raises(Exception, match="timed out"), connection:
                pass
    deadline = time.monotonic() + 5
    while (engine.running or not engine.aborted) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.running == 0
    assert engine.aborted


def test_many_streams_at_once(say):
    client, _ = say(THINK + TEXT + CALL_F + END, delay=0.001)
    results = []

    def one():
        results.append(gather(ask(client, tools=TOOLS, stream=True))[0])

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16
    assert all(r["content"] == "Hello 🙂 wörld, ok" for r in results)


def test_api_key():
    with serving(saying(TEXT + END), ServerSettings(api_key="sécret")) as live:
        live.key = "wrong"
        with pytest.raises(openai.AuthenticationError) as caught:
            live.openai().models.list()
        assert caught.value.code == "invalid_api_key"
        with live.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/openapi.json").status_code == 401
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
            key = "Bearer sécret".encode()
            headers = [(b"authorization", key)]
            assert http.get("/v1/models", headers=headers).status_code == 200


def test_served_model_name():
    engine = ScriptedEngine(lambda _p, _s: [encode(TEXT + END)])
    with serving(engine, ServerSettings(served_model_name="org/inkling")) as live:
        client = live.openai()
        assert [m.id for m in client.models.list()] == ["org/inkling"]
        assert client.models.retrieve("org/inkling").id == "org/inkling"
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4", messages=HI)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")
        assert client.chat.completions.create(model="org/inkling", messages=HI).choices
