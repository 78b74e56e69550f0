"""Who a benchmark sends its requests to: a server over HTTP, or an engine in this process."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import urlsplit

from inkling_rocm.bench.workload import Outcome, Task
from inkling_rocm.engine import Engine, SamplingParams

SILENCE_SECONDS = 600  # after so long without a message a server counts as gone


class Client(Protocol):
    """Runs one request to its end. Called from one thread a request."""

    def run(self, task: Task) -> Outcome: ...


class EngineClient:
    """The engine itself: no HTTP, no tokenizer. Tokens have the time at which the engine made their
    update: hundreds of threads that read each one would take the interpreter from its thread."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def run(self, task: Task) -> Outcome:
        params = SamplingParams(max_new_tokens=task.output_len, temperature=0.0, ignore_eos=True)
        outcome = Outcome(prompt_len=len(task.prompt_ids), sent=time.perf_counter())
        for update in self._engine.submit(task.prompt_ids, params).collect():
            outcome.token_times += [update.created] * len(update.token_ids)
            outcome.error = update.error
        return outcome


class HttpClient:
    """A server.

    Args:   backend: "sglang" (/generate, also of this project's server) or "vllm", "openai"
            (/v1/completions).
            api_key: sent as a bearer token.
    """

    def __init__(self, base_url: str, backend: str, model: str, api_key: str | None):
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base url {base_url!r}: wanted http://HOST:PORT")
        self._url, self._backend, self._model = url, backend, model
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def run(self, task: Task) -> Outcome:
        outcome = Outcome(prompt_len=len(task.prompt_ids), sent=time.perf_counter())
        try:
            self._run(task, outcome)
        except ConnectionRefusedError:
            where = f"{self._url.scheme}://{self._url.netloc}"
            outcome.error = (
                f"nothing listens at {where}; start the server, or name it with --base-url or "
                "--host and --port"
            )
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        return outcome

    def _run(self, task: Task, outcome: Outcome) -> None:
        native = self._backend == "sglang"
        body = _native_body(task) if native else _completions_body(task, self._model)
        seen = 0
        for message in self._stream("/generate" if native else "/v1/completions", body):
            if "error" in message:
                outcome.error = json.dumps(message["error"])
                return
            now = time.perf_counter()
            if native:
                total = message["meta_info"]["completion_tokens"]
                outcome.token_times += [now] * (total - seen)
                seen = total
            elif message.get("choices") and message["choices"][0].get("text"):
                outcome.token_times.append(now)

    def _stream(self, path: str, body: dict) -> Iterator[dict]:
        """The data messages of a server-sent event stream."""
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        assert self._url.hostname is not None
        connection = kind(self._url.hostname, self._url.port, timeout=SILENCE_SECONDS)
        try:
            data = json.dumps(body)
            connection.request("POST", self._url.path.rstrip("/") + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(2000).decode(errors="replace")
                raise ValueError(f"HTTP {response.status}: {text}")
            for line in response:
                text = line.decode().strip()
                if text.startswith("data:") and text != "data: [DONE]":
                    yield json.loads(text.removeprefix("data:"))
        finally:
            connection.close()


def _native_body(task: Task) -> dict:
    params = {"max_new_tokens": task.output_len, "temperature": 0.0, "ignore_eos": True}
    return {"input_ids": task.prompt_ids, "sampling_params": params, "stream": True}


def _completions_body(task: Task, model: str) -> dict:
    return {
        "model": model,
        "prompt": task.prompt_ids,
        "max_tokens": task.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
