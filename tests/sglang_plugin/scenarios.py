"""What the SGLang engine is asked, shared by the driver (which runs it there) and the tests (which
ask transformers). Imports neither."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

NEW_TOKENS = 8
VOCABULARY = (10, 490)


def make_prompt(length: int, seed: int) -> list[int]:
    """Token ids, the same in every process."""
    draw = random.Random(seed)
    return [draw.randrange(*VOCABULARY) for _ in range(length)]


def _generate(engine, prompts, new_tokens=NEW_TOKENS) -> list[dict]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=sampling)
    return found if isinstance(found, list) else [found]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One thing to ask.

    Attributes:
        prompts: what is asked, in the order of the results.
        run: engine -> SGLang's results. new_tokens: of every prompt.
        cached: tokens of each prompt that must come from the prefix cache with pages of 64; None =
            not looked at.
        follow_up: (new tokens, more ids): each prompt is first continued by that many tokens, and
            the result is asked again with these ids behind.
    """

    prompts: tuple[list[int], ...]
    run: Callable
    new_tokens: int = NEW_TOKENS
    cached: tuple[int, ...] | None = None
    follow_up: tuple[int, list[int]] | None = None


LONG = make_prompt(141, 1)  # three chunks of at most 64 tokens
TAIL = make_prompt(13, 2)
SHARED = LONG[:137] + TAIL


def _one_by_one(prompts, new_tokens):
    return lambda engine: [
        result for ids in prompts for result in _generate(engine, [ids], new_tokens)
    ]


def _together(prompts, new_tokens):
    return lambda engine: _generate(engine, list(prompts), new_tokens)


def _scenario(prompts, run, new_tokens=NEW_TOKENS, cached=None) -> Scenario:
    return Scenario(
        prompts=tuple(prompts), run=run(prompts, new_tokens), new_tokens=new_tokens, cached=cached
    )


CROWD = tuple(make_prompt(150 + 7 * i, 20 + i) for i in range(4))
LATER = make_prompt(187, 5)
FOLLOW_UP = (20, TAIL[:3])
AFTER_ABORT = make_prompt(33, 10)


def _resume(engine):
    """Continue a conversation whose state was kept while it was decoded."""
    first = _generate(engine, [LATER], FOLLOW_UP[0])[0]
    return _generate(engine, [LATER + first["output_ids"] + FOLLOW_UP[1]])


def _abort(engine):
    """End a request while it runs; the next one must not notice."""

    async def ask_and_abort():
        sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        answer = asyncio.ensure_future(
            engine.async_generate(input_ids=make_prompt(40, 9), sampling_params=sampling)
        )
        await asyncio.sleep(0.5)
        engine.tokenizer_manager.abort_request(abort_all=True)
        return await answer

    ended = engine.loop.run_until_complete(ask_and_abort())
    assert ended["meta_info"]["finish_reason"]["type"] == "abort", ended["meta_info"]
    return _generate(engine, [AFTER_ABORT])


SCENARIOS = {
    "cold": _scenario((make_prompt(3, 3), make_prompt(21, 4)), _one_by_one, cached=(0, 0)),
    "chunked": _scenario((LONG,), _one_by_one, cached=(0,)),
    "prefix hit": _scenario((SHARED,), _one_by_one, cached=(128,)),
    "two in a batch": _scenario((LONG, TAIL + LONG[:30]), _together, cached=(128, 0)),
    "retraction": _scenario(CROWD, _together, new_tokens=120),
    "resume": Scenario(prompts=(LATER,), run=_resume, follow_up=FOLLOW_UP, cached=(192,)),
    "abort": Scenario(prompts=(AFTER_ABORT,), run=_abort, cached=(0,)),
}
