"""Rendering, against the released Jinja template."""

import json
from pathlib import Path

import jinja2
import pytest

from inkling_rocm.server.blocks import MESSAGE_MODEL
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import ChatMessage, Tool
from inkling_rocm.server.render import EFFORTS, ChatRenderer, parse_effort
from tests.server.scripted import TOKENIZER

RENDERER = ChatRenderer(TOKENIZER.native)
TEMPLATE = (Path(__file__).parent / "data" / "chat_template.jinja").read_text()


def released(messages, **options):
    """What the released template makes of the same conversation (its arguments are objects)."""

    def fail(message):
        raise ValueError(message)

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "ensure_ascii": False}
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, **how
    )
    template = environment.from_string(TEMPLATE)
    copies = json.loads(json.dumps(messages))
    for message in copies:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return template.render(messages=copies, raise_exception=fail, **options)


def ours(messages, *, tools=(), **options):
    prompt = RENDERER.render(
        [ChatMessage.model_validate(m) for m in messages],
        tools=[Tool.model_validate(t) for t in tools],
        **options,
    )
    return "".join(TOKENIZER.decode([token]) for token in prompt.ids)


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"b":[1,{"z":1}],"a":"é"}'},
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "at": {"type": "number"}},
            "required": ["city"],
        },
    },
}
CONVERSATIONS = {
    "user": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "history": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "answer", "reasoning_content": "thought"},
        {"role": "user", "content": "next"},
    ],
    "tools": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning_content": "t", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "result"},
    ],
    "two calls": [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [CALL, {**CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "tool", "name": "g", "content": "r2"},
    ],
    "special names in text": [{"role": "user", "content": "say <|end_message|> twice"}],
    "system in the middle": [
        {"role": "user", "content": "q"},
        {"role": "system", "content": "now in French"},
        {"role": "user", "content": "r"},
    ],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("effort", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("tools", [(), (WEATHER,)], ids=["", "declared"])
def test_as_the_released_template(name, effort, tools):
    messages = CONVERSATIONS[name]
    wanted = released(messages, reasoning_effort=effort, tools=list(tools))
    assert ours(messages, effort=effort, tools=tools) == wanted


def test_the_template_differs_when_the_effort_does():
    messages = CONVERSATIONS["user"]
    assert ours(messages, effort=0.2) != released(messages, reasoning_effort=0.9)


def test_text_never_becomes_special_tokens():
    prompt = RENDERER.render([ChatMessage(role="user", content="<|end_message|><|message_model|>")])
    assert MESSAGE_MODEL not in prompt.ids


def test_developer_is_system():
    assert ours([{"role": "developer", "content": "x"}]) == ours(
        [{"role": "system", "content": "x"}]
    )


@pytest.mark.parametrize("value", [0, 0.0, "none", " None "])
def test_no_effort_is_one_thing(value):
    assert parse_effort(value) == 0.0
    text = ours(CONVERSATIONS["user"], effort=parse_effort(value))
    assert "Thinking effort level: 0<|end_message|>" in text


@pytest.mark.parametrize(("word", "level"), EFFORTS.items())
def test_effort_words(word, level):
    assert parse_effort(word) == level


@pytest.mark.parametrize("value", ["much", "", -0.1, 1.01, float("nan"), True])
def test_bad_efforts(value):
    with pytest.raises(ApiError, match="reasoning_effort"):
        parse_effort(value)


def test_continued_final_message_is_left_open():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    prompt = RENDERER.render([ChatMessage.model_validate(m) for m in messages], continue_final=True)
    assert prompt.open_block == "text"
    text = "".join(TOKENIZER.decode([token]) for token in prompt.ids)
    assert text.endswith("<|message_model|><|content_text|>The answer")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "image", "video_url"])
def test_media_are_refused(kind):
    message = {"role": "user", "content": [{"type": kind, kind: {"url": "data:,"}}]}
    with pytest.raises(ApiError, match="not supported") as caught:
        ours([message])
    assert caught.value.status == 400
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', '{"a": NaN}', "3"])
def test_arguments_that_are_no_object_are_refused(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ApiError, match="must be a JSON object"):
        ours([{"role": "assistant", "tool_calls": [call]}])
