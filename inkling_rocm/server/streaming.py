"""Answers that end early when their reader goes away: server-sent events, and plain results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    """One server-sent event carrying JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class EventStream(Response):
    """Sends events as they come; a client that disconnects cancels the iterator.

    Args:
        events: already encoded events. on_close: called once when the stream ends for any reason.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._send(send))
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(
    request: Request, work: Coroutine[Any, Any, T], on_close: Callable[[], None]
) -> T | None:
    """Await `work`; None when the client disconnected first. `on_close` is called either way."""
    try:
        return await _until_disconnect(request.receive, work)
    finally:
        on_close()


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
