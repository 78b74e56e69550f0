"""POST /v1/completions."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inkling_rocm.engine import RequestHandle
from inkling_rocm.engine.handle import amerged
from inkling_rocm.engine.request import TokenLogprob, Update
from inkling_rocm.engine.tokenizer import Tokenizer
from inkling_rocm.server.assemble import floor_logprob
from inkling_rocm.server.context import ServerContext, engine_failure, json_response, usage
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.prompts import check_choices, prompt_ids, submit_all
from inkling_rocm.server.protocol import CompletionBody
from inkling_rocm.server.sampling import sampling_params
from inkling_rocm.server.streaming import DONE, EventStream, event, unless_disconnected

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class _Choice:
    """One continuation of one prompt.

    Args:
        echoed: prompt tokens that come before the generated ones.
    """

    def __init__(self, codec: Tokenizer, *, logprobs: bool, echoed: int) -> None:
        self._codec = codec
        self._want_logprobs = logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._echo_left = echoed
        self.started = False
        self.text = ""
        self.logprobs: dict[str, list[Any]] = _no_logprobs()
        self.completion_tokens = 0
        self.finish_reason: str | None = None

    def take(
        self, text: str, entries: tuple[TokenLogprob, ...]
    ) -> tuple[str, dict[str, list[Any]] | None]:
        """Append text and its tokens' log probabilities; returns just the new part."""
        self.text += text
        if not self._want_logprobs:
            return text, None
        new = _no_logprobs()
        for entry in entries:
            new["tokens"].append(self._text(entry.token_id))
            known = entry.logprob is not None
            new["token_logprobs"].append(floor_logprob(entry.logprob) if known else None)
            top = {self._text(token_id): floor_logprob(value) for token_id, value in entry.top}
            new["top_logprobs"].append(top if known else None)
            new["text_offset"].append(self._offset)
            self._offset += self._length(entry.token_id)
        for key, values in new.items():
            self.logprobs[key] += values
        return text, new

    def _length(self, token_id: int) -> int:
        """Characters of the choice's text that this token, the next one, completes: none for a
        special one unless it is echoed, and none for the first bytes of a character."""
        echoed = self._echo_left > 0
        if not echoed and self._codec.is_special(token_id):
            return 0
        text = self._decoder.decode(self._codec.token_bytes(token_id))
        if echoed:
            self._echo_left -= 1
            if not self._echo_left:
                text += self._decoder.decode(b"", final=True)
        return len(text)

    def _text(self, token_id: int) -> str:
        return self._codec.token_bytes(token_id).decode("utf-8", "replace")


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


@dataclass(kw_only=True)
class _Completion:
    """One running request: a handle for each prompt."""

    id: str
    model: str
    n: int
    choices: list[_Choice]
    prompts: list[list[int]]
    echo: list[str] | None
    include_usage: bool
    handles: list[RequestHandle] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    cached_tokens: list[int] = field(default_factory=list)

    def abort(self) -> None:
        for handle in self.handles:
            handle.abort()

    def usage(self) -> dict[str, Any]:
        return usage(
            sum(map(len, self.prompts)),
            sum(choice.completion_tokens for choice in self.choices),
            sum(self.cached_tokens),
        )

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def take(self, position: int, update: Update) -> tuple[int, str, dict[str, list[Any]] | None]:
        """Apply one update; returns the choice's number and what is new on it."""
        number = position * self.n + update.index
        choice = self.choices[number]
        if update.finish_reason in ("abort", "error"):
            raise engine_failure(update)
        cached = max(self.cached_tokens[position], update.cached_tokens)
        self.cached_tokens[position] = cached
        text, entries = update.text, update.logprobs
        choice.completion_tokens += len(update.token_ids)
        if self.echo is not None and not choice.started:
            text = self.echo[position] + text
            entries = update.prompt_logprobs + entries
        choice.started = True
        choice.finish_reason = update.finish_reason
        return number, *choice.take(text, entries)


async def create_completion(context: ServerContext, request: Request) -> Response:
    """Continue one or several prompts, at once or as a stream."""
    body = await context.read(request, CompletionBody)
    context.refuse_when_draining()
    completion = await context.in_thread(lambda: _start(context, body))
    if body.stream:
        return EventStream(_events(completion), completion.abort)
    result = await unless_disconnected(request, _collect(completion), completion.abort)
    return Response(status_code=499) if result is None else json_response(result)


def _start(context: ServerContext, body: CompletionBody) -> _Completion:
    """Tokenise and submit every prompt, or none. Raises: ApiError, RequestError."""
    _refuse(body)
    codec = context.tokenizer
    prompts = prompt_ids(body.prompt, context, "prompt")
    wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = [
        sampling_params(
            body,
            max_new_tokens=context.room(len(ids), wanted, "max_tokens"),
            vocab_size=context.vocab_size,
        )
        for ids in prompts
    ]
    n = params[0].n
    check_choices(len(prompts) * n)
    echo = [codec.decode(ids) for ids in prompts] if body.echo else None
    completion = _Completion(
        id=f"cmpl-{uuid.uuid4().hex}",
        model=context.model_name,
        n=n,
        choices=[
            _Choice(codec, logprobs=body.logprobs is not None, echoed=len(ids) * bool(body.echo))
            for ids in prompts
            for _ in range(n)
        ],
        prompts=prompts,
        echo=echo,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        cached_tokens=[0] * len(prompts),
    )
    rids = [f"{completion.id}-{position}" for position in range(len(prompts))]
    submit_all(
        context,
        completion.handles,
        list(zip(rids, prompts, params, strict=True)),
        stream=bool(body.stream),
        logprobs=body.logprobs,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )
    return completion


def _refuse(body: CompletionBody) -> None:
    n = body.n or 1
    if body.suffix:
        raise ApiError("suffix is not supported.", code="unsupported_parameter", param="suffix")
    if body.best_of is not None and body.best_of != n:
        raise ApiError(
            f"best_of {body.best_of} is not supported: leave it out or set it to n ({n}).",
            code="unsupported_parameter",
            param="best_of",
        )


async def _collect(completion: _Completion) -> dict[str, Any]:
    async for position, update in amerged(completion.handles):
        completion.take(position, update)
    choices = [
        {
            "index": number,
            "text": choice.text,
            "logprobs": choice.logprobs if choice.logprobs["tokens"] else None,
            "finish_reason": choice.finish_reason,
        }
        for number, choice in enumerate(completion.choices)
    ]
    return {**completion.envelope(choices), "usage": completion.usage()}


async def _events(completion: _Completion) -> AsyncIterator[bytes]:
    def chunk(choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        payload = completion.envelope(choices)
        if completion.include_usage:
            payload["usage"] = used
        return event(payload)

    try:
        async for position, update in amerged(completion.handles):
            number, text, logprobs = completion.take(position, update)
            reason = completion.choices[number].finish_reason
            if text or reason or (logprobs and logprobs["tokens"]):
                entry = {"index": number, "text": text, "logprobs": logprobs}
                yield chunk([{**entry, "finish_reason": reason}])
    except ApiError as error:
        yield event(error.body())
    else:
        if completion.include_usage:
            yield chunk([], completion.usage())
    yield DONE
