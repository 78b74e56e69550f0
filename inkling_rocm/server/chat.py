"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inkling_rocm.engine import RequestHandle
from inkling_rocm.engine.request import Update
from inkling_rocm.server import blocks, grammar
from inkling_rocm.server.assemble import ChatChoice
from inkling_rocm.server.context import ServerContext, json_response, usage
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import ChatBody, NamedToolChoice, Tool
from inkling_rocm.server.render import RenderedPrompt, parse_effort
from inkling_rocm.server.sampling import sampling_params, stop_strings
from inkling_rocm.server.streaming import DONE, EventStream, event, unless_disconnected

# Added to logits, this survives no sampling.
_NO_CALLS = {blocks.INVOKE_TOOL_JSON: -1e9, blocks.INVOKE_TOOL_TEXT: -1e9}


@dataclass(kw_only=True)
class _Chat:
    """One running chat request."""

    id: str
    created: int
    model: str
    handle: RequestHandle
    choices: list[ChatChoice]
    prompt_tokens: int
    include_usage: bool
    cached_tokens: int = 0

    @property
    def done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        return usage(
            self.prompt_tokens,
            sum(choice.completion_tokens for choice in self.choices),
            self.cached_tokens,
            sum(choice.reasoning_tokens for choice in self.choices),
        )

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def create_chat(context: ServerContext, request: Request) -> Response:
    """Answer a chat, at once or as a stream."""
    body = await context.read(request, ChatBody)
    context.refuse_when_draining()
    chat = await context.in_thread(lambda: _start(context, body))
    if body.stream:
        return EventStream(_events(chat), chat.handle.abort)
    result = await unless_disconnected(request, _collect(chat), chat.handle.abort)
    return Response(status_code=499) if result is None else json_response(result)


