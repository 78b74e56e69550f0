"""A sequence that starts from a boundary finds what it would have computed: the real model's logits
after a hit are those of a cold run."""

from contextlib import contextmanager

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.prefix_cache.checks import check_books
from tests.engine.test_numerics import assert_close
from tests.engine.tiny import VOCAB, WINDOW, tiny_config, tiny_engine, whole_logits

PAGE, CHUNK = 16, 32
NEW = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


def prompt_of(length, salt=0):
    return [(37 * i + 11 * salt + (i * i) % 7) % VOCAB for i in range(length)]


@contextmanager
def recorded(engine):
    """The logits that tokens are sampled from while this is open, in order."""
    sampler, logits = engine._core.executor.sampler, []
    sample = sampler.sample

    def recording(logits_nV, step):
        logits.append(logits_nV.clone())
        return sample(logits_nV, step)

    sampler.sample = recording
    yield logits
    sampler.sample = sample


def ask(engine, prompt, params=NEW, **options):
    """Returns: the tokens, logits they were sampled from [n, V], and the cached tokens."""
    with recorded(engine) as logits:
        updates = list(engine.submit(prompt, params, **options))
    assert updates[-1].error is None, updates[-1].error
    check_books(engine._core.scheduler.cache, engine._core.scheduler.running)
    tokens = [token for update in updates for token in update.token_ids]
    return tokens, torch.cat(logits)[:, :VOCAB], updates[-1].cached_tokens


def cold(prompt, **args):
    with tiny_engine(disable_radix_cache=True, **args) as engine:
        tokens, logits, cached = ask(engine, prompt)
        assert cached == 0
        return tokens, logits


def branch(tokens, length):
    """The first `length` tokens, then others."""
    return tokens[:length] + [(token + 1) % VOCAB for token in (tokens + [3] * 9)[length:][:9]]


@pytest.fixture(scope="module")
def warm():
    """An engine that has answered one prompt of 75 tokens with 24; and both together."""
    with tiny_engine(page_size=PAGE, chunked_prefill_size=CHUNK) as engine:
        prompt = prompt_of(75)
        params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
        tokens, _, cached = ask(engine, prompt, params)
        assert cached == 0
        yield engine, prompt + tokens


# Chunks of 32 end at 32 and 64, which is also the last page border of the prompt; the last
# computed token is the 98th, so the answer ends at 96 (and 80 was given up for it).
RETAINED = (32, 64, 96)


@pytest.mark.parametrize("length", [31, 32, 33, 47, 48, 63, 64, 65, 79, 81, 95, 96, 97, 99])
def test_every_retained_boundary_is_hit_and_other_offsets_use_the_next_lower(warm, length):
    engine, said = warm
    prompt = branch(said, length)
    tokens, logits, cached = ask(engine, prompt)
    # Whoever left the text earlier than where a later one does makes a boundary where they part.
    assert cached >= max((p for p in RETAINED if p <= length), default=0)
    assert cached <= length // PAGE * PAGE
    want_tokens, want = cold(prompt)
    assert tokens == want_tokens
    assert_close(logits, want)
    assert_close(logits[0], whole_logits(prompt)[-1])


def test_nothing_else_is_retained():
    with tiny_engine(page_size=PAGE, chunked_prefill_size=CHUNK) as engine:
        params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
        ask(engine, prompt_of(75), params)
        tree = engine._core.scheduler.cache.tree
        assert sorted(node.depth * PAGE for node in tree.boundaries) == list(RETAINED)


@pytest.mark.parametrize("position", [16, 32, 48])
@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_logits_are_bitwise_equal_where_the_chunks_are(position, length):
    prompt = prompt_of(position + length)
    want_tokens, want = cold(prompt, page_size=PAGE, chunked_prefill_size=position)
    with tiny_engine(page_size=PAGE, chunked_prefill_size=position) as engine:
        ask(engine, branch(prompt, position))
        tokens, logits, cached = ask(engine, prompt)
    assert cached == position
    assert tokens == want_tokens
    assert torch.equal(logits, want)


def test_the_whole_prompt_is_never_cached():
    prompt = prompt_of(64)
    with tiny_engine(page_size=PAGE, chunked_prefill_size=CHUNK) as engine:
        found = [ask(engine, prompt) for _ in range(3)]
    assert [cached for _, _, cached in found] == [0, 32, 48]
    for tokens, logits, _ in found[1:]:
        assert tokens == found[0][0]
        assert_close(logits, found[0][1])


