"""The device sampler on the emulator: the tokens of the torch sampler, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.sampler import sample
from inkling_rocm.kernels.sampling import sample_rows
from tests.kernels.sampling_cases import (
    PARAMS,
    device_tokens,
    draw_logits,
    make_row,
    make_rows,
)
from tests.support.offline import compile_only, facts

CPU = torch.device("cpu")


def emulated(logits, rows, arch="gfx942", **options):
    with emulate(arch):
        return device_tokens(logits, rows, CPU, arch, **options)


@pytest.mark.parametrize(
    ("arch", "vocabulary", "dtype"),
    [
        ("gfx942", 1000, torch.float32),
        ("gfx950", 1000, torch.float32),
        ("gfx942", 9000, torch.bfloat16),
        ("gfx950", 9000, torch.bfloat16),
    ],
)
def test_tokens_of_the_reference(arch, vocabulary, dtype):
    """9000 tokens are more blocks than candidates: heads that fit and heads that do not."""
    rows = make_rows(17, vocabulary)
    logits = draw_logits(len(rows), vocabulary, dtype=dtype)
    kept = logits.clone()
    tokens, _, _ = emulated(logits, rows, arch)
    assert tokens == sample(logits, rows, keep_logits=True)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 300])
def test_small_and_uneven_vocabularies(vocabulary):
    params = (PARAMS[0], PARAMS[1], PARAMS[2], PARAMS[4], PARAMS[5], PARAMS[9])
    rows = make_rows(len(params), vocabulary, params=params, masks=vocabulary > 2)
    logits = draw_logits(len(rows), vocabulary, spread=0.1)
    assert emulated(logits, rows)[0] == sample(logits, rows, keep_logits=True)


def test_equal_logits_are_kept_by_id():
    """Four values for 600 tokens: every cut falls among equals."""
    logits = torch.randint(0, 4, (24, 600)).float()
    params = [
        SamplingParams(top_k=k, top_p=p) for k, p in ((9, 1.0), (170, 0.4), (-1, 0.6), (300, 0.999))
    ]
    rows = [make_row(params[i % 4], seed=i, position=0, vocabulary=600) for i in range(len(logits))]
    tokens = emulated(logits, rows)[0]
    assert tokens == sample(logits, rows, keep_logits=True)
    for i in range(0, 24, 4):
        assert tokens[i] in (logits[i] == 3).nonzero()[:9, 0]


def test_flat_rows_of_many_blocks_read_the_whole_row():
    """Nothing peaks: the candidates hold a small part of the mass."""
    params = (SamplingParams(top_p=0.7), SamplingParams(top_k=2000, top_p=0.9),
              SamplingParams(min_p=0.5), SamplingParams(top_k=3000))  # fmt: skip
    rows = [make_row(p, seed=i, position=1, vocabulary=9000) for i, p in enumerate(params)]
    logits = draw_logits(4, 9000, spread=0.2)
    assert emulated(logits, rows)[0] == sample(logits, rows, keep_logits=True)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_rows_without_a_finite_logit_are_reported_and_alone(value):
    rows = make_rows(12, 300, params=PARAMS[:12], masks=False)
    logits = draw_logits(12, 300)
    logits[1::2] = value
    tokens = emulated(logits, rows)[0]
    assert tokens == sample(logits, rows, keep_logits=True)
    assert tokens[1::2] == [None] * 6
    assert None not in tokens[::2]


def test_one_nan_is_enough():
    rows = [make_row(PARAMS[i], seed=i, position=1, vocabulary=300) for i in (0, 1, 2, 4, 7)]
    logits = draw_logits(5, 300)
    logits[:, 200] = float("nan")
    assert emulated(logits, rows)[0] == [None] * 5


def test_masks_that_exclude_each_other():
    params = SamplingParams(temperature=0.0, min_new_tokens=2)
    row = make_row(params, seed=0, position=3, vocabulary=40, stop_ids=range(39))
    logits = torch.full((1, 40), 1.0)
    logits[0, 39] = float("-inf")
    assert emulated(logits, [row])[0] == [None]


def test_alone_and_in_a_batch():
    rows = make_rows(17, 700)
    logits = draw_logits(17, 700)
    together = emulated(logits, rows)[0]
    backwards = emulated(logits.flip(0).contiguous(), rows[::-1])[0][::-1]
    lone = [emulated(logits[i : i + 1], rows[i : i + 1])[0][0] for i in range(0, 17, 4)]
    assert together == backwards
    assert together[::4] == lone


def test_log_probabilities_are_of_the_raw_logits():
    rows = make_rows(17, 700)
    logits = draw_logits(17, 700)
    tokens, scores, _ = emulated(logits, rows, logprobs=True)
    want = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(scores.double(), want, rtol=0, atol=1e-5)


def test_counts_follow_the_tokens_without_the_host():
    """Three steps on the device's own counts equal three on the host's."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    logits = draw_logits(2, 60, spread=1.0)
    rows = [make_row(params, seed=1, position=1, vocabulary=60, generated=(4, 4)) for _ in "ab"]
    tokens, _, sampler = emulated(logits, rows, slots=[2, 1])
    device, host = [tokens], [sample(logits, rows, keep_logits=True)]
    for _ in range(2):
        for row, token in zip(rows, host[-1], strict=True):
            row.edits.add(token)
        host.append(sample(logits, rows, keep_logits=True))
        with emulate("gfx942"):
            device.append(sampler.sample(logits, rows, [2, 1])[0].tolist())
    assert device == host
    assert device[0] != device[1]  # the penalty matters
    assert (sampler.counts[0] == 12345).all()


