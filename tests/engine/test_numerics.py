"""The real model through the engine: chunks, pages, batches and preemption change nothing.

Logits are compared with one forward of the whole prompt over a plain host, relative to the largest
logit; tokens with a continuation that recomputes everything for each token.
"""

from functools import lru_cache

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from tests.engine.tiny import WINDOW, greedy_tokens, tiny_config, tiny_engine, whole_logits

TOLERANCE = 1e-5


def prompt_of(length, salt=0):
    return [(37 * i + 11 * salt + (i * i) % 7) % 150 for i in range(length)]


@lru_cache(maxsize=64)
def expected(length, salt, count):
    return greedy_tokens(prompt_of(length, salt), count)


def assert_close(found, wanted):
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error < TOLERANCE, f"relative error {error}"


@pytest.mark.parametrize(
    "chunk", [1, 2, 3, 4, 5, 6, 7, 8, WINDOW + 1, WINDOW + 2, 15, 16, 17, 31, -1]
)
def test_every_chunk_size_gives_the_same_logits_and_tokens(chunk):
    prompt = prompt_of(40)
    with tiny_engine(chunked_prefill_size=chunk) as engine:
        assert_close(engine.prompt_logits(prompt), whole_logits(prompt))
        result = engine.generate(
            input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 12}
        )
    assert result["output_ids"] == expected(40, 0, 12)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_every_page_size_gives_the_same_logits(page_size):
    prompt = prompt_of(150)
    with tiny_engine(page_size=page_size, chunked_prefill_size=33) as engine:
        assert_close(engine.prompt_logits(prompt), whole_logits(prompt))


@pytest.mark.parametrize("length", [1, 2, 3, 4, WINDOW - 1, WINDOW, WINDOW + 1, 16, 17])
def test_short_prompts(length):
    with tiny_engine(chunked_prefill_size=5) as engine:
        assert_close(engine.prompt_logits(prompt_of(length)), whole_logits(prompt_of(length)))
        result = engine.generate(
            input_ids=prompt_of(length), sampling_params={"temperature": 0, "max_new_tokens": 9}
        )
    assert result["output_ids"] == expected(length, 0, 9)


@pytest.mark.parametrize(
    ("flags", "taps"),
    [((True, True), 4), ((False, False), 4), ((False, True), 1), ((True, False), 6)],
)
def test_models_with_one_kind_of_layer_and_other_conv_lengths(flags, taps):
    config = tiny_config(layer_is_local=flags, conv_taps=taps)
    prompt = prompt_of(45)
    for chunk in (1, 4, 13):
        with tiny_engine(config, chunked_prefill_size=chunk) as engine:
            assert_close(engine.prompt_logits(prompt), whole_logits(prompt, config))
            result = engine.generate(
                input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 8}
            )
        assert result["output_ids"] == greedy_tokens(prompt, 8, config)


@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_in_any_order(order):
    lengths = [3, 29, 7, 16, 41, 1, 22, 8, 33, 12][::order]
    prompts = [prompt_of(length, salt=length) for length in lengths]
    with tiny_engine(chunked_prefill_size=13) as engine:
        results = engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": 10},
            return_logprob=True,
        )
    for length, result in zip(lengths, results, strict=True):
        assert result["output_ids"] == expected(length, length, 10)
        tokens = prompt_of(length, salt=length) + result["output_ids"]
        wanted = whole_logits(tokens).log_softmax(-1)[length - 1 : -1]
        found = [x[0] for x in result["meta_info"]["output_token_logprobs"]]
        wanted = wanted.gather(1, torch.tensor(result["output_ids"])[:, None])[:, 0]
        assert_close(torch.tensor(found), wanted)


def test_preempted_and_resumed():
    lengths = [20, 25, 30, 18]
    with tiny_engine(chunked_prefill_size=16, page_size=1, max_total_tokens=80) as engine:
        results = engine.generate(
            input_ids=[prompt_of(length, salt=length) for length in lengths],
            sampling_params={"temperature": 0, "max_new_tokens": 30},
        )
        logits = engine.prompt_logits(prompt_of(40))
        assert engine.stats().preemptions > 0
    for length, result in zip(lengths, results, strict=True):
        assert result["output_ids"] == expected(length, length, 30)
    assert_close(logits, whole_logits(prompt_of(40)))


def test_prompt_logits_beside_other_requests():
    with tiny_engine(chunked_prefill_size=6) as engine:
        params = SamplingParams(max_new_tokens=200, seed=1, ignore_eos=True)
        handles = [engine.submit(prompt_of(9, salt=i), params) for i in range(5)]
        found = engine.prompt_logits(prompt_of(50))
        for handle in handles:
            handle.abort()
    assert_close(found, whole_logits(prompt_of(50)))


def test_a_seed_alone_and_in_a_batch_of_32():
    def params(i):
        return {"max_new_tokens": 12, "sampling_seed": 100 + i, "temperature": 1.0 + i / 40}

    prompts = [prompt_of(4 + i, salt=i) for i in range(32)]
    with tiny_engine(max_running_requests=32) as engine:
        together = engine.generate(
            input_ids=prompts, sampling_params=[params(i) for i in range(32)]
        )
        for i in range(0, 32, 3):
            alone = engine.generate(input_ids=prompts[i], sampling_params=params(i))
            assert alone["output_ids"] == together[i]["output_ids"]
    assert len({tuple(r["output_ids"]) for r in together}) == 32


def test_continuations_of_a_real_model():
    with tiny_engine() as engine:
        together = engine.generate(
            input_ids=prompt_of(21),
            sampling_params={"max_new_tokens": 15, "sampling_seed": 7, "n": 3},
        )
        for i, result in enumerate(together):
            alone = engine.generate(
                input_ids=prompt_of(21),
                sampling_params={"max_new_tokens": 15, "sampling_seed": 7 + i},
            )
            assert alone["output_ids"] == result["output_ids"]


def test_the_comparison_can_fail():
    prompt = prompt_of(40)
    other = [*prompt[:20], (prompt[20] + 1) % 150, *prompt[21:]]
    with tiny_engine() as engine, pytest.raises(AssertionError, match="relative error"):
        assert_close(engine.prompt_logits(other)[-1], whole_logits(prompt)[-1])
