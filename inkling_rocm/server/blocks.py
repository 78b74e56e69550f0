"""Parses a turn of the model token by token into reasoning, content and tool calls.

A turn is a sequence of blocks: [author token] [author name] content token, payload, end_message;
and one turn-end token. `tml_renderers` parses complete turns only; this parser gives the same
result for them however the tokens arrive, and never raises on truncated or malformed ones:

- A block may lack its author token (the first one often does: the prompt may have consumed it), or
  be opened by the prompt altogether (`open_block`).
- Text where a block header is expected may be a tool's name, so it is held back while it could be
  one ([A-Za-z0-9_.:-], at most 64) and dropped when a content token follows; other text is an
  answer without a header and becomes content at once.
- Inside a block other special tokens are literal text, as in the batch parser, except
  begin_of_text, which may follow JSON and is not part of it.
- Blocks by another author than the model are no answer and are dropped.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from inkling_rocm.server.tool_json import Piece, ToolCallScanner, ToolTextWrapper

END_OF_TEXT = 199999
MESSAGE_USER = 200000
MESSAGE_MODEL = 200001
MESSAGE_SYSTEM = 200002
MESSAGE_TOOL = 200003
CONTENT_TEXT = 200004
CONTENT_IMAGE = 200005
END_SAMPLING = 200006
CONTENT_THINKING = 200008
END_MESSAGE = 200010
CONTENT_AUDIO = 200020
CONTENT_TOOL_ERROR = 200022
CONTENT_XML = 200024
BEGIN_OF_TEXT = 200028
INVOKE_TOOL_JSON = 200049
INVOKE_TOOL_TEXT = 200057

FIRST_SPECIAL = 199998
TURN_ENDS = frozenset({END_SAMPLING, END_OF_TEXT})

_AUTHORS = frozenset({MESSAGE_USER, MESSAGE_MODEL, MESSAGE_SYSTEM, MESSAGE_TOOL})
_TEXT_OPENERS = frozenset(
    {CONTENT_TEXT, CONTENT_IMAGE, CONTENT_AUDIO, CONTENT_TOOL_ERROR, CONTENT_XML}
)
_OPENERS = _TEXT_OPENERS | {CONTENT_THINKING, INVOKE_TOOL_JSON, INVOKE_TOOL_TEXT}
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}", re.ASCII)

BlockKind = Literal["text", "thinking"]
_State = Literal["header", "headerless", "text", "thinking", "tool", "dropped", "ended"]


@dataclass(frozen=True)
class Delta:
    """A piece of the turn.

    Attributes:
        kind: "reasoning" and "content" carry text; "tool_name" opens call `index` and carries the
            function's name; "tool_arguments" carries the next piece of its arguments; "tool_end"
            closes it, unless the output was cut off inside.
    """

    kind: Literal["reasoning", "content", "tool_name", "tool_arguments", "tool_end"]
    text: str = ""
    index: int = 0


class TurnParser:
    """Feed it the generated ids one by one; each call returns what became known.

    Args:
        token_bytes: bytes of one token; special tokens give their name, e.g. b"<|end_message|>".
        open_block: the block the prompt left open, if any.

    Attributes:
        reasoning_tokens: tokens seen inside thinking blocks. ended: the turn-end token was seen.
        tool_calls: calls begun so far.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, open_block: BlockKind | None = None
    ) -> None:
        self._token_bytes = token_bytes
        self._state: _State = open_block or "header"
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._name = ""
        self._author_seen = False
        self._foreign = False
        self._tool: ToolCallScanner | ToolTextWrapper | None = None
        self.reasoning_tokens = 0
        self.tool_calls = 0

    @property
    def ended(self) -> bool:
        return self._state == "ended"

    @property
    def holds_name(self) -> bool:
        """Text is held back because it may turn out to be a tool's name."""
        return self._state == "header" and bool(self._name)

    def opens_block(self, token_id: int) -> bool:
        """Whether this token, fed next, makes the held text a name."""
        return self._state == "header" and token_id in _OPENERS

    def is_content(self, token_id: int) -> bool:
        """Whether this token, fed next, is (or may become) part of the visible answer."""
        if token_id < FIRST_SPECIAL:
            return self._state in ("header", "headerless", "text") and not self._foreign
        structural = token_id in TURN_ENDS or token_id in (END_MESSAGE, BEGIN_OF_TEXT)
        return self._state == "text" and not structural

    def feed(self, token_id: int) -> list[Delta]:
        """Take the next generated token. Tokens after the turn's end are ignored."""
        if self._state == "ended":
            return []
        if self._state == "thinking" and token_id not in TURN_ENDS and token_id != END_MESSAGE:
            self.reasoning_tokens += 1
        if self._state in ("header", "headerless"):
            return list(self._feed_header(token_id))
        return list(self._feed_block(token_id))

    def finish(self) -> list[Delta]:
        """The output ended here, perhaps in the middle of a block. Bytes of an incomplete
        character are dropped."""
        if self._state == "ended":
            return []
        # Text after an author token was going to be a name; without one it is a short answer.
        deltas = [] if self._author_seen else list(self._flush_name())
        if self._state == "tool":
            deltas += self._close_tool(complete=False)
        self._state = "ended"
        return deltas

    def _feed_header(self, token_id: int) -> Iterator[Delta]:
        if token_id < FIRST_SPECIAL:
            text = self._decoder.decode(self._token_bytes(token_id))
            if self._foreign:
                return
            if self._state == "headerless":
                yield from self._text("content", text)
                return
            self._name += text
            if not _NAME.fullmatch(self._name) or self._decoder.getstate()[0]:
                yield from self._flush_name()
                self._state = "headerless"
        elif token_id in _OPENERS:
            yield from self._open(token_id)
        elif token_id in _AUTHORS or token_id == END_MESSAGE or token_id in TURN_ENDS:
            yield from self._flush_name()
            self._decoder.reset()
            self._author_seen = token_id in _AUTHORS
            self._foreign = self._author_seen and token_id != MESSAGE_MODEL
            self._state = "ended" if token_id in TURN_ENDS else "header"

    def _open(self, token_id: int) -> Iterator[Delta]:
        name, self._name = self._name, ""
        self._decoder.reset()
        if self._foreign:
            self._state = "dropped"
        elif token_id == CONTENT_THINKING:
            self._state = "thinking"
        elif token_id in _TEXT_OPENERS:
            self._state = "text"
        else:
            self._state = "tool"
            self._tool = (
                ToolCallScanner(name)
                if token_id == INVOKE_TOOL_JSON
                else ToolTextWrapper(name or "unknown")
            )
            self.tool_calls += 1
            yield from self._tool_deltas(self._tool.feed(""))

    def _feed_block(self, token_id: int) -> Iterator[Delta]:
        if token_id == END_MESSAGE or token_id in TURN_ENDS:
            # A character cut off by the block's end will never be completed: show it as U+FFFD,
            # as long as the block was really closed.
            if token_id == END_MESSAGE:
                yield from self._payload(self._decoder.decode(b"", final=True))
            if self._state == "tool":
                yield from self._close_tool(complete=token_id == END_MESSAGE)
            self._decoder.reset()
            self._author_seen = self._foreign = False
            self._state = "ended" if token_id in TURN_ENDS else "header"
        elif token_id != BEGIN_OF_TEXT:
            yield from self._payload(self._decoder.decode(self._token_bytes(token_id)))

    def _payload(self, text: str) -> Iterator[Delta]:
        if self._state == "text":
            yield from self._text("content", text)
        elif self._state == "thinking":
            yield from self._text("reasoning", text)
        elif self._state == "tool":
            assert self._tool is not None
            yield from self._tool_deltas(self._tool.feed(text))

    def _text(self, kind: Literal["content", "reasoning"], text: str) -> Iterator[Delta]:
        if text:
            yield Delta(kind, text)

    def _flush_name(self) -> Iterator[Delta]:
        name, self._name = self._name, ""
        if not self._foreign:
            yield from self._text("content", name)

    def _close_tool(self, *, complete: bool) -> Iterator[Delta]:
        assert self._tool is not None
        yield from self._tool_deltas(self._tool.close(complete=complete))
        if complete:
            yield Delta("tool_end", index=self.tool_calls - 1)
        elif not self._tool.name_sent:
            self.tool_calls -= 1  # cut off before the function's name: there is no call to report
        self._tool = None

    def _tool_deltas(self, pieces: Iterator[Piece]) -> Iterator[Delta]:
        for kind, text in pieces:
            yield Delta(kind, text, self.tool_calls - 1)