def _start(context: ServerContext, body: ChatBody) -> _Chat:
    """Render, constrain and submit. Raises: ApiError, RequestError."""
    tools, choice = _tools(body)
    effort = parse_effort(_effort_field(body))
    prompt = context.renderer.render(
        body.messages,
        tools=() if choice == "none" else tools,
        effort=effort,
        continue_final=bool(body.continue_final_message),
    )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = getattr(body, name)
    params = sampling_params(
        body,
        max_new_tokens=context.room(len(prompt.ids), wanted, name),
        vocab_size=context.vocab_size,
        stop=(),  # stop strings act on the answer only, which the engine cannot tell apart
        grammar=_turn_grammar(body, tools, choice, prompt, reasoning=effort > 0),
    )
    if tools and choice == "none":
        params = replace(params, logit_bias={**params.logit_bias, **_NO_CALLS})
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            "top_logprobs needs logprobs: true.", code="invalid_value", param="top_logprobs"
        )
    rid = f"chatcmpl-{uuid.uuid4().hex}"
    handle = context.submit(
        prompt.ids,
        params,
        rid,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        # What ends the turn on this side must be seen as it comes.
        stream=bool(body.stream or stop_strings(body) or body.parallel_tool_calls is False),
    )
    return _Chat(
        id=rid,
        created=int(time.time()),
        model=context.model_name,
        handle=handle,
        choices=[
            ChatChoice(
                index,
                context.tokenizer,
                stops=stop_strings(body),
                open_block=prompt.open_block,
                logprobs=bool(body.logprobs),
                parallel_tools=body.parallel_tool_calls is not False,
            )
            for index in range(params.n)
        ],
        prompt_tokens=len(prompt.ids),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _effort_field(body: ChatBody) -> str | float | None:
    if body.reasoning_effort is not None:
        return body.reasoning_effort
    value = (body.chat_template_kwargs or {}).get("reasoning_effort")
    if value is not None and not isinstance(value, str | int | float):
        raise ApiError(
            "chat_template_kwargs.reasoning_effort must be a number or a word.",
            code="invalid_value",
            param="chat_template_kwargs",
        )
    return value


def _tools(body: ChatBody) -> tuple[list[Tool], str]:
    """The tools and the choice: "none", "auto", "required", or "named:<function>"."""
    tools = body.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise ApiError("Two tools have the same name.", code="invalid_value", param="tools")
    choice = body.tool_choice
    if choice is None:
        return tools, "auto"
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise ApiError(
                f"tool_choice names {choice.function.name[:64]!r}, which is not among the tools "
                f"{names}.",
                code="invalid_value",
                param="tool_choice",
            )
        return tools, f"named:{choice.function.name}"
    if choice == "required" and not tools:
        raise ApiError(
            'tool_choice "required" needs tools.', code="invalid_value", param="tool_choice"
        )
    return tools, choice


def _turn_grammar(
    body: ChatBody, tools: list[Tool], choice: str, prompt: RenderedPrompt, *, reasoning: bool
) -> str | None:
    """The grammar the turn must follow, None when it is free."""
    answer = _answer_rule(body)
    parallel = body.parallel_tool_calls is not False
    numbered = list(enumerate(tools))
    if choice == "required" or choice.startswith("named:"):
        if answer is not None or prompt.open_block:
            raise ApiError(
                "A forced tool call excludes response_format, regex and continue_final_message.",
                code="invalid_value",
                param="tool_choice",
            )
        if choice != "required":
            named = choice.removeprefix("named:")
            numbered = [(i, tool) for i, tool in numbered if tool.function.name == named]
            parallel = False
        calls = grammar.tool_calls(numbered, parallel=parallel, enforce_parameters=True)
        return grammar.turn(calls=calls, reasoning=reasoning)
    if answer is None:
        return None
    calls = []
    if tools and choice == "auto":  # the model may still call; only the answer is constrained
        calls = grammar.tool_calls(numbered, parallel=parallel, enforce_parameters=False)
    return grammar.turn(
        answer=answer, calls=calls, reasoning=reasoning, open_block=prompt.open_block
    )


def _answer_rule(body: ChatBody) -> str | None:
    """The rule of a constrained answer, None when it is free text."""
    form = body.response_format
    if form is None or form.type == "text":
        return grammar.regex_answer(body.regex, "regex") if body.regex else None
    if body.regex:
        raise ApiError("Give either regex or response_format.", code="invalid_value", param="regex")
    if form.type == "json_object":
        return grammar.json_answer({"type": "object"}, "response_format")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(
            "response_format of type json_schema needs json_schema.schema.",
            code="invalid_value",
            param="response_format.json_schema",
        )
    return grammar.json_answer(form.json_schema.schema_, "response_format.json_schema.schema")


def _note(chat: _Chat, update: Update) -> None:
    chat.cached_tokens = max(chat.cached_tokens, update.cached_tokens)


def _stop(chat: _Chat, choice: ChatChoice, update: Update) -> None:
    """Tell the engine of a choice that ended on this side: others may go on for long."""
    if choice.finish_reason is not None and update.finish_reason is None:
        chat.handle.abort(choice.index, reason="stop")


async def _collect(chat: _Chat) -> dict[str, Any]:
    async for update in chat.handle:
        _note(chat, update)
        choice = chat.choices[update.index]
        if choice.finish_reason is not None:
            continue
        choice.push(update)
        _stop(chat, choice, update)
        if choice.error is not None:
            raise choice.error
        if chat.done:
            break
    choices = [
        {
            "index": choice.index,
            "message": choice.message(),
            "logprobs": choice.logprobs(),
            "finish_reason": choice.finish_reason,
        }
        for choice in chat.choices
    ]
    return {**chat.envelope("chat.completion", choices), "usage": chat.usage()}


async def _events(chat: _Chat) -> AsyncIterator[bytes]:
    def chunk(choice: ChatChoice, delta: dict[str, Any], **fields: Any) -> bytes:
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": fields.get("logprobs"),
            "finish_reason": fields.get("finish_reason"),
        }
        payload = chat.envelope("chat.completion.chunk", [entry])
        if chat.include_usage:
            payload["usage"] = None
        return event(payload)

    started: set[int] = set()
    async for update in chat.handle:
        _note(chat, update)
        choice = chat.choices[update.index]
        if choice.finish_reason is not None:
            continue
        if choice.index not in started:
            started.add(choice.index)
            yield chunk(choice, {"role": "assistant", "content": ""})
        pieces = choice.push(update)
        _stop(chat, choice, update)
        for piece in pieces:
            yield chunk(choice, piece["delta"], logprobs=piece.get("logprobs"))
        if choice.error is not None:
            yield event(choice.error.body())
            break
        if choice.finish_reason is not None:
            yield chunk(choice, {}, finish_reason=choice.finish_reason)
        if chat.done:
            break
    if chat.include_usage:
        yield event({**chat.envelope("chat.completion.chunk", []), "usage": chat.usage()})
    yield DONE
