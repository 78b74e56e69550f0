"""What every endpoint shares: the engine, the settings, request bodies, usage, submission."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio.to_thread
import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response

from inkling_rocm.engine import Engine, EngineArgs, RequestHandle
from inkling_rocm.engine.request import ErrorCode, SamplingParams, Update
from inkling_rocm.engine.tokenizer import Tokenizer
from inkling_rocm.server.errors import ApiError
from inkling_rocm.server.protocol import Body
from inkling_rocm.server.render import ChatRenderer

# What pydantic calls the forms that a field may have; no field has such a name.
_ALTERNATIVES = {
    "str",
    "int",
    "float",
    "bool",
    "dict",
    *(c.__name__ for c in Body.__subclasses__()),
}

M = TypeVar("M", bound=Body)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How to serve.

    Attributes:
        served_model_name: name clients ask for; None = the engine's.
        api_key: None = no key needed. max_body_bytes: larger requests are refused.
        cors_origins: origins browsers may call from; none by default.
        allow_meaningless_outputs: serve an engine that is for measuring (EngineArgs.meaningless).

    Raises:
        ValueError: an empty key, which an unset shell variable gives: it must not mean "no key".
    """

    served_model_name: str | None = None
    api_key: str | None = None
    max_body_bytes: int = 16 * 1024 * 1024
    cors_origins: tuple[str, ...] = ()
    allow_meaningless_outputs: bool = False

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; give one, or leave the option out for no key")

    def check(self, args: EngineArgs) -> None:
        """Raises: ValueError: an engine with these arguments must not be served."""
        if args.meaningless and not self.allow_meaningless_outputs:
            raise ValueError(
                f"{args.meaningless}: outputs are meaningless, so they are not served; leave the "
                "argument out or, to measure, use ServerSettings(allow_meaningless_outputs=True)"
            )


@dataclass(kw_only=True)
class ServerContext:
    """Shared by the endpoints of one application."""

    engine: Engine
    renderer: ChatRenderer
    settings: ServerSettings
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.engine.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None, "the server needs an engine with a tokenizer"
        return self.engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """Real vocabulary rows; the padding rows are no tokens."""
        return self.engine.config.text.unpadded_vocab_size

    async def read(self, request: Request, model: type[M]) -> M:
        """The request's JSON body, validated.

        Raises:
            ApiError: 413 too large, 400 not JSON, wrong fields or such as are not supported, 404
                another model's name.
        """
        raw = await _read_bytes(request, self.settings.max_body_bytes)
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(data, dict):
            raise ApiError(
                f"The body must be a JSON object; got a {type(data).__name__}.", code="invalid_json"
            )
        for field_name, instead in model.UNSUPPORTED.items():
            if data.get(field_name):
                raise ApiError(
                    f"{field_name} is not supported; {instead}.",
                    code="unsupported_parameter",
                    param=field_name,
                )
        try:
            body = model.model_validate(data)
        except ValidationError as error:
            raise _field_error(error) from error
        name = getattr(body, "model", None)
        if name is not None and name != self.model_name:
            raise ApiError(
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return body

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run tokenising, rendering or grammar work without blocking the event loop."""
        return await anyio.to_thread.run_sync(work)

    def room(self, prompt_tokens: int, wanted: int | None, param: str) -> int:
        """Tokens the output may have.

        Args:
            wanted: the client's limit, None = all that fits.

        Raises:
            ApiError: 400 context_length_exceeded.
        """
        limit = self.engine.context_length
        room = limit - prompt_tokens
        if room < (1 if wanted is None else wanted) or room < 0:
            asked = f" and {wanted} for the completion" if wanted else ""
            raise ApiError(
                f"This model's maximum context length is {limit} tokens, but the request has "
                f"{prompt_tokens} prompt tokens{asked}. Shorten the prompt or lower {param}.",
                code="context_length_exceeded",
                param=param if wanted and prompt_tokens < limit else "prompt",
            )
        return room if wanted is None else wanted

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, rid: str, **options: Any
    ) -> RequestHandle:
        """Start a request. Raises: RequestError from the engine."""
        return self.engine.submit(prompt_ids, params, rid=rid, **options)

    def refuse_when_draining(self) -> None:
        """For a request that has just come: one that is being worked on is open.

        Raises: ApiError: 503, the server takes no new requests.
        """
        if self.draining:
            raise ApiError("The server is shutting down.", status=503, code="shutting_down")


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """OpenAI's usage object; all counts are of token ids."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def json_response(payload: Any) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(payload), media_type="application/json")


def failure(message: str, code: ErrorCode | None) -> ApiError:
    """What to tell the client when the engine could not finish its request."""
    if code == "no_token_possible":
        return ApiError(message, code=code)
    if code == "engine_failed":
        return ApiError(message, status=503, code=code)
    return ApiError(message, status=500, code="engine_error")


def engine_failure(update: Update) -> ApiError:
    """The same for a continuation that ended in "error" or "abort"."""
    if update.finish_reason == "abort":
        message = "The request was aborted by the server."
        return ApiError(message, status=503, code="aborted")
    return failure(update.error or "the engine gave no reason", update.error_code)


async def _read_bytes(request: Request, limit: int) -> bytes:
    too_large = ApiError(
        f"The body is larger than {limit} bytes.", status=413, code="body_too_large"
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:19]) > limit:
        raise too_large
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > limit:
            raise too_large
    return bytes(raw)


def _field_error(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    wrong = list(dict.fromkeys(one["loc"][:1] for one in found))
    of_first = [one for one in found if one["loc"][:1] == wrong[0]]
    furthest = max(map(_progress, of_first))
    meant = [one for one in of_first if _progress(one) == furthest]
    where = _place(meant[0])
    # Several forms may end at the same value, for which none of them is more likely the one meant.
    reasons = list(dict.fromkeys(one["msg"] for one in meant if _place(one) == where))
    reason = reasons[0]
    if len(reasons) > 1:
        start = "Input should be "
        others = [each.removeprefix(start) for each in reasons[1:]]
        reason = ", ".join([reason, *others[:-1]]) + f" or {others[-1]}"
    more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return ApiError(f"{where or 'body'}: {reason}{more}", code="invalid_value", param=where or None)


def _place(one: ErrorDetails) -> str:
    """Where a value stands, as one would write it in Python."""
    where = ""
    for part in one["loc"]:
        if isinstance(part, int):
            where += f"[{part}]"
        elif part.isidentifier() and part not in _ALTERNATIVES:
            where += f".{part}" if where else part
    return where


def _progress(one: ErrorDetails) -> tuple[bool, int, int]:
    """Orders the errors of a field that may have several forms: the form that was meant is the one
    in which validation came furthest."""
    last = one["loc"][-1] if one["loc"] else 0
    fits = not one["type"].endswith("_type")
    return fits, len(one["loc"]), last if isinstance(last, int) else 0
