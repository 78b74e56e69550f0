"""Many requests at once with aborts at random moments: nothing leaks, nothing hangs."""

import asyncio
import gc
import random

import psutil
import pytest

from inkling_rocm.engine import SamplingParams
from tests.engine.history_model import (
    ByteTokenizer,
    assert_empty,
    history_engine,
    reference_tokens,
)


def params_of(rng):
    return SamplingParams(
        max_new_tokens=rng.randint(0, 24),
        temperature=rng.choice((0.0, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        n=rng.choice((1, 1, 1, 3)),
        seed=rng.randrange(1000),
        ignore_eos=True,
    )


async def one_request(engine, rng):
    """Returns: whether it ran to its end; its tokens are checked then."""
    await asyncio.sleep(rng.random() * 0.5)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 70))]
    params = params_of(rng)
    handle = engine.submit(prompt, params, logprobs=rng.choice((None, 0, 2)))
    left = rng.randint(0, 30) if rng.random() < 0.5 else 10**6
    tokens = [[] for _ in range(params.n)]
    reasons = set()
    async for update in handle:
        tokens[update.index] += update.token_ids
        reasons.add(update.finish_reason)
        left -= 1
        if left == 0:
            handle.abort()
    if "abort" in reasons:
        return False
    assert reasons <= {None, "length"}
    for index in range(params.n):
        assert tokens[index] == reference_tokens(prompt, params, seed=params.seed + index)
    return True


async def rounds(engine, count, requests):
    sizes = []
    for number in range(count):
        rngs = [random.Random(1000 * number + i) for i in range(requests)]
        ended = await asyncio.gather(*(one_request(engine, rng) for rng in rngs))
        assert 0 < sum(ended) < requests
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    return sizes


@pytest.mark.parametrize(("page_size", "tokens"), [(16, 4096), (1, 120)])
async def test_200_requests_with_random_aborts(page_size, tokens):
    settings = {"max_total_tokens": tokens, "page_size": page_size, "chunked_prefill_size": 32}
    engine = history_engine(tokenizer=ByteTokenizer(), **settings)
    before = engine.stats()
    sizes = await rounds(engine, 1, 200)
    assert len(sizes) == 1
    assert await asyncio.to_thread(engine.drain, 10)
    engine.shutdown()
    after = engine.stats()
    assert (after.pages_used, after.conv_slots_used) == (before.pages_used, before.conv_slots_used)
    assert after.queued == after.running == 0
    assert (after.preemptions > 0) == (tokens == 120)
    assert_empty(engine._core)


@pytest.mark.full
async def test_memory_is_flat_over_rounds():
    engine = history_engine(tokenizer=ByteTokenizer(), max_total_tokens=600)
    sizes = await rounds(engine, 5, 200)
    engine.shutdown()
    assert_empty(engine._core)
    assert max(sizes[2:]) - sizes[1] < 16 << 20, f"resident bytes after each round: {sizes}"
