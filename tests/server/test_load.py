"""Many clients at once, some of which leave: nothing fails, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time

import httpx
import psutil
import pytest

from inkling_rocm.engine import Engine, EngineArgs
from tests.server.live import serving

HI = [{"role": "user", "content": "Tell me a story about a lake."}]


def gauges(demo):
    """What a scrape says is in use."""
    with demo.http() as http:
        lines = http.get("/metrics").text.splitlines()
    names = ("inkling_queue", "inkling_running", "inkling_pages_used", "inkling_conv_slots_used")
    values = (line.rsplit(" ", 1) for line in lines if line.startswith(names))
    return {name: float(value) for name, value in values}


def settled_gauges(demo, wanted):
    """The gauges once they equal `wanted`, or what they are after ten seconds."""
    deadline = time.monotonic() + 10
    while (now := gauges(demo)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


async def one(client: httpx.AsyncClient, draw: random.Random) -> str:
    """One request of a random kind; returns how it ended."""
    kind = draw.choice(["whole", "stream", "leave_early", "leave_late", "leave_whole", "n"])
    body = {
        "messages": [*HI, {"role": "user", "content": "more " * draw.randrange(60)}],
        "max_tokens": draw.randrange(4, 24),
        "stream": kind in ("stream", "leave_early", "leave_late"),
        "n": 3 if kind == "n" else 1,
        "seed": draw.randrange(1000),
    }
    if kind == "leave_whole":
        with contextlib.suppress(httpx.TimeoutException):
            timeout = draw.uniform(0.01, 0.5)
            await client.post("/v1/chat/completions", json=body, timeout=timeout)
        return "left"
    if not body["stream"]:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == body["n"]
        return "done"
    leave_after = {"leave_early": 0, "leave_late": draw.randrange(1, 12)}.get(kind)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        if leave_after == 0:
            return "left"
        lines: list[str] = []
        async for line in response.aiter_lines():
            assert '"error"' not in line
            lines += [line] if line else []
            if leave_after is not None and len(lines) > leave_after:
                return "left"
    assert lines[-1] == "data: [DONE]"
    return "done"


async def crowd(url: str, count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
        return await asyncio.gather(*(one(client, draw) for _ in range(count)))


async def test_a_crowd_leaves_nothing_behind(demo):
    before = gauges(demo)
    ends = await crowd(demo.url, 40, seed=1)
    assert {"done", "left"} == set(ends)
    assert settled_gauges(demo, before) == before
    assert before["inkling_running_requests"] == 0


def test_gauges_move(demo):
    """The check above can fail: while a request runs the gauges are not at their start."""
    before = gauges(demo)
    body = {"messages": HI, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with demo.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        during = gauges(demo)
    assert during["inkling_running_requests"] == 1
    assert during['inkling_pages_used{pool="global"}'] > before['inkling_pages_used{pool="global"}']
    assert settled_gauges(demo, before) == before


def test_full_queue_is_429(demo_parts):
    args = EngineArgs(
        model_path="demo", context_length=512, max_running_requests=1, max_queued_requests=0
    )
    body = {"messages": HI, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with Engine(args, parts=demo_parts) as engine, serving(engine) as live, live.http() as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"]
        assert engine.drain(10)  # the one that left is gone


@pytest.mark.full
async def test_200_at_once_three_times_with_flat_memory(demo):
    before = gauges(demo)
    process = psutil.Process()
    resident = []
    await crowd(demo.url, 200, seed=0)  # allocators reach their working size
    for seed in (1, 2, 3):
        ends = await crowd(demo.url, 200, seed=seed)
        assert {"done", "left"} == set(ends)
        assert settled_gauges(demo, before) == before
        gc.collect()
        resident.append(process.memory_info().rss)
    # One batch's logits are 25 MiB, of which an allocator may keep a few; a leak of half a MiB a
    # request would be 200 MiB.
    assert resident[-1] - resident[0] < 100 * 2**20, [r >> 20 for r in resident]
