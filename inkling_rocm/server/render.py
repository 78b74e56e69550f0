"""Chat messages to prompt ids, through tml-renderers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tml_renderers import chat, v0
from tml_renderers.tokenizers import O200kBaseChatTokenizer

from inkling_rocm.server import blocks
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import ChatMessage, ContentPart, Tool, ToolCall

DEFAULT_EFFORT = 0.9
# The words of the released chat template.
EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "max": 0.99}

_IMAGE_PARTS = (
    "image",
    "image_url",
    "input_image",
    "audio",
    "audio_url",
    "input_audio",
    "video_url",
)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt and the block it leaves open for the model to continue."""

    ids: list[int]
    open_block: blocks.BlockKind | None = None


def parse_effort(value: str | float | None) -> float:
    """The effort level 0 .. 1 of a reasoning_effort field; 0, 0.0 and "none" are the same.

    Raises:
        ApiError: 400, an unknown word or a number outside 0 .. 1.
    """
    if value is None:
        return DEFAULT_EFFORT
    effort: float | None = None
    if isinstance(value, str):
        effort = EFFORTS.get(value.strip().lower())
    elif not isinstance(value, bool):
        effort = float(value)
    if effort is None or not 0.0 <= effort <= 1.0:
        raise ApiError(
            f"reasoning_effort {str(value)[:40]!r}: wanted a number from 0 to 1 or one of "
            f"{', '.join(EFFORTS)}.",
            code="invalid_value",
            param="reasoning_effort",
        )
    return effort


class ChatRenderer:
    """Renders conversations. One instance serves all requests.

    Args:
        tokenizer: the o200k chat tokenizer.
    """

    def __init__(self, tokenizer: O200kBaseChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = v0.Renderer(self._tokenizer)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Tool] = (),
        effort: float = DEFAULT_EFFORT,
        continue_final: bool = False,
    ) -> RenderedPrompt:
        """Render a conversation for completion.

        Args:
            tools: declared before everything else. effort: 0 .. 1.
            continue_final: leave the last message, an assistant's text, open for continuation.

        Raises:
            ApiError: 400, a message that cannot be rendered (media, arguments that are no JSON
                object, ...).
        """
        opened: str | None = None
        if continue_final:
            opened = _final_text(messages)
            messages = messages[:-1]
        rendered = [_declare(tools)] if tools else []
        names: dict[str, str] = {}
        try:
            for index, message in enumerate(messages):
                rendered += _messages(message, f"messages[{index}]", names)
            spans, _ = self._renderer.render_for_completion_with_effort(rendered, effort)
        except (ValueError, TypeError, OverflowError) as error:
            raise ApiError(f"The messages cannot be rendered: {error}", param="messages") from error
        ids = [token for span in spans for token in _text_ids(span)]
        if opened is None:
            return RenderedPrompt(ids)
        ids += [blocks.MESSAGE_MODEL, blocks.CONTENT_TEXT]
        return RenderedPrompt(ids + self._tokenizer.encode_ordinary(opened), "text")


def _text_ids(span: chat.TokenSpan) -> list[int]:
    inner = span.span
    assert isinstance(inner, chat.EncodedTextTokenSpan), "media parts are refused before rendering"
    return inner.int_tokens


def _final_text(messages: Sequence[ChatMessage]) -> str:
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls or last.content is None:
        raise ApiError(
            "continue_final_message needs a last message by the assistant with text and no tool "
            f"calls; it is by {last.role!r}.",
            code="invalid_value",
            param="continue_final_message",
        )
    return "".join(_texts(last.content, f"messages[{len(messages) - 1}]"))


def _declare(tools: Sequence[Tool]) -> chat.Message:
    specs = []
    for index, tool in enumerate(tools):
        function = tool.function
        try:
            spec = chat.ToolSpecJson(
                tool.type, function.name, function.description or "", function.parameters or {}
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise ApiError(
                f"The parameters of tool {function.name!r} are not plain JSON: {error}",
                code="invalid_function_parameters",
                param=f"tools[{index}].function.parameters",
            ) from error
        specs.append(spec)
    author = chat.Author(chat.AuthorKind.System, "tool_declare")
    return chat.Message(chat.ToolDeclareJson(specs), author)


def _messages(message: ChatMessage, where: str, names: dict[str, str]) -> list[chat.Message]:
    """The renderer's messages for one of OpenAI's; `names` collects tool_call_id -> name."""
    kind = {
        "system": chat.AuthorKind.System,
        "developer": chat.AuthorKind.System,
        "user": chat.AuthorKind.User,
        "assistant": chat.AuthorKind.Model,
        "tool": chat.AuthorKind.Tool,
    }[message.role]
    if message.role == "tool":
        name = message.name or names.get(message.tool_call_id or "")
        text = "".join(_texts(message.content, where))
        return [chat.Message(chat.Text(text), chat.Author(kind, name or None))]
    author = chat.Author(kind)
    out: list[chat.Message] = []
    reasoning = message.reasoning_content or message.reasoning
    if message.role == "assistant" and reasoning:
        out.append(chat.Message(chat.Thinking(reasoning), author))
    calls = message.tool_calls or [] if message.role == "assistant" else []
    for text in _texts(message.content, where):
        if text or not calls:  # an empty text beside tool calls is only clients' way to say "none"
            out.append(chat.Message(chat.Text(text), author))
    for index, call in enumerate(calls):
        if call.id:
            names[call.id] = call.function.name
        out.append(chat.Message(_invoke(call, f"{where}.tool_calls[{index}]"), author))
    if message.role == "assistant":
        out.append(chat.Message(chat.ModelEndSampling(), author))
    return out


def _texts(content: str | list[ContentPart] | None, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(content):
        if part.type in _IMAGE_PARTS:
            raise ApiError(
                f"Content part {part.type!r}: images and audio are not supported by this server "
                "yet; send text parts.",
                code="unsupported_content",
                param=f"{where}.content[{index}].type",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (None, "text", "input_text", "output_text", "refusal") or text is None:
            raise ApiError(
                f"Content part of type {str(part.type)[:40]!r} without text: wanted "
                '{"type": "text", "text": ...}.',
                code="invalid_value",
                param=f"{where}.content[{index}]",
            )
        texts.append(text)
    return texts


def _invoke(call: ToolCall, where: str) -> chat.InvokeTool:
    arguments: Any = call.function.arguments
    try:
        if isinstance(arguments, str):
            arguments = orjson.loads(arguments) if arguments.strip() else {}
        if not isinstance(arguments or {}, dict):
            raise ValueError(f"got a {type(arguments).__name__}")
        args = [
            chat.ToolArg(name, orjson.dumps(value).decode())
            for name, value in (arguments or {}).items()
        ]
    except (ValueError, TypeError) as error:
        raise ApiError(
            f"The arguments of the call of {call.function.name!r} must be a JSON object: {error}",
            code="invalid_value",
            param=f"{where}.function.arguments",
        ) from error
    structured = chat.StructuredToolCall(call.function.name, args, tool_call_id=call.id)
    return chat.InvokeTool(structured)
