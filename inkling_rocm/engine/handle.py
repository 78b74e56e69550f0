"""The caller's end of a request: an iterator of updates, from a thread or from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Literal

from inkling_rocm.engine.request import Update


class RequestHandle:
    """Yields the updates of all continuations of one request until every one of them has ended.

    The handle is its own iterator: an interrupted wait loses nothing, and leaving a loop early does
    not end the request; call `abort` for that. One consumer at a time.

    Args:
        continuations: n of the request.
        abort: called to stop it: with rid, a continuation or None for all, and the reason.
        on_end: called with rid when the engine has reported its end.
    """

    def __init__(
        self,
        rid: str,
        continuations: int,
        abort: Callable[[str, int | None, Literal["abort", "stop"]], None],
        on_end: Callable[[str], None],
    ):
        self.rid = rid
        self._abort = abort
        self._on_end = on_end
        self._unfinished = continuations
        self._updates: deque[Update] = deque()
        self._changed = threading.Condition()
        self._done = threading.Event()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None
        self._watch: Callable[[], None] | None = None

    def abort(self, index: int | None = None, reason: Literal["abort", "stop"] = "abort") -> None:
        """Ask the engine to stop, all or one of the continuations; see Engine.abort. The last
        updates arrive as for any other end."""
        self._abort(self.rid, index, reason)

    def push(self, updates: Sequence[Update]) -> None:
        """Hand over updates (called by the engine)."""
        with self._changed:
            self._updates.extend(updates)
            self._unfinished -= sum(update.finish_reason is not None for update in updates)
            waiter, self._waiter = self._waiter, None
            self._changed.notify_all()
            if self._watch is not None:
                self._watch()
        if self.ended:
            self._done.set()
            self._on_end(self.rid)
        if waiter is not None:
            loop, future = waiter
            # A closed loop raises: its consumer is gone and nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    @property
    def ended(self) -> bool:
        """Whether the engine has reported the end of every continuation; updates may still wait to
        be read."""
        return self._unfinished <= 0

    def collect(self) -> list[Update]:
        """Wait for the end without being woken by every update. Returns: those not read before."""
        self._done.wait()
        return self.waiting()

    def waiting(self) -> list[Update]:
        """Returns: the updates that are there and not read, without a wait."""
        with self._changed:
            found = list(self._updates)
            self._updates.clear()
        return found

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called now and at all updates from now on, in the engine's thread."""
        with self._changed:
            self._watch = wake
            wake()

    def __iter__(self) -> RequestHandle:
        return self

    def __next__(self) -> Update:
        with self._changed:
            while True:
                if self._updates:
                    return self._updates.popleft()
                if self.ended:
                    raise StopIteration
                self._changed.wait()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Update:
        while True:
            with self._changed:
                if self._updates:
                    return self._updates.popleft()
                if self.ended:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future


def _wake(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)


def merged(handles: Sequence[RequestHandle]) -> Iterator[tuple[int, Update]]:
    """Updates of several requests in the order they come, each with its request's position."""
    arrived: SimpleQueue[int] = SimpleQueue()
    for position, handle in enumerate(handles):
        handle.watch(partial(arrived.put, position))
    left = set(range(len(handles)))
    while left:
        position = arrived.get()
        ended = handles[position].ended  # first: what comes after it is announced again
        for update in handles[position].waiting():
            yield position, update
        if ended:
            left.discard(position)


async def amerged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, Update], None]:
    """`merged` for asyncio."""
    if len(handles) == 1:
        async for update in handles[0]:
            yield 0, update
        return
    queue: asyncio.Queue[tuple[int, Update | None]] = asyncio.Queue()

    async def pump(position: int, handle: RequestHandle) -> None:
        try:
            async for update in handle:
                queue.put_nowait((position, update))
        finally:
            queue.put_nowait((position, None))

    tasks = [asyncio.create_task(pump(i, handle)) for i, handle in enumerate(handles)]
    try:
        for _ in range(len(handles)):
            while (item := await queue.get())[1] is not None:
                yield item[0], item[1]
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
