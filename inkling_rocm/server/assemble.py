"""One continuation of a chat: from the engine's updates to OpenAI's deltas and message."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from inkling_rocm.engine.detokenizer import StopStrings
from inkling_rocm.engine.request import TokenLogprob, Update
from inkling_rocm.engine.tokenizer import Tokenizer
from inkling_rocm.server.blocks import BlockKind, Delta, TurnParser
from inkling_rocm.server.context import engine_failure
from inkling_rocm.server.errors import ApiError

_MIN_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's floor


class ChatChoice:
    """State of continuation `index`.

    Args:
        stops: stop strings; they act on the visible answer only, never on reasoning or calls.
        open_block: block the prompt left open. logprobs: collect them for the answer's tokens.
        parallel_tools: False ends the turn after its first call.

    Attributes:
        finish_reason: OpenAI's word, None while running. completion_tokens: generated so far, up to
            the end of the answer. error: what to tell when the engine failed.
        message: the answer so far, as the non-streaming endpoint returns it.
    """

    def __init__(
        self,
        index: int,
        codec: Tokenizer,
        *,
        stops: Sequence[str] = (),
        open_block: BlockKind | None = None,
        logprobs: bool = False,
        parallel_tools: bool = True,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.error: ApiError | None = None
        self._codec = codec
        self._parser = TurnParser(codec.token_bytes, open_block=open_block)
        self._stops = StopStrings(stops, keep_match=False)
        self._want_logprobs = logprobs
        self._parallel_tools = parallel_tools
        self._pending: list[dict[str, Any]] = []  # of text that is held back
        self._name_tokens = 0  # the last of them, while they may be a tool's name
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def push(self, update: Update) -> list[dict[str, Any]]:
        """Take an update; returns {"delta": ..., "logprobs": ...} pieces, adjacent ones merged."""
        if self.finish_reason is not None:
            return []
        out: list[dict[str, Any]] = []
        for position, token_id in enumerate(update.token_ids):
            self.completion_tokens += 1
            if self._parser.opens_block(token_id):  # a name is no content
                del self._pending[len(self._pending) - self._name_tokens :]
            if self._want_logprobs and position < len(update.logprobs):
                self._note_logprob(token_id, update.logprobs[position])
            for delta in self._parser.feed(token_id):
                self._apply(delta, out)
                if self.finish_reason is not None:
                    return out
            if not self._parser.holds_name:
                self._name_tokens = 0
        if update.finish_reason is not None:
            for delta in self._parser.finish():
                self._apply(delta, out)
            if self.finish_reason is None:
                self._emit_content(self._stops.finish(), out)
                self._finish(update)
        return out

    def message(self) -> dict[str, Any]:
        """The finished message."""
        content: str | None = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["content"] = content or None
            message["tool_calls"] = self._tool_calls
        return message

    def logprobs(self) -> dict[str, Any] | None:
        """Log probabilities of the answer's tokens, when asked for."""
        return {"content": self._logprobs, "refusal": None} if self._want_logprobs else None

    def _finish(self, update: Update) -> None:
        reason: str = update.finish_reason or "stop"
        if reason in ("abort", "error"):
            self.error = engine_failure(update)
        elif reason == "stop" and self._tool_calls:
            reason = "tool_calls"
        self.finish_reason = reason

    def _apply(self, delta: Delta, out: list[dict[str, Any]]) -> None:
        if delta.kind == "content":
            text, matched = self._stops.add(delta.text)
            self._emit_content(text, out)
            if matched is not None:
                self.finish_reason = "stop"
            return
        self._emit_content(self._stops.finish(), out)
        if delta.kind == "reasoning":
            self._reasoning.append(delta.text)
            _add_text(out, "reasoning_content", delta.text)
        elif delta.kind == "tool_name":
            head = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            kept, sent = ({"name": delta.text, "arguments": ""} for _ in range(2))
            self._tool_calls.append({**head, "function": kept})
            call = {"index": delta.index, **head, "function": sent}
            out.append({"delta": {"tool_calls": [call]}})
        elif delta.kind == "tool_arguments":
            self._tool_calls[delta.index]["function"]["arguments"] += delta.text
            _add_arguments(out, delta)
        elif not self._parallel_tools:
            self.finish_reason = "tool_calls"

    def _emit_content(self, text: str, out: list[dict[str, Any]]) -> None:
        if not text:
            return
        self._content.append(text)
        _add_text(out, "content", text)
        if self._want_logprobs:
            piece = out[-1].setdefault("logprobs", {"content": [], "refusal": None})
            piece["content"] += self._pending
            self._logprobs += self._pending
            self._pending = []

    def _note_logprob(self, token_id: int, entry: TokenLogprob) -> None:
        if self._parser.is_content(token_id):
            self._pending.append(chat_logprob(self._codec, entry))
            self._name_tokens += 1


def _add_text(out: list[dict[str, Any]], field: str, text: str) -> None:
    if out and set(out[-1]["delta"]) == {field}:
        out[-1]["delta"][field] += text
    else:
        out.append({"delta": {field: text}})


def _add_arguments(out: list[dict[str, Any]], delta: Delta) -> None:
    last = out[-1]["delta"].get("tool_calls") if out else None
    if last and last[0]["index"] == delta.index:
        last[0]["function"]["arguments"] += delta.text
    else:
        call = {"index": delta.index, "function": {"arguments": delta.text}}
        out.append({"delta": {"tool_calls": [call]}})


def floor_logprob(value: float | None) -> float:
    """A finite log probability."""
    return max(value, _MIN_LOGPROB) if value is not None and value == value else _MIN_LOGPROB


def chat_logprob(codec: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """OpenAI's chat form of one token's log probability."""

    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = codec.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": floor_logprob(logprob), "bytes": list(raw)}

    top = [one(token_id, logprob) for token_id, logprob in entry.top]
    return {**one(entry.token_id, entry.logprob), "top_logprobs": top}
