"""Rows to draw, shared by the emulated and the GPU tests of the device sampler."""

from __future__ import annotations

import numpy as np
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.sampler import SampleRow

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=1.7, min_p=0.02),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7, top_p=0.9),
    SamplingParams(top_k=50),
    SamplingParams(top_k=200, top_p=0.99, temperature=2.0),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=0.999, temperature=3.0),
    SamplingParams(top_p=1 - 2**-53),
    SamplingParams(top_k=10**6),
    SamplingParams(top_k=20, min_p=0.2),
    SamplingParams(min_p=1e-6, temperature=2.0),
    SamplingParams(frequency_penalty=1.0, presence_penalty=0.4, repetition_penalty=1.3),
    SamplingParams(logit_bias={3: 5.0, 99: -100.0, 70: 0.5}, top_p=0.7),
    SamplingParams(temperature=0.0, min_new_tokens=3, logit_bias={5: 2.0}, presence_penalty=0.3),
)


class EveryThird:
    """A grammar that permits every third token."""

    def __init__(self, vocabulary: int):
        self._allowed = np.arange(vocabulary) % 3 == 1

    def allowed(self):
        return self._allowed


def make_row(params, *, seed, position, vocabulary, generated=(), stop_ids=(5,), mask=None):
    prompt = [1, 2, 2, min(60, vocabulary - 1)]
    if vocabulary < 100 and params.logit_bias:
        params = SamplingParams(logit_bias={0: 1.0})
    stops = [i for i in stop_ids if i < vocabulary - 1]
    edits = LogitEdits(params, [t for t in prompt if t < vocabulary], stops, mask)
    for token in generated:
        edits.add(token % vocabulary)
    return SampleRow(params, seed, position, edits)


def make_rows(count: int, vocabulary: int, *, params=PARAMS, masks=True) -> list[SampleRow]:
    """Every kind of row in turn; some have generated tokens, some a grammar."""
    return [
        make_row(
            params[i % len(params)],
            seed=3 * i - 4,
            position=7 * i,
            vocabulary=vocabulary,
            generated=(7, 9, 9, 2)[: i % 5],
            mask=EveryThird(vocabulary) if masks and i % 6 == 5 else None,
        )
        for i in range(count)
    ]


def device_tokens(logits, rows, device, arch, *, slots=None, logprobs=False):
    """(tokens with None for rows without one, log probabilities, the sampler)."""
    slots = list(range(1, len(rows) + 1)) if slots is None else slots
    sampler = DeviceSampler(
        vocabulary=logits.shape[1], slots=max(slots, default=0) + 1, device=device, arch=arch
    )
    sampler.counts.fill_(12345)  # what an earlier sequence left
    for slot, row in zip(slots, rows, strict=True):
        sampler.admit(slot, row.edits)
    tokens, scores = sampler.sample(logits, rows, slots, logprobs=logprobs)
    return [None if t < 0 else t for t in tokens.tolist()], scores, sampler


def draw_logits(count: int, vocabulary: int, *, spread=3.0, dtype=torch.float32, seed=0):
    """fp32 logits, rounded to dtype (bf16: many exact ties)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * spread
    return logits.to(dtype).float()
