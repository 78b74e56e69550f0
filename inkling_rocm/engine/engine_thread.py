"""The thread that owns an EngineCore. What other threads ask of it is done between steps."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from inkling_rocm.engine.collection import short_collections
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.engine.request import RequestError
from inkling_rocm.engine.sequence import Request


class EngineThread(threading.Thread):
    """Steps the core while there is something to do.

    Loading is done here too: OpenMP keeps a team of threads for every thread that ran a parallel
    region, and a second team makes each region of a small model several times slower (the teams
    outnumber the cores, so they sleep instead of spin).

    Args:
        build: called first: makes the core and tells the device it runs on.
        end: called last, also where `build` raised.
        max_queued: open requests beyond those in a batch. seed: of the requests that bring none.
        save: whether the prefix cache is given to its tiers at shutdown.

    Attributes:
        core: there once `start` has returned.
        failure: why the thread is gone; None while it runs.
        open: rids that were submitted and have not ended. changed: guards it and all that is asked.
    """

    core: EngineCore

    def __init__(
        self,
        build: Callable[[], tuple[EngineCore, torch.device]],
        end: Callable[[], None],
        *,
        max_queued: int,
        seed: int | None,
        save: bool,
    ):
        super().__init__(name="inkling-engine", daemon=True)
        self._build, self._end = build, end
        self._max_queued, self._save = max_queued, save
        self._seeds = random.Random(seed)
        self._built: Future[None] = Future()
        self._arrivals = 0
        self._inbox: deque[Request | Callable[[], None]] = deque()
        self._closing = self._draining = False
        self.failure: str | None = None
        self.open: set[str] = set()
        self.changed = threading.Condition()

    def start(self) -> None:
        """Returns once the core is there. Raises: what `build` raises."""
        super().start()
        self._built.result()

    def run(self) -> None:
        """Build, step until shutdown or a failure, end."""
        try:
            self.core, device = self._build()
        except BaseException as error:
            try:
                self._end()
            finally:
                self._built.set_exception(error)
            return
        self._built.set_result(None)
        try:
            with short_collections(device):
                self._loop()
        finally:
            try:
                self.core.scheduler.cache.close()
            finally:
                self._end()

    def enqueue(self, request: Request) -> None:
        """Take a request in; its `order` and `seed` are set.

        Raises: RequestError: "engine_failed", "shutting_down", "queue_full", or its rid is in use.
        """
        with self.changed:
            if self.failure is not None:
                raise RequestError(self.failure, code="engine_failed")
            if self._draining:
                raise RequestError("the engine is shutting down", code="shutting_down")
            if len(self.open) >= self.core.scheduler.max_running + self._max_queued:
                raise RequestError(
                    f"{len(self.open)} requests are open, the most there may be "
                    "(max_running_requests + max_queued_requests); try again later",
                    code="queue_full",
                )
            if request.rid in self.open:
                raise RequestError(f"rid {request.rid!r} is in use", param="rid")
            self.open.add(request.rid)
            self._arrivals += 1
            request.order = self._arrivals
            given = request.params.seed
            request.seed = self._seeds.getrandbits(62) if given is None else given
            # In one critical section with the checks: a request that passed them is in the inbox
            # before shutdown can close it, so its handle always ends.
            self._inbox.append(request)
            self.changed.notify_all()

    def ended(self, rid: str) -> None:
        """A request has ended (called by its handle)."""
        with self.changed:
            self.open.discard(rid)
            self.changed.notify_all()

    def command(self, command: Callable[[], None]) -> None:
        """Have something done between two steps; what it raises ends the engine."""
        with self.changed:
            self._inbox.append(command)
            self.changed.notify_all()

    def drain(self, timeout: float | None) -> bool:
        """See Engine.drain."""
        with self.changed:
            self._draining = True
            return self.changed.wait_for(lambda: not self.open, timeout)

    def shutdown(self) -> None:
        """Abort what is open and wait for the end."""
        with self.changed:
            self._closing = self._draining = True
            self.changed.notify_all()
        self.join()

    def _loop(self) -> None:
        core = self.core
        arrived: list[Request | Callable[[], None]] = []
        try:
            while True:
                with self.changed:
                    if core.idle and not self._inbox:
                        core.metrics.step(core.stats(), tokens=0, seconds=0.0)
                    while core.idle and not self._inbox and not self._closing:
                        self.changed.wait()
                    arrived = list(self._inbox)
                    self._inbox.clear()
                    closing = self._closing
                while arrived:
                    if isinstance(item := arrived.pop(0), Request):
                        core.add(item)
                    else:
                        item()
                if closing:
                    core.abort_all()
                    if self._save:
                        core.scheduler.cache.save()
                    return
                if not core.idle:
                    core.step()
        except BaseException as error:
            # Nothing may hang on an engine that is gone; the fault itself goes on its way. Commands
            # that wait are not done: the books they work on may be what is broken.
            with self.changed:
                self.failure = f"the engine stopped: {type(error).__name__}: {error}"
                arrived += self._inbox
            core.fail_all(self.failure, [item for item in arrived if isinstance(item, Request)])
            raise
