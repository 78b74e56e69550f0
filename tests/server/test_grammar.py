"""Whole-turn grammars: which turns the engine's compiler lets through."""

import pytest

from inkling_rocm.engine.constraint import ConstraintCompiler, why_too_large
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.server import grammar
from inkling_rocm.server.blocks import END_OF_TEXT, END_SAMPLING
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import Tool
from tests.server.scripted import TOKENIZER, encode

COMPILER = ConstraintCompiler(TOKENIZER, (END_SAMPLING, END_OF_TEXT), 200058)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["SF", "NY"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    (0, Tool.model_validate({"function": {"name": "get_weather", "parameters": CITY}})),
    (1, Tool.model_validate({"function": {"name": "get_time"}})),
]
MODEL = "<message_model>"
END = "<end_message>"
TURN_END = "<content_model_end_sampling>"
THINK = f"{MODEL}<content_thinking>let me see\n{{}}{END}"
WEATHER = 'get_weather<content_invoke_tool_json>{"name":"get_weather","args":{"city":"SF"}}' + END
TIME = 'get_time<content_invoke_tool_json>{"name":"get_time","args":{}}' + END


def accepts(text, lark):
    """Whether every token of a turn is permitted where it comes."""
    constraint = COMPILER.compile(SamplingParams(grammar=lark))
    for token in encode(text):
        if not constraint.allowed()[token]:
            return False
        assert constraint.add(token) is None
    return True


@pytest.mark.parametrize(
    ("turn", "fits"),
    [
        (WEATHER + TURN_END, True),
        (MODEL + WEATHER + TURN_END, True),
        (MODEL + WEATHER + "<endoftext>", True),
        (THINK + MODEL + WEATHER + MODEL + TIME + TURN_END, True),
        (THINK, True),
        (TURN_END, False),
        (THINK + TURN_END, False),
        ("Hello", False),
        (f"{MODEL}<content_text>", False),
        (WEATHER.replace("SF", "LA"), False),
        (WEATHER.replace('"get_weather"', '"get_time"'), False),
        (WEATHER.removesuffix(END) + TURN_END, False),
        (MODEL + WEATHER + MODEL + TURN_END, False),
    ],
)
def test_required_calls(turn, fits):
    calls = grammar.tool_calls(TOOLS, parallel=True, enforce_parameters=True)
    assert accepts(turn, grammar.turn(calls=calls, reasoning=True)) is fits


def test_single_and_unthinking_calls():
    calls = grammar.tool_calls(TOOLS, parallel=False, enforce_parameters=True)
    one = grammar.turn(calls=calls, reasoning=False)
    assert accepts(MODEL + TIME + TURN_END, one)
    assert not accepts(MODEL + TIME + MODEL + TIME, one)
    assert not accepts(THINK, one)
    calls = grammar.tool_calls(TOOLS[:1], parallel=False, enforce_parameters=True)
    named = grammar.turn(calls=calls, reasoning=True)
    assert accepts(WEATHER, named)
    assert not accepts(TIME, named)


ANSWER = '{"city": "SF"}'


@pytest.mark.parametrize(
    ("turn", "fits"),
    [
        (f"{MODEL}<content_text>{ANSWER}{END}{TURN_END}", True),
        (f"<content_text>{ANSWER}{END}{TURN_END}", True),
        (f"<content_text>{ANSWER}{TURN_END}", True),
        (f"<content_text>{ANSWER}<endoftext>", True),
        (f"<content_text>{ANSWER}<begin_of_text>{TURN_END}", True),
        (f"<content_text>{ANSWER}{END}<begin_of_text>{TURN_END}", True),
        (f"{THINK}{MODEL}<content_text>{ANSWER}", True),
        (f"<content_text>{{\n  {ANSWER[1:-1]}\n}}{END}", True),
        (ANSWER, False),
        (f"<content_text>{ANSWER} and more", False),
        (f"<content_text>{ANSWER}{END}{MODEL}", False),
        ("<content_text>" + TURN_END, False),
        (THINK + TURN_END, False),
        (f"<content_text>{ANSWER.replace('SF', 'LA')}", False),
    ],
)
def test_json_answers(turn, fits):
    lark = grammar.turn(answer=grammar.json_answer(CITY, "x"), reasoning=True)
    assert accepts(turn, lark) is fits


