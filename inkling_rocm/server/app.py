"""The HTTP application: routes, error handlers, the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inkling_rocm.engine import Engine
from inkling_rocm.engine.request import RequestError
from inkling_rocm.engine.tokenizer import InklingTokenizer
from inkling_rocm.server import errors, metrics, protocol
from inkling_rocm.server.access import RequireKey
from inkling_rocm.server.chat import create_chat
from inkling_rocm.server.completions import create_completion
from inkling_rocm.server.context import ServerContext, ServerSettings, json_response
from inkling_rocm.server.generate import generate
from inkling_rocm.server.render import ChatRenderer
from inkling_rocm.server.tokens import detokenize, tokenize

Endpoint = Callable[[ServerContext, Request], Awaitable[Response]]

# path, endpoint, body
_POST_ROUTES: tuple[tuple[str, Endpoint, type[protocol.Body]], ...] = (
    ("/v1/chat/completions", create_chat, protocol.ChatBody),
    ("/v1/completions", create_completion, protocol.CompletionBody),
    ("/generate", generate, protocol.GenerateBody),
    ("/tokenize", tokenize, protocol.TokenizeBody),
    ("/detokenize", detokenize, protocol.DetokenizeBody),
)


def create_app(
    engine: Engine,
    settings: ServerSettings,
    *,
    observed: metrics.PrometheusMetrics | None = None,
) -> FastAPI:
    """The application around a running engine.

    Args:
        observed: the metrics object the engine reports to; its state gauges are added here.

    Raises:
        ValueError: the engine has no tokenizer, or its outputs are meaningless.
    """
    settings.check(engine.args)
    if not isinstance(engine.tokenizer, InklingTokenizer):
        raise ValueError(
            f"the server needs Inkling's tokenizer; the engine has {engine.tokenizer!r} (was it "
            "started with skip_tokenizer_init?)"
        )
    observed = observed or metrics.PrometheusMetrics()
    metrics.watch(observed, engine)
    renderer = ChatRenderer(engine.tokenizer.native)
    context = ServerContext(engine=engine, renderer=renderer, settings=settings)
    app = FastAPI(
        title="inkling-rocm",
        version=version("inkling-rocm"),
        redoc_url=None,
        # A redirect names the scheme and host this process sees, which behind a proxy are others.
        redirect_slashes=False,
    )
    app.state.context = context
    app.add_exception_handler(errors.ApiError, errors.on_api_error)
    app.add_exception_handler(RequestError, errors.on_api_error)
    app.add_exception_handler(HTTPException, errors.on_http_exception)
    app.add_exception_handler(ClientDisconnect, errors.on_client_disconnect)
    if settings.api_key is not None:
        app.add_middleware(RequireKey, api_key=settings.api_key)
    if settings.cors_origins:
        # Added last, so outermost: a browser's preflight carries no key, and a page can read a 401
        # only with these headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    for path, endpoint, body in _POST_ROUTES:
        app.add_api_route(
            path,
            _bind(context, endpoint),
            methods=["POST"],
            name=endpoint.__name__,
            description=endpoint.__doc__,
            openapi_extra=_body_schema(body),
            responses=_ERRORS,
        )
    _add_get_routes(app, context, observed)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _bind(context: ServerContext, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        return await endpoint(context, request)

    return handler


def _add_get_routes(
    app: FastAPI, context: ServerContext, observed: metrics.PrometheusMetrics
) -> None:
    async def health() -> Response:
        """200 while requests are taken; 503 while the server drains or when the engine is gone."""
        status = context.engine.failure or ("draining" if context.draining else "ok")
        response = json_response({"status": status})
        if status != "ok":
            response.status_code = 503
            response.headers.update(errors.ELSEWHERE)
        return response

    async def models() -> Response:
        """The one model served."""
        return json_response({"object": "list", "data": [_model(context)]})

    async def model(name: str) -> Response:
        """One model."""
        if name != context.model_name:
            raise errors.ApiError(
                f"The model {name[:200]!r} does not exist; this server has {context.model_name!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return json_response(_model(context))

    async def prometheus() -> Response:
        """Prometheus exposition."""
        return Response(metrics.exposition(observed), media_type=metrics.CONTENT_TYPE)

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/v1/models", models, methods=["GET"])
    # Names may hold slashes (they default to the checkpoint's path).
    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], responses=_ERRORS)
    app.add_api_route("/metrics", prometheus, methods=["GET"])


def _model(context: ServerContext) -> dict[str, Any]:
    return protocol.Model(
        id=context.model_name,
        created=context.started,
        max_model_len=context.engine.context_length,
    ).model_dump()


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request cannot be served.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
    }
}


def _body_schema(body: type[protocol.Body]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document plus the body models, which the endpoints parse themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [body for _, _, body in _POST_ROUTES] + [protocol.ErrorBody]
        _, definitions = models_json_schema(
            [(body, "validation") for body in bodies],
            ref_template="#/components/schemas/{model}",
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        components.update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