def damage_snapshot(cache, node):
    for storage in cache.rings.storage:
        storage[:, node.snapshot] = 0


def damage_window(cache, node):
    cache.pools[1].storage[:, :, node.pages[1]] = 0


def damage_global(cache, node):
    cache.pools[0].storage[:, :, node.pages[0]] = 0


@pytest.mark.parametrize("damage", [damage_snapshot, damage_window, damage_global])
def test_the_comparison_notices_lost_state(damage):
    prompt = prompt_of(41)
    with tiny_engine(page_size=PAGE, chunked_prefill_size=CHUNK) as engine:
        ask(engine, branch(prompt, 36))
        cache = engine._core.scheduler.cache
        node = next(node for node in cache.tree.boundaries if node.depth * PAGE == 32)
        damage(cache, node)
        _, logits, cached = ask(engine, prompt)
    assert cached == 32
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(logits[0], whole_logits(prompt)[-1])


def test_where_prompts_part_the_third_finds_a_boundary():
    """A system prompt of 50 tokens, asked with different questions."""
    with tiny_engine(page_size=PAGE, chunked_prefill_size=128) as engine:
        found = [ask(engine, prompt_of(50) + prompt_of(20, salt)) for salt in range(1, 5)]
    assert [cached for _, _, cached in found] == [0, 0, 48, 48]
    for salt, (tokens, logits, _) in enumerate(found, 1):
        want_tokens, want = cold(prompt_of(50) + prompt_of(20, salt))
        assert tokens == want_tokens
        assert_close(logits, want)


def test_continuations_share_a_hit():
    params = SamplingParams(max_new_tokens=12, seed=3, n=3, ignore_eos=True)
    prompt = prompt_of(70)
    with tiny_engine(page_size=PAGE, disable_radix_cache=True) as engine:
        want = engine.submit(prompt, params)
        want = sorted((u.index, u.token_ids) for u in want)
    with tiny_engine(page_size=PAGE) as engine:
        ask(engine, branch(prompt, 68))
        updates = list(engine.submit(prompt, params))
        assert {u.cached_tokens for u in updates if u.finish_reason} == {64}
        assert sorted((u.index, u.token_ids) for u in updates) == want


def test_prompt_scores_are_computed_whole():
    prompt = prompt_of(70)
    with tiny_engine(page_size=PAGE) as engine:
        ask(engine, prompt)
        assert_close(engine.prompt_logits(prompt), whole_logits(prompt))
        updates = list(engine.submit(prompt, NEW, logprobs=0, prompt_logprobs=True))
        assert len(updates[0].prompt_logprobs) == 70
        assert updates[-1].cached_tokens == 0
        assert ask(engine, prompt)[2] == 64


@pytest.mark.parametrize(
    ("flags", "taps"), [((True, True), 4), ((False, False), 4), ((False, True), 1)]
)
def test_models_with_one_kind_of_layer_and_without_convolutions(flags, taps):
    config = tiny_config(layer_is_local=flags, conv_taps=taps)
    prompt = prompt_of(60)
    with tiny_engine(config, page_size=PAGE, chunked_prefill_size=CHUNK) as engine:
        ask(engine, branch(prompt, 50))
        _, logits, cached = ask(engine, prompt)
    assert cached == 48
    assert_close(logits[0], whole_logits(prompt, config)[-1])


def test_a_window_longer_than_the_boundary():
    assert WINDOW < PAGE
    prompt = prompt_of(9)
    with tiny_engine(page_size=1, chunked_prefill_size=4) as engine:
        ask(engine, branch(prompt, 5))
        _, logits, cached = ask(engine, prompt)
    assert cached == 4
    assert_close(logits[0], whole_logits(prompt)[-1])


def test_it_can_be_turned_off():
    with tiny_engine(page_size=PAGE, disable_radix_cache=True) as engine:
        first, second = ask(engine, prompt_of(70)), ask(engine, prompt_of(70))
        assert (first[2], second[2]) == (0, 0)
        assert torch.equal(first[1], second[1])
        assert not engine._core.scheduler.rings.snapshot_slots
