"""Random requests, aborts, memory and draft steps: rounds and other steps in any order, with
prompts that share prefixes, give what decoding without speculation gives."""

import random

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.prefix_cache.checks import check_books
from tests.engine.history_model import add_request, run_to_end
from tests.engine.speculative.rounds import Rounds
from tests.engine.speculative.test_mtp import CONFIG, prompt_of
from tests.engine.speculative.test_rounds import poison
from tests.engine.speculative.truth import TruthfulSampler
from tests.engine.tiny import VOCAB, core_of, tiny_engine

EDITS = ({"repetition_penalty": 1.2}, {"logit_bias": {5: 1.0}}, {"min_new_tokens": 4})


def requests_of(rng):
    """(prompt, params, number of alternatives or None)."""
    found = []
    for _ in range(14):
        prompt = prompt_of(rng.choice([1, 5, 16, 17, 32, 40]), rng.randrange(3))
        prompt += [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 3]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(99),
            max_new_tokens=rng.randint(1, 40),
            n=rng.choice([1, 1, 1, 2, 3]),
            ignore_eos=True,
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 6]))),
            **(rng.choice(EDITS) if rng.random() < 0.2 else {}),
        )
        found.append((prompt, params, rng.choice([None, None, 1])))
    return found


def answers(core, requests, rng, *, aborts):
    """Tokens and finish reason of every continuation; requests join between steps."""
    taken = []
    for order, (prompt, params, logprobs) in enumerate(requests, 1):
        taken.append(add_request(core, order, prompt, params, logprobs=logprobs))
        for _ in range(rng.choice([0, 1, 3, 8])):
            if not core.idle:
                core.step()
        if aborts and rng.random() < 0.15:
            core.abort(f"r{order}")
    run_to_end(core)
    check_books(core.scheduler.cache, core.scheduler.running)
    return [
        [(request.handle.tokens(i), request.handle.reasons()[i]) for i in range(request.params.n)]
        for request in taken
    ]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_random_requests(seed):
    requests, rng = requests_of(random.Random(seed)), random.Random(seed + 1)
    with tiny_engine(CONFIG) as engine:
        wanted = answers(core_of(engine), requests, random.Random(seed), aborts=False)
    steps = rng.choice([1, 2, 3, 8])
    with tiny_engine(
        CONFIG,
        speculative_num_steps=steps,
        page_size=rng.choice([1, 16]),
        chunked_prefill_size=rng.choice([5, 16, None]),
        max_running_requests=rng.choice([2, 4, 8]),
        max_total_tokens=rng.choice([160, None]),
        disable_radix_cache=rng.random() < 0.3,
    ) as engine:
        poison(engine)
        rounds = Rounds(engine, drafts=tuple(range(1, steps + 1)))
        TruthfulSampler(engine, rng.choice([0.3, 0.7, 1.0]))
        engine._core.speculation.choose = lambda batch: (
            rng.randint(0, steps) if rng.random() < 0.1 else steps
        )
        found = answers(core_of(engine), requests, rng, aborts=True)
    assert rounds.run
    for got, want in zip(found, wanted, strict=True):
        for (tokens, reason), (all_tokens, expected) in zip(got, want, strict=True):
            if reason == "abort":
                assert all_tokens[: len(tokens)] == tokens
            else:
                assert (tokens, reason) == (all_tokens, expected)
