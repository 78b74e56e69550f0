"""The payload of a tool call, {"name": ..., "args": {...}}, read as it arrives.

The name is known from the block's header or from the "name" field, whichever comes first; the text
of the "args" value is passed on verbatim, so the pieces of a call concatenate to the JSON the model
wrote. A payload of another shape is passed on whole when it ends: nothing the model wrote is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

Piece = tuple[Literal["tool_name", "tool_arguments"], str]
_SPACE = " \t\r\n"


class ToolCallScanner:
    """Incremental reader of one JSON tool call.

    Args:
        name: function name from the block header, "" when it had none.

    Attributes:
        name_sent: the name was handed out (arguments always follow it).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.name_sent = False
        self._text = ""  # all payload so far
        self._pos = 0  # scanned up to here
        self._state = "start"
        self._key = ""
        self._keys: set[str] = set()
        self._value_start = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._held = ""  # arguments that came before the name
        self._args_seen = False

    def feed(self, text: str) -> Iterator[Piece]:
        """Take the next piece of payload; yield the name once and pieces of the arguments."""
        self._text += text
        arguments = self._scan()
        if self._name and not self.name_sent:
            self.name_sent = True
            yield "tool_name", self._name
        if self.name_sent:
            arguments, self._held = self._held + arguments, ""
            if arguments:
                yield "tool_arguments", arguments
        else:
            self._held += arguments

    def close(self, *, complete: bool) -> Iterator[Piece]:
        """The payload ended; `complete` says whether by its end token (else cut off)."""
        if not complete:
            return
        if not self.name_sent:
            self.name_sent = True
            yield "tool_name", self._name or "unknown"
        if self._args_seen:
            if self._held:
                yield "tool_arguments", self._held
        elif self._state == "done" and self._keys <= {"name"}:
            yield "tool_arguments", "{}"  # a call without arguments
        else:
            yield "tool_arguments", self._text

    def _scan(self) -> str:
        """Advance over all text; returns new text of the args value."""
        out: list[str] = []
        while self._pos < len(self._text) and self._state not in ("done", "malformed"):
            step = getattr(self, f"_in_{self._state}")
            if not step(self._text[self._pos], out):
                break
        return "".join(out)

    def _in_start(self, char: str, _out: list[str]) -> bool:
        if char == "{":
            self._state = "key"
        elif char not in _SPACE:
            self._state = "malformed"
        self._pos += 1
        return True

    def _in_key(self, char: str, _out: list[str]) -> bool:
        if char == '"':
            end = _string_end(self._text, self._pos)
            if end is None:
                return False
            self._key = _loads_string(self._text[self._pos : end])
            self._keys.add(self._key)
            self._pos = end
            self._state = "colon"
            return True
        if char == "}":
            self._state = "done"
        elif char not in _SPACE and char != ",":
            self._state = "malformed"
        self._pos += 1
        return True

    def _in_colon(self, char: str, _out: list[str]) -> bool:
        if char not in _SPACE and char != ":":
            self._begin_value()
            return True
        self._pos += 1
        return True

    def _begin_value(self) -> None:
        self._state = "value"
        self._value_start = self._pos
        self._depth, self._in_string, self._escaped = 0, False, False
        self._args_seen |= self._key == "args"

    def _in_value(self, char: str, out: list[str]) -> bool:
        if self._depth == 0 and not self._in_string and char in ",}":
            self._end_value()  # after a scalar; the delimiter is read by the key state
            return True
        if self._key == "args" and (self._depth or self._in_string or char not in _SPACE):
            out.append(char)
        self._pos += 1
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._depth == 0 and not self._in_string and char in '}]"':
            self._end_value()
        return True

    def _end_value(self) -> None:
        if self._key == "name" and not self._name:
            self._name = _loads_string(self._text[self._value_start : self._pos].strip())
        self._state = "key"


class ToolTextWrapper:
    """A tool call in free text. OpenAI's function calls need JSON, so its arguments become
    {"input": "<the text>"}."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.name_sent = False

    def feed(self, text: str) -> Iterator[Piece]:
        if not self.name_sent:
            self.name_sent = True
            yield "tool_name", self._name
            yield "tool_arguments", '{"input":"'
        if text:
            yield "tool_arguments", json.dumps(text, ensure_ascii=False)[1:-1]

    def close(self, *, complete: bool) -> Iterator[Piece]:
        if complete:
            yield "tool_arguments", '"}'


def _string_end(text: str, start: int) -> int | None:
    """Index after the JSON string that begins at start; None when it is not complete."""
    index = start + 1
    while index < len(text):
        if text[index] == "\\":
            index += 2
        elif text[index] == '"':
            return index + 1
        else:
            index += 1
    return None


def _loads_string(literal: str) -> str:
    """The value of a JSON string; other literals are taken as they are written."""
    try:
        value = json.loads(literal)
    except ValueError:
        return literal.strip('"')
    return value if isinstance(value, str) else literal
