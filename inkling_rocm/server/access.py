"""Who may call: the bearer-token check in front of every endpoint."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from inkling_rocm.server.errors import ApiError

# What a load balancer or a scraper asks without knowing the key; neither tells about requests.
_OPEN_PATHS = frozenset({"/health", "/metrics"})


class RequireKey:
    """ASGI middleware: 401 without `Authorization: Bearer <key>`. Compares in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            if not hmac.compare_digest(given, self._wanted):
                error = ApiError(
                    "Missing or wrong API key: send Authorization: Bearer <key>.",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