def test_an_answer_or_calls():
    calls = grammar.tool_calls(TOOLS, parallel=True, enforce_parameters=False)
    lark = grammar.turn(answer=grammar.json_answer(CITY, "x"), calls=calls, reasoning=True)
    assert accepts(f"{THINK}{MODEL}<content_text>{ANSWER}{END}{TURN_END}", lark)
    assert accepts(THINK + MODEL + WEATHER.replace("SF", "LA") + MODEL + TIME + TURN_END, lark)
    assert not accepts(f"{MODEL}<content_text>{{}}", lark)
    assert not accepts(MODEL + WEATHER + f"{MODEL}<content_text>", lark)


def test_answer_in_an_open_block():
    answer = grammar.json_answer(CITY, "x")
    lark = grammar.turn(answer=answer, reasoning=True, open_block="text")
    assert accepts(f"{ANSWER}{END}{TURN_END}", lark)
    assert not accepts("<content_text>", lark)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), ("x\ny", "x\ny"), (r"[0-9]{2}\.", "42."), (r"é+", "éé")],
)
def test_regular_expressions(pattern, text):
    lark = grammar.turn(answer=grammar.regex_answer(pattern, "regex"), reasoning=False)
    assert accepts(f"<content_text>{text}{END}{TURN_END}", lark)
    assert not accepts(f"<content_text>{text}!{END}", lark)


@pytest.mark.parametrize(
    ("pattern", "fits", "differs"),
    [
        ("a/b", "a/b", "a\\b"),
        (r"a\/b", "a/b", r"a\b"),
        (r"a\\/b", r"a\/b", "a/b"),
        (r"a\\\/b", r"a\/b", "a/b"),
        (r"[/\\]+", r"/\/", "a"),
        ("a\nb", "a\nb", "a b"),
        (r"\d+\\", "12\\", "12/"),
    ],
)
def test_a_regex_means_the_same_inside_the_turn(pattern, fits, differs):
    lark = grammar.turn(answer=grammar.regex_answer(pattern, "regex"), reasoning=False)
    opener = f"{MODEL}<content_text>"
    assert accepts(f"{opener}{fits}{END}{TURN_END}", lark)
    assert not accepts(f"{opener}{differs}{END}{TURN_END}", lark)


def test_parameters_of_all_tools_have_a_limit():
    half = {"properties": {f"p{i}": {"type": "string"} for i in range(5_000)}}
    tools = [
        (i, Tool.model_validate({"function": {"name": f"f{i}", "parameters": half}}))
        for i in (0, 1)
    ]
    grammar.tool_calls(tools[:1], parallel=True, enforce_parameters=True)
    grammar.tool_calls(tools, parallel=True, enforce_parameters=False)
    with pytest.raises(ApiError, match=r"together: .* at most 262144 are compiled") as caught:
        grammar.tool_calls(tools, parallel=True, enforce_parameters=True)
    assert caught.value.param == "tools"


def test_what_many_tools_add_to_their_parameters_counts():
    """Whatever of tools is not refused here makes no grammar that the engine refuses."""
    params = {"properties": {"a": {"type": "string", "description": "d" * 700}}}
    tools = [
        (i, Tool.model_validate({"function": {"name": f"f{i}", "parameters": params}}))
        for i in range(300)
    ]
    with pytest.raises(ApiError, match=r"together: .* at most 262144 are compiled") as caught:
        grammar.tool_calls(tools, parallel=True, enforce_parameters=True)
    assert caught.value.param == "tools"
    calls = grammar.tool_calls(tools[:200], parallel=True, enforce_parameters=True)
    assert why_too_large(grammar.turn(calls=calls, reasoning=True)) is None


def test_parameters_that_are_nested_too_deep():
    parameters = {}
    for _ in range(2000):
        parameters = {"properties": {"a": parameters}}
    tool = Tool.model_validate({"function": {"name": "f"}})
    tool.function.parameters = parameters
    with pytest.raises(ApiError, match="recursion") as caught:
        grammar.tool_calls([(3, tool)], parallel=True, enforce_parameters=True)
    assert caught.value.param == "tools[3].function.parameters"
