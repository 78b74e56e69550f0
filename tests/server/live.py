"""A uvicorn server on a free loopback port, in a thread of the test process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import uvicorn

from inkling_rocm.server.app import create_app
from inkling_rocm.server.context import ServerContext, ServerSettings
from inkling_rocm.server.serve import bind


@dataclass
class Live:
    """A running server: url, the engine and the context behind it, clients for it."""

    url: str
    engine: object
    context: ServerContext
    key: str | None = None

    def openai(self, **options) -> openai.OpenAI:
        options = {"api_key": self.key or "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_openai(self) -> openai.AsyncOpenAI:
        key = self.key or "none"
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120
        )

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def serving(engine, settings: ServerSettings | None = None, observed=None) -> Iterator[Live]:
    """Serve until the block ends."""
    settings = settings or ServerSettings()
    sock = bind("127.0.0.1", 0)
    app = create_app(engine, settings, observed=observed)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        yield Live(url, engine, app.state.context, settings.api_key)
    finally:
        server.should_exit = True
        thread.join(10)
