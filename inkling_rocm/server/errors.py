"""Errors in OpenAI's form, {"error": {message, type, param, code}}, with the status of each."""

from __future__ import annotations

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from inkling_rocm.engine.request import RequestError

# What the engine refuses, by RequestError.code; every other code is a plain bad request.
_STATUS_OF_CODE = {"queue_full": 429, "shutting_down": 503, "engine_failed": 503}
# Of a 503: the next request is to come over another connection, which behind a load balancer may
# lead to a server that takes it.
ELSEWHERE = {"Retry-After": "1", "Connection": "close"}
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request answered with an error.

    Attributes:
        status: HTTP status. code: stable machine-readable word. param: the offending field.
        headers: extra response headers; of a 503 they are ELSEWHERE.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or (ELSEWHERE if status == 503 else {})

    @classmethod
    def from_request_error(cls, error: RequestError) -> ApiError:
        """What the engine refused, with the status its code stands for."""
        status = _STATUS_OF_CODE.get(error.code, 400)
        headers = {"Retry-After": "1"} if status == 429 else None
        return cls(str(error), status=status, code=error.code, param=error.param, headers=headers)

    def body(self) -> dict[str, object]:
        """The JSON object sent to the client."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole HTTP answer."""
        return Response(
            orjson.dumps(self.body()),
            status_code=self.status,
            media_type="application/json",
            headers=self.headers,
        )


async def on_api_error(_request: Request, error: Exception) -> Response:
    """Handler for ApiError and RequestError."""
    if isinstance(error, RequestError):
        error = ApiError.from_request_error(error)
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Routing errors (no such path, wrong method) in the same form."""
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = f"Unknown path {request.url.path}; see /docs for the list.", "not_found"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}."
        code = "method_not_allowed"
    return ApiError(
        message,
        status=error.status_code,
        code=code,
        headers=dict(error.headers) if error.headers else None,
    ).response()


async def on_client_disconnect(_request: Request, _error: Exception) -> Response:
    """The client went away while it was sending: nobody reads this answer, but logs see 499."""
    assert isinstance(_error, ClientDisconnect)
    return Response(status_code=499)
