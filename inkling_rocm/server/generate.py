"""POST /generate, in SGLang's own form: the engine's `generate` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inkling_rocm.engine.request import GenerationError, SamplingParams
from inkling_rocm.engine.sglang_form import Generation
from inkling_rocm.server.context import ServerContext, failure, json_response
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.prompts import check_choices, prompt_ids
from inkling_rocm.server.protocol import GenerateBody, NativeSampling
from inkling_rocm.server.sampling import sampling_params
from inkling_rocm.server.streaming import DONE, EventStream, event, unless_disconnected

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's


async def generate(context: ServerContext, request: Request) -> Response:
    """Continue prompts; streamed texts are cumulative, as SGLang's are."""
    body = await context.read(request, GenerateBody)
    context.refuse_when_draining()
    generation = await context.in_thread(lambda: _start(context, body))
    if body.stream:
        return EventStream(_events(generation), generation.abort)
    result = await unless_disconnected(request, _collect(generation), generation.abort)
    return Response(status_code=499) if result is None else json_response(result)


def _start(context: ServerContext, body: GenerateBody) -> Generation:
    """Tokenise and submit. Raises: ApiError, RequestError."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError("Give either text or input_ids.", code="invalid_value", param="text")
    if body.text is not None:
        prompts = prompt_ids(body.text, context, "text")
        single = isinstance(body.text, str)
    else:
        prompts = prompt_ids(body.input_ids or [], context, "input_ids")
        single = body.input_ids == prompts[0]
    start = body.logprob_start_len
    params = _params(context, body, prompts)
    check_choices(sum(one.n for one in params))
    return Generation(
        context.engine,
        None,
        params,
        prompts[0] if single else prompts,
        return_logprob=bool(body.return_logprob),
        logprob_start_len=-1 if start is None else start,
        top_logprobs_num=body.top_logprobs_num or 0,
        stream=bool(body.stream),
        rid=body.rid,
        return_text_in_logprobs=bool(body.return_text_in_logprobs),
    )


def _params(
    context: ServerContext, body: GenerateBody, prompts: list[list[int]]
) -> list[SamplingParams]:
    """One SamplingParams a prompt."""
    given = body.sampling_params or NativeSampling()
    many = given if isinstance(given, list) else [given] * len(prompts)
    if len(many) != len(prompts):
        raise ApiError(
            f"sampling_params has {len(many)} entries for {len(prompts)} prompts.",
            code="invalid_value",
            param="sampling_params",
        )
    out = []
    for ids, one in zip(prompts, many, strict=True):
        for name in ("ebnf", "structural_tag"):
            if getattr(one, name) is not None:
                raise ApiError(
                    f"{name} is not supported; use json_schema or regex.",
                    code="unsupported_parameter",
                    param=f"sampling_params.{name}",
                )
        wanted = DEFAULT_MAX_NEW_TOKENS if one.max_new_tokens is None else one.max_new_tokens
        room = context.room(len(ids), wanted, "sampling_params.max_new_tokens")
        out.append(sampling_params(one, max_new_tokens=room, vocab_size=context.vocab_size))
    return out


async def _collect(generation: Generation) -> Any:
    try:
        return await generation.aresult()
    except GenerationError as error:
        raise failure(str(error), error.code) from error


async def _events(generation: Generation) -> AsyncIterator[bytes]:
    try:
        async for result in generation.aiterate():
            yield event(result)
    except GenerationError as error:
        yield event(failure(str(error), error.code).body())
    yield DONE