def test_strided_logits():
    wide = draw_logits(3, 700)
    rows = make_rows(3, 650)
    assert emulated(wide[:, :650], rows)[0] == sample(
        wide[:, :650].contiguous(), rows, keep_logits=True
    )


def test_the_comparison_sees_a_changed_cut():
    rows = [
        make_row(SamplingParams(top_p=0.5), seed=i, position=0, vocabulary=300) for i in range(9)
    ]
    other = [
        make_row(SamplingParams(top_p=0.7), seed=i, position=0, vocabulary=300) for i in range(9)
    ]
    logits = draw_logits(9, 300)
    assert emulated(logits, rows)[0] != sample(logits, other, keep_logits=True)


def test_wrong_arguments_are_named():
    rows = make_rows(2, 50)
    with pytest.raises(ValueError, match="wanted float32"):
        emulated(draw_logits(2, 50).double(), rows)
    with pytest.raises(ValueError, match="temperature"):
        emulated(draw_logits(3, 50), rows)


@pytest.mark.parametrize("shape", ["neighbours", "one far above"])
def test_heads_of_every_shape(shape):
    """What sets how deep the list of a cut row reaches: ids of the head side by side, or a maximum
    far from the rest."""
    vocabulary = 5000
    logits = {
        "neighbours": -torch.arange(vocabulary).float().div(100).expand(6, -1).clone(),
        "one far above": torch.randn(6, vocabulary),
    }[shape]
    if shape == "one far above":
        logits[:, 4321] = 300.0
    params = (
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=300),
        SamplingParams(top_k=4500, top_p=0.99),
        SamplingParams(top_p=0.6, temperature=40.0),
        SamplingParams(top_k=40, temperature=0.05),
        SamplingParams(top_k=20, logit_bias={7: 3.0}),
    )
    rows = make_rows(6, vocabulary, params=params, masks=False)
    want = sample(logits, rows, keep_logits=True)
    assert emulated(logits, rows)[0] == want


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
def test_compiled_at_the_real_vocabulary(arch):
    """No register goes to memory on an NVIDIA GPU, with and without edited rows."""
    vocabulary = 200058
    sampler = DeviceSampler(vocabulary=8, slots=5, device=CPU, arch=arch)
    sampler.vocabulary = vocabulary
    sampler.counts = torch.empty(5, vocabulary, dtype=torch.int16, device="meta")
    logits = torch.empty(17, vocabulary, device="meta")
    rows = sampler.rows(make_rows(17, vocabulary), list(range(1, 18)))
    with compile_only(arch) as kernels:
        for each in (rows, replace(rows, edits=None)):
            sample_rows(logits, each, arch=arch, logprobs=True)
    found = [facts(kernel) for kernel in kernels]
    assert len(found) == 12
    assert [f for f in found if f.spills] == []
