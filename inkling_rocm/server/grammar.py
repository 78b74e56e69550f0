"""Grammars of a whole turn, in llguidance's Lark dialect over token ids (<[id]>).

The turn's structure is part of the grammar: reasoning first if any, then the constrained block, so
the constraint neither touches the reasoning nor forbids the tokens that close the block and the
turn (the engine admits the turn end wherever the grammar accepts).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

from inkling_rocm.engine.constraint import JSON_WHITE_SPACE
from inkling_rocm.server import blocks
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import Tool

# Calls are trained in compact JSON; without a fixed layout a weak model may pad them for ever.
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


def json_turn(
    schema: dict[str, Any], *, param: str, reasoning: bool, open_block: blocks.BlockKind | None
) -> str:
    """A turn whose one answer block matches a JSON schema.

    Args:
        param: field to name in errors. reasoning: thinking blocks may come first.
        open_block: the prompt already opened the answer block.

    Raises:
        ApiError: 400, the schema is invalid or uses what the grammar engine lacks.
    """
    check_schema(schema, param)
    spaced = {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
    return _answer_turn(
        f"answer: %json {json.dumps(spaced)}", reasoning=reasoning, open_block=open_block
    )


def regex_turn(
    pattern: str, *, param: str, reasoning: bool, open_block: blocks.BlockKind | None
) -> str:
    """A turn whose one answer block matches a regular expression. Raises: as json_turn."""
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    if problem:
        raise ApiError(f"Invalid regex: {_brief(problem)}", code="invalid_regex", param=param)
    escaped = pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    return _answer_turn(f"answer: /{escaped}/", reasoning=reasoning, open_block=open_block)


def tool_turn(tools: Sequence[tuple[int, Tool]], *, parallel: bool, reasoning: bool) -> str:
    """A turn of at least one call of one of the tools.

    Args:
        tools: (position in the request, tool); the position names it in errors.
        parallel: more than one call is allowed.

    Raises:
        ApiError: 400, parameters that are no usable JSON schema.
    """
    rules = []
    for number, (index, tool) in enumerate(tools):
        name = tool.function.name
        schema = {"type": "object", **(tool.function.parameters or {})}
        check_schema(schema, f"tools[{index}].function.parameters")
        prefix = json.dumps(f'{{"name":{json.dumps(name)},"args":')
        rules += [
            f"call_{number}: {json.dumps(name)} <[{blocks.INVOKE_TOOL_JSON}]> {prefix} "
            f'args_{number} "}}"',
            f"args_{number}: %json {json.dumps({**schema, 'x-guidance': _COMPACT})}",
        ]
    header = f"<[{blocks.MESSAGE_MODEL}]>"
    choice = " | ".join(f"call_{number}" for number in range(len(tools)))
    more = f"({header} call)*" if parallel else ""
    return "\n".join(
        [
            f"start: {_reasoning_ref(reasoning)} {header}? call {more}",
            f"call: ({choice}) <[{blocks.END_MESSAGE}]>",
            *rules,
            *_reasoning_rule(reasoning),
        ]
    )


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raises: ApiError: 400, not a schema the grammar engine can enforce, and why."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False))
        problem = LLMatcher.validate_grammar(grammar)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem:
        code = "invalid_json_schema"
        raise ApiError(f"Invalid JSON schema: {_brief(problem)}", code=code, param=param)


def _answer_turn(answer: str, *, reasoning: bool, open_block: blocks.BlockKind | None) -> str:
    # begin_of_text sometimes follows the JSON in place of, or after, the block's end.
    end = f"(<[{blocks.END_MESSAGE}]> <[{blocks.BEGIN_OF_TEXT}]>? | <[{blocks.BEGIN_OF_TEXT}]>)?"
    header = f"<[{blocks.MESSAGE_MODEL}]>? <[{blocks.CONTENT_TEXT}]>"
    reasoning = reasoning and open_block is None
    opening = "" if open_block else f"{_reasoning_ref(reasoning)} {header}"
    return "\n".join([f"start: {opening} answer {end}", answer, *_reasoning_rule(reasoning)])


def _reasoning_ref(reasoning: bool) -> str:
    return "reasoning?" if reasoning else ""


def _reasoning_rule(reasoning: bool) -> list[str]:
    if not reasoning:
        return []
    opener = f"<[{blocks.MESSAGE_MODEL}]>? <[{blocks.CONTENT_THINKING}]>"
    return [f"reasoning: {opener} /(.|\\n)*/ <[{blocks.END_MESSAGE}]>"]


def _brief(problem: str) -> str:
    return problem.splitlines()[0][:300] if problem.strip() else "not accepted"
