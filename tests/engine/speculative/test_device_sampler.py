"""Sampling and verification kernels on the emulator in an engine: tokens of the torch sampler."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.engine import SamplingParams, build
from inkling_rocm.engine.device_sampler import DeviceSampler, _spans
from inkling_rocm.engine.token_sampler import DeviceTokenSampler
from tests.engine.speculative.test_mtp import CONFIG, prompt_of, tokens_of
from tests.engine.speculative.truth import TruthfulSampler
from tests.engine.tiny import VOCAB, tiny_engine

REQUESTS = [
    (prompt_of(5), SamplingParams(max_new_tokens=6, seed=4, temperature=3.0, ignore_eos=True)),
    (prompt_of(9, 1), SamplingParams(max_new_tokens=6, seed=8, top_k=20, n=2, temperature=2.0)),
    (prompt_of(7, 2), SamplingParams(max_new_tokens=7, seed=9, frequency_penalty=0.5, min_p=0.01)),
    (prompt_of(8, 3), SamplingParams(max_new_tokens=5, temperature=0.0, repetition_penalty=1.5)),
]


def device_sampler(parts, plan):
    cpu = torch.device("cpu")
    return DeviceTokenSampler(
        DeviceSampler(vocabulary=VOCAB, slots=plan.slots, device=cpu, arch="gfx942")
    )


def outputs(*, rejection: bool):
    """Tokens of all requests and the number of accepted drafts."""
    with tiny_engine(
        CONFIG, speculative_num_steps=2, speculative_use_rejection_sampling=rejection
    ) as engine:
        if not rejection:
            TruthfulSampler(engine, 0.7)
        handles = [engine.submit(prompt, params) for prompt, params in REQUESTS]
        found = [tokens_of(handle) for handle in handles]
        return found, sum(engine.stats().speculation.accepted)


@pytest.mark.full
@pytest.mark.parametrize("rejection", [False, True])
def test_tokens_of_the_torch_sampler(monkeypatch, rejection):
    want, accepted = outputs(rejection=rejection)
    assert accepted > 0
    monkeypatch.setattr(build, "make_sampler", device_sampler)
    with emulate("gfx942"):
        assert outputs(rejection=rejection) == (want, accepted)


def test_arrays_of_one_copy_are_aligned():
    """A kernel is compiled again for every pattern of aligned and unaligned arguments."""
    spans = _spans([8, 0, 20, 16])
    assert [(s.start, s.stop) for s in spans] == [(0, 8), (16, 16), (16, 36), (48, 64)]
