"""Random conversations with a real model in little memory: with drafts, rounds ahead and tiers the
answers are those of an engine without any of it."""

import random

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.prefix_cache.checks import check_books
from tests.engine.speculative.rounds import Rounds
from tests.engine.speculative.truth import TruthfulSampler
from tests.engine.tiny import VOCAB, tiny_engine, tiny_mtp_config

CONFIG = tiny_mtp_config()
LITTLE = {"max_total_tokens": 192, "prefix_snapshots": 7}
DRAFTS = {"speculative_num_steps": 3}
TIERS = {"enable_hierarchical_cache": True, "hicache_size": 0.01, "load_format": "dummy"}


def answers(seed, *, rounds=False, **args):
    """Five conversations at once, four turns each, with two beginnings among them.

    Returns: tokens of every answer, and how often a prefix was found.
    """
    rng, found = random.Random(seed), []
    with tiny_engine(CONFIG, **{"page_size": 16, **args}) as engine:
        if rounds:
            Rounds(engine)
        if "speculative_num_steps" in args:
            TruthfulSampler(engine, 0.6)
        systems = [[rng.randrange(VOCAB) for _ in range(length)] for length in (20, 40)]
        texts = [list(rng.choice(systems)) for _ in range(5)]
        for _ in range(4):
            handles = []
            for text in texts:
                text += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
                params = SamplingParams(
                    temperature=rng.choice((0.0, 1.0)),
                    seed=rng.randrange(99),
                    max_new_tokens=rng.choice((1, 7, 18)),
                    ignore_eos=True,
                    n=rng.choice((1, 1, 2)),
                )
                handles.append(engine.submit(text, params))
            for text, handle in zip(texts, handles, strict=True):
                tokens = {}
                for update in handle:
                    assert update.error is None, update.error
                    tokens.setdefault(update.index, []).extend(update.token_ids)
                found.append(tokens)
                text += tokens[0]
                del text[110:]
        check_books(engine._core.scheduler.cache, engine._core.scheduler.running)
        cache = engine.stats().prefix_cache
        return found, 0 if cache is None else cache.hits


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "args",
    [
        {"max_total_tokens": 176, "prefix_snapshots": 7, "page_size": 1},
        {**LITTLE, **TIERS},
        {**LITTLE, **DRAFTS, "rounds": True},
        {**LITTLE, **DRAFTS, **TIERS},
    ],
    ids=["pages of 1", "tiers", "rounds ahead", "drafts and tiers"],
)
def test_answers_are_those_without(args, seed):
    want, _ = answers(seed, disable_radix_cache=True)
    found, hits = answers(seed, **args)
    assert hits > 5
    assert found == want
