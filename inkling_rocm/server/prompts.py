"""The prompts of endpoints that continue several: their token ids, and all submitted or none."""

from __future__ import annotations

from typing import Any

from inkling_rocm.engine import RequestHandle
from inkling_rocm.engine.request import RequestError, SamplingParams
from inkling_rocm.server.context import ServerContext
from inkling_rocm.server.errors import ApiError

MAX_PROMPTS = 256
MAX_CHOICES = 512  # prompts times n


def check_choices(count: int) -> None:
    """Raises: ApiError: 400, more continuations than one request may have."""
    if count > MAX_CHOICES:
        raise ApiError(
            f"The prompts times n make {count} continuations; at most {MAX_CHOICES} are allowed.",
            code="invalid_value",
            param="n",
        )


def submit_all(
    context: ServerContext,
    handles: list[RequestHandle],
    jobs: list[tuple[str, list[int], SamplingParams]],
    **options: Any,
) -> None:
    """Submit every (rid, prompt ids, params) into `handles`; when one is refused, abort those that
    run already and raise."""
    for rid, ids, params in jobs:
        try:
            handles.append(context.submit(ids, params, rid, **options))
        except RequestError:
            for handle in handles:
                handle.abort()
            raise


def prompt_ids(
    prompt: str | list[str] | list[int] | list[list[int]], context: ServerContext, param: str
) -> list[list[int]]:
    """Each prompt's token ids. Raises: ApiError: 400, empty, too many, or an id out of range."""
    many: list[Any] = (
        [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt  # type: ignore[list-item]
    )
    if not many or len(many) > MAX_PROMPTS:
        raise ApiError(
            f"{param} holds {len(many)} prompts; wanted 1 to {MAX_PROMPTS}.",
            code="invalid_value",
            param=param,
        )
    codec, vocab_size = context.tokenizer, context.vocab_size
    out = []
    for entry in many:
        ids = codec.encode(entry) if isinstance(entry, str) else list(entry)
        if not ids:
            raise ApiError(f"{param} is empty.", code="invalid_value", param=param)
        if max(ids) >= vocab_size:
            raise ApiError(
                f"{param} has the token id {max(ids)}; ids go from 0 to {vocab_size - 1}.",
                code="invalid_value",
                param=param,
            )
        out.append(ids)
    return out
