"""Runs the application: socket, engine, uvicorn, ready line, graceful end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from inkling_rocm.engine import Engine, EngineArgs
from inkling_rocm.server.app import create_app
from inkling_rocm.server.context import ServerContext, ServerSettings
from inkling_rocm.server.metrics import PrometheusMetrics

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5  # for answers on their way to clients once the engine has ended them
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class EngineGone(Exception):
    """The engine has stopped by itself, and the server with it."""


class DrainingServer(uvicorn.Server):
    """uvicorn that drains on the first signal and ends the process on the second, whichever they
    are; after draining the caller goes on (uvicorn's own server would re-raise the signal). While
    it drains it listens on, so that new requests and health checks are told (503) what connections
    refused would leave to guess. It also ends when the engine is gone: whoever supervises the
    process can start another.

    Args:
        drain_seconds: after this long it listens no more and the engine is shut down, which ends
            what is still open with an error of the API.
        ready: called with the bound port once requests are accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        context: ServerContext,
        *,
        drain_seconds: int,
        ready: Callable[[int], None],
    ) -> None:
        super().__init__(config)
        self._context = context
        self._drain_seconds = drain_seconds
        self._drain_end = math.inf  # on time.monotonic's clock
        self._open: set[asyncio.Task[None]] | None = None  # when it began to drain
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._ready(sockets[0].getsockname()[1])

    async def on_tick(self, counter: int) -> bool:
        if self._context.engine.failure is not None and not self.should_exit:
            logger.error("%s; the server ends", self._context.engine.failure)
            self._context.draining = self.should_exit = True
        elif self._context.draining:
            # Tasks are requests that are being answered. Those that came later are refusals.
            if self._open is None:
                self._open = set(self.server_state.tasks)
            over = time.monotonic() >= self._drain_end
            self.should_exit |= over or all(task.done() for task in self._open)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left = max(min(self._drain_end - time.monotonic(), self._drain_seconds), 0)
        self.config.timeout_graceful_shutdown = math.ceil(left) + _GRACE_SECONDS
        timer = asyncio.create_task(self._end_what_is_open(left))
        await super().shutdown(sockets)
        timer.cancel()

    async def _end_what_is_open(self, left: float) -> None:
        await asyncio.sleep(left)
        logger.warning("requests are open after %d s: aborting them", self._drain_seconds)
        await asyncio.to_thread(self._context.engine.shutdown)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        name = signal.Signals(sig).name
        if self._context.draining:
            os.write(2, f"{name} again: stopping at once\n".encode())
            os._exit(128 + sig)
        self._context.draining = True
        self._drain_end = time.monotonic() + self._drain_seconds
        limit = self._drain_seconds
        os.write(2, f"{name}: finishing open requests for at most {limit} s\n".encode())


def bind(host: str, port: int) -> socket.socket:
    """A socket bound before the model is loaded, so that a taken port is known at once.

    Raises:
        ValueError: the address cannot be bound.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return sock


def serve(
    args: EngineArgs,
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    drain_seconds: int = 30,
    access_log: bool = False,
) -> None:
    """Serve until a signal, then drain for at most drain_seconds.

    Raises:
        ValueError: the address, the checkpoint or an argument is wrong. EngineGone: the engine
            stopped while it served.
    """
    settings.check(args)
    sock = bind(host, port)
    metrics = PrometheusMetrics()
    with Engine(args, metrics=metrics) as engine:
        app = create_app(engine, settings, observed=metrics)
        context: ServerContext = app.state.context
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=access_log,
            server_header=False,
        )

        def ready(bound_port: int) -> None:
            print(ready_text(host, bound_port, context), flush=True)

        server = DrainingServer(config, context, drain_seconds=drain_seconds, ready=ready)
        server.run(sockets=[sock])
        if engine.failure is not None:
            raise EngineGone(engine.failure)


def ready_text(host: str, port: int, context: ServerContext) -> str:
    """What is printed when requests are accepted: the URL and something to paste."""
    name = _WILDCARDS.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{name}:{port}"
    body = {
        "model": context.model_name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 64,
        "stream": True,
    }
    key = context.settings.api_key
    authorization = "" if key is None else ' -H "Authorization: Bearer $KEY"'
    client_key = "not needed" if key is None else "<your key>"
    return (
        f"Ready: {context.model_name} at {url}/v1 "
        f"(context {context.engine.context_length} tokens, docs at {url}/docs)\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{authorization} "
        f"\\\n    -d '{json.dumps(body)}'\n\n"
        f'  OpenAI(base_url="{url}/v1", api_key="{client_key}").chat.completions.create(\n'
        f'      model="{context.model_name}", '
        'messages=[{"role": "user", "content": "Hello"}])\n'
    )
