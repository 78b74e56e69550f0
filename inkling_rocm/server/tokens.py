"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inkling_rocm.server.context import ServerContext, json_response
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import DetokenizeBody, TokenizeBody
from inkling_rocm.server.render import parse_effort


async def tokenize(context: ServerContext, request: Request) -> Response:
    """Ids of plain text, or of a rendered conversation."""
    body = await context.read(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("Give either prompt or messages.", code="invalid_value", param="prompt")
    ids = await context.in_thread(lambda: _ids(context, body))
    return json_response(
        {"tokens": ids, "count": len(ids), "max_model_len": context.engine.context_length}
    )


def _ids(context: ServerContext, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        return context.tokenizer.encode(body.prompt)
    if not body.messages:
        raise ApiError("messages is empty.", code="invalid_value", param="messages")
    effort = parse_effort(body.reasoning_effort)
    return context.renderer.render(body.messages, tools=body.tools or (), effort=effort).ids


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Text of ids; special tokens give their names."""
    body = await context.read(request, DetokenizeBody)
    worst = max(body.tokens, default=0)
    if worst >= context.vocab_size:
        raise ApiError(
            f"tokens has the id {worst}; ids go from 0 to {context.vocab_size - 1}.",
            code="invalid_value",
            param="tokens",
        )
    codec = context.tokenizer
    raw = b"".join(codec.token_bytes(token) for token in body.tokens)
    return json_response({"prompt": raw.decode("utf-8", "replace")})
