"""Grammars of a whole turn, in llguidance's Lark dialect over token ids (<[id]>).

The turn's structure is part of the grammar: reasoning first if any, then the constrained block, so
the constraint neither touches the reasoning nor forbids the tokens that close the block and the
turn (the engine admits the turn end wherever the grammar accepts).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from inkling_rocm.engine.constraint import JSON_WHITE_SPACE, brief, why_too_large
from inkling_rocm.server import blocks
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import Tool

# What could end a Lark regex literal. Escapes are taken whole: in \\/ the slash is not escaped.
_DELIMITERS = re.compile(r"\\.|/|\n", re.DOTALL)
# Calls are trained in compact JSON; without a fixed layout a weak model may pad them for ever.
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


def turn(
    *,
    answer: str | None = None,
    calls: Sequence[str] = (),
    reasoning: bool,
    open_block: blocks.BlockKind | None = None,
) -> str:
    """The grammar of a turn.

    Args:
        answer: rule of the answer block (json_answer, regex_answer); None = there may be none.
        calls: rules of tool calls (tool_calls); beside an answer the model may choose either.
        reasoning: a thinking block may come first. open_block: the prompt already opened the
            answer block, so that nothing but the answer can follow.
    """
    header = f"<[{blocks.MESSAGE_MODEL}]>?"
    # begin_of_text sometimes follows the answer in place of, or after, the block's end.
    end = f"(<[{blocks.END_MESSAGE}]> <[{blocks.BEGIN_OF_TEXT}]>? | <[{blocks.BEGIN_OF_TEXT}]>)?"
    if open_block is not None:
        assert answer is not None
        return f"start: answer {end}\n{answer}"
    choices = []
    rules = list(calls)
    if answer is not None:
        choices.append(f"<[{blocks.CONTENT_TEXT}]> answer {end}")
        rules.append(answer)
    if calls:
        choices.append("calls")
    if reasoning:
        opener = f"{header} <[{blocks.CONTENT_THINKING}]>"
        rules.append(f"reasoning: {opener} /(.|\\n)*/ <[{blocks.END_MESSAGE}]>")
    start = f"start: {'reasoning?' if reasoning else ''} {header} ({' | '.join(choices)})"
    return "\n".join([start, *rules])


def json_answer(schema: dict[str, Any], param: str) -> str:
    """An answer that matches a JSON schema.

    Args:
        param: field to name in errors.

    Raises:
        ApiError: 400, the schema is invalid or uses what the grammar engine lacks.
    """
    check_schema(schema, param)
    spaced = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return f"answer: %json {json.dumps(spaced)}"


def regex_answer(pattern: str, param: str) -> str:
    """An answer that matches a regular expression. Raises: as json_answer."""
    problem = why_too_large(pattern)
    if problem is None:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    if problem:
        raise ApiError(f"Invalid regex: {brief(problem)}", code="invalid_regex", param=param)
    return f"answer: /{_DELIMITERS.sub(_in_literal, pattern)}/"


def _in_literal(found: re.Match[str]) -> str:
    """What a part of a pattern becomes between the slashes of a Lark literal."""
    text = found.group()
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(text, text)


def tool_calls(
    tools: Sequence[tuple[int, Tool]], *, parallel: bool, enforce_parameters: bool
) -> list[str]:
    """At least one call of one of the tools.

    Args:
        tools: (position in the request, tool); the position names it in errors.
        parallel: more than one call is allowed.
        enforce_parameters: arguments match the tool's schema, else they are any JSON object.

    Raises:
        ApiError: 400, parameters that are no usable JSON schema.
    """
    names = " | ".join(f"call_{number}" for number in range(len(tools)))
    more = f"(<[{blocks.MESSAGE_MODEL}]> call)*" if parallel else ""
    rules = [f"calls: call {more}", f"call: ({names}) <[{blocks.END_MESSAGE}]>"]
    fields = [f"tools[{index}].function.parameters" for index, _ in tools]
    schemas: list[dict[str, Any]] = [{"type": "object"} for _ in tools]
    if enforce_parameters:
        schemas = [{"type": "object", **(tool.function.parameters or {})} for _, tool in tools]
    for number, ((_, tool), schema, field) in enumerate(zip(tools, schemas, fields, strict=True)):
        name = json.dumps(tool.function.name)
        prefix = json.dumps(f'{{"name":{name},"args":')
        compact = _written({**schema, "x-guidance": _COMPACT}, field)
        rules += [
            f'call_{number}: {name} <[{blocks.INVOKE_TOOL_JSON}]> {prefix} args_{number} "}}"',
            f"args_{number}: %json {compact}",
        ]
    if problem := why_too_large("\n".join(rules)):
        message = f"The tools together: {problem}"
        raise ApiError(message, code="invalid_json_schema", param="tools")
    if enforce_parameters:
        for schema, field in zip(schemas, fields, strict=True):
            check_schema(schema, field)
    return rules


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raises: ApiError: 400, not a schema the grammar engine can enforce, and why."""
    text = _written(schema, param)
    problem = why_too_large(text)
    if problem is None:
        try:
            problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        except ValueError as error:
            problem = str(error)
    if problem:
        raise _invalid(problem, param)


def _written(schema: dict[str, Any], param: str) -> str:
    """A schema as JSON. Raises: ApiError: 400, it has none."""
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error), param) from error


def _invalid(problem: str, param: str) -> ApiError:
    message = f"Invalid JSON schema: {brief(problem)}"
    return ApiError(message, code="invalid_json_schema", param=param)
