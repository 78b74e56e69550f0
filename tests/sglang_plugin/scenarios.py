"""What the SGLang engine is asked, shared by the driver (which runs it there) and the tests (which
ask transformers). Imports neither."""

from __future__ import annotations

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
    """

    prompts: tuple[list[int], ...]
    run: Callable
    new_tokens: int = NEW_TOKENS


LONG = make_prompt(141, 1)  # three chunks of at most 64 tokens
TAIL = make_prompt(13, 2)
SHARED = LONG[:137] + TAIL


def _one_by_one(prompts, new_tokens=NEW_TOKENS):
    return lambda engine: [
        result for ids in prompts for result in _generate(engine, [ids], new_tokens)
    ]


def _together(prompts, new_tokens=NEW_TOKENS):
    return lambda engine: _generate(engine, list(prompts), new_tokens)


def _scenario(prompts, run, new_tokens=NEW_TOKENS) -> Scenario:
    return Scenario(prompts=tuple(prompts), run=run(prompts, new_tokens), new_tokens=new_tokens)


CROWD = tuple(make_prompt(150 + 7 * i, 20 + i) for i in range(4))
LATER = make_prompt(187, 5)

SCENARIOS = {
    "cold": _scenario((make_prompt(3, 3), make_prompt(21, 4)), _one_by_one),
    "chunked": _scenario((LONG,), _one_by_one),
    "prefix hit": _scenario((SHARED,), _one_by_one),
    "two in a batch": _scenario((LONG, TAIL + LONG[:30]), _together),
    "retraction": _scenario(CROWD, _together, new_tokens=120),
    "decode snapshot": _scenario((LATER,), _one_by_one, new_tokens=20),
}


def _resume(engine):
    """Continue a conversation whose state was kept while it was decoded."""
    first = _generate(engine, [LATER], 20)[0]
    return _generate(engine, [LATER + first["output_ids"] + TAIL[:3]])


def _abort(engine):
    """End a request while it runs; the next one must not notice."""
    import threading

    abort = threading.Timer(0.3, lambda: engine.abort_request(abort_all=True))
    abort.start()
    _generate(engine, [make_prompt(40, 9)], 400)
    abort.join()
    return _generate(engine, [make_prompt(33, 10)])


SCENARIOS["abort"] = Scenario(prompts=(make_prompt(33, 10),), run=_abort)
