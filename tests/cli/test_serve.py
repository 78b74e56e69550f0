"""`inkling-rocm serve` as a process: ready line, signals, mistakes."""

import asyncio
import contextlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from inkling_rocm.cli.main import app
from inkling_rocm.engine import build_core
from inkling_rocm.engine.core import EngineCore
from inkling_rocm.server import serve as serve_module

COMMAND = [sys.executable, "-m", "inkling_rocm", "serve"]
CHAT = "/v1/chat/completions"
LONG = 300  # seconds: of waits that take a moment unless the machine is busy with other things


def body(tokens):
    return {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }


@contextlib.contextmanager
def server(*arguments):
    """The process and its URL, once it says it is ready."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        ready = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", ready)
        assert url, f"no ready line, but {ready!r}"
        assert ready.startswith("Ready: ")
        yield process, url.group()
    finally:
        process.kill()
        process.wait()


def test_sigterm_lets_open_requests_finish():
    drain = ("--drain-seconds", str(LONG))
    with server("--served-model-name", "tiny", "--api-key", "k", *drain) as (process, url):
        headers = {"Authorization": "Bearer k"}
        with httpx.Client(base_url=url, headers=headers, timeout=LONG) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
            with http.stream("POST", CHAT, json=body(100)) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                refused = refusal(url, headers)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert sum('"content"' in line for line in rest) > 20
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["retry-after"]
            assert process.wait(LONG) == 0
            with pytest.raises(httpx.ConnectError):
                http.get("/health")


def refusal(url, headers):
    """What a new connection hears of a server that drains, once it does."""
    began = time.monotonic()
    while time.monotonic() < began + LONG:
        with httpx.Client(base_url=url, headers=headers, timeout=LONG) as other:
            if other.get("/health").status_code == 503:
                return other.post(CHAT, json=body(1))
        time.sleep(0.02)
    raise AssertionError("the server does not drain")


def test_draining_has_a_limit():
    with server("--drain-seconds", "1") as (process, url), httpx.Client(base_url=url) as http:
        with http.stream("POST", CHAT, json=body(8000), timeout=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"code":"aborted"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(LONG) == 0


def draining_server(**context):
    server = serve_module.DrainingServer(
        uvicorn.Config("none"), SimpleNamespace(draining=False, **context), drain_seconds=30,
        ready=print,
    )  # fmt: skip
    server.handle_exit(signal.SIGTERM, None)
    return server


def test_refusals_do_not_keep_a_server_that_drains():
    """Clients may try again without a pause, so that there is a request to refuse at every tick."""

    async def drain():
        server = draining_server(engine=SimpleNamespace(failure=None))
        tasks, end = server.server_state.tasks, asyncio.Event()
        tasks.add(open_request := asyncio.create_task(end.wait()))
        assert not await server.on_tick(1)
        tasks.add(refused := asyncio.create_task(asyncio.sleep(LONG)))
        assert not await server.on_tick(2)
        end.set()
        await open_request
        tasks.remove(open_request)
        assert await server.on_tick(3)
        refused.cancel()

    asyncio.run(drain())


@pytest.mark.parametrize(("passed", "left"), [(0, 30), (12, 18), (31, 0)])
def test_clients_that_do_not_read_do_not_double_the_limit(monkeypatch, passed, left):
    """Draining and waiting for answers that are on their way have one limit together."""
    clock, limits = [100.0], []

    async def waits_for_connections(server, sockets=None):
        limits.append(server.config.timeout_graceful_shutdown)

    monkeypatch.setattr(uvicorn.Server, "shutdown", waits_for_connections)
    monkeypatch.setattr(serve_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    server = draining_server()
    clock[0] += passed
    asyncio.run(server.shutdown())
    assert limits == [left + serve_module._GRACE_SECONDS]


def test_second_signal_stops_at_once():
    with (
        server("--drain-seconds", str(LONG)) as (process, url),
        httpx.Client(base_url=url, timeout=LONG) as http,
        http.stream("POST", CHAT, json=body(8000)) as response,
    ):
        lines = response.iter_lines()  # kept: the stream ends with it
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None  # it waits for the open request
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 128 + signal.SIGTERM


def test_a_server_ends_when_its_engine_is_gone(monkeypatch):
    """What is open is told why, and the exit code tells a supervisor to start another."""

    class Mortal(EngineCore):
        def step(self):
            if self.stats().generated_tokens > 5:
                raise KeyboardInterrupt  # ends the engine, not only a step
            super().step()

    monkeypatch.setattr(build_core, "EngineCore", Mortal)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    ended, ports = [], queue.Queue()
    monkeypatch.setattr(serve_module, "ready_text", lambda host, port, _: ports.put(port) or "")
    thread = threading.Thread(target=lambda: ended.append(run("--port", "0")))
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{ports.get(timeout=LONG)}") as http:
        answer = http.post(CHAT, json=body(100), timeout=LONG)
    assert '"code":"engine_failed"' in answer.text
    thread.join(LONG)
    (result,) = ended
    assert result.exit_code == 1
    assert "error: the engine stopped: KeyboardInterrupt" in result.stderr


def run(*arguments):
    """In this process: commands that end before anything is served."""
    return CliRunner().invoke(app, ["serve", *arguments])


def test_taken_port_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port), "--model-path", "/nowhere")
    assert result.exit_code == 1
    assert f"error: cannot listen on 127.0.0.1:{port}" in result.stderr


def test_mistakes_are_named():
    result = run("--port", "0", "--model-path", "/nowhere/at/all")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "/nowhere/at/all" in result.stderr
    result = run("--page-size", "7")
    assert result.exit_code == 2
    assert "page_size 7" in result.stderr
