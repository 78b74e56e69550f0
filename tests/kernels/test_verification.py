"""Verification of drafts on the emulator: the tokens of the torch verification, row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.speculative.verification import verify_draft
from inkling_rocm.engine.speculative.verification_register import (
    PARAMS,
    make_problem,
    make_rows,
    on_device,
)
from inkling_rocm.engine.token_sampler import DeviceTokenSampler
from inkling_rocm.kernels.verification import verify_rows
from tests.kernels.sampling_cases import EveryThird
from tests.support.offline import TARGETS, compile_only, facts

CPU = torch.device("cpu")
EITHER = pytest.mark.parametrize("rejection", [pytest.param(False, marks=pytest.mark.full), True])
KERNELS = {"_mass_kernel", "_accept_kernel", "_residual_kernel", "_settle_kernel"}
MORE = (
    *PARAMS,
    SamplingParams(top_k=200, top_p=0.99, temperature=2.0),
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=0.0, min_new_tokens=4, logit_bias={5: 9.0, 3: 8.0}),
    SamplingParams(frequency_penalty=1.0, presence_penalty=0.4, temperature=1.4),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20, min_p=0.2),
)


def emulated(problem, arch="gfx942", *, rejection):
    with emulate(arch):
        return on_device(problem, CPU, arch, rejection=rejection)


def reference(problem, *, rejection):
    return verify_draft(
        problem.logits, problem.drafts, problem.draft_logits, problem.rows, rejection=rejection
    )


def assert_as_specified(problem, arch="gfx942", *, rejection):
    tokens, accepted, sampler = emulated(problem, arch, rejection=rejection)
    want, number = reference(problem, rejection=rejection)
    assert tokens.tolist() == want.tolist()
    assert accepted.tolist() == number.tolist()
    return want, number, sampler


@pytest.mark.full
@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_tokens_of_the_reference(arch, rejection):
    """Every kind of row, the last with a grammar; some drafts of every number are accepted."""
    rows = make_rows(14, MORE, masks=[EveryThird(300)] * 2)
    problem = make_problem(rows, 3, 300, rejection=rejection)
    kept = problem.logits.clone()
    _, number, _ = assert_as_specified(problem, arch, rejection=rejection)
    assert set(number.tolist()) >= {0, 1, 2}
    assert not number[-2:].any()
    assert torch.equal(problem.logits, kept)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spread", "noise"), [(3.0, 1.0), (0.3, 0.3)])
def test_more_blocks_than_candidates(dtype, spread, noise):
    """9000 tokens: heads that fit the candidates and heads that do not; in bf16 many ties."""
    rows = make_rows(12, MORE)
    problem = make_problem(
        rows, 2, 9000, rejection=True, spread=spread, noise=noise, dtype=dtype, seed=3
    )
    assert_as_specified(problem, rejection=True)


@pytest.mark.full
def test_cuts_among_equal_logits():
    """Four values for 2500 tokens: the kept ones among equals are those of the lowest ids, in both
    chunks."""
    params = [SamplingParams(top_k=k, top_p=p) for k, p in ((9, 1.0), (900, 0.9), (-1, 0.6))]
    rows = make_rows(6, params)
    problem = make_problem(rows, 1, 2500, rejection=True)
    logits = torch.randint(0, 4, problem.logits.shape).float()
    # Half of the rows draft a token at the edge of what is kept.
    order = (-logits[:, 0]).argsort(stable=True)
    edge = torch.tensor([8, 809, 900, 9, 900, 1700])[:, None]
    drafts = torch.where(torch.arange(6)[:, None] % 2 == 0, order.gather(1, edge), problem.drafts)
    assert_as_specified(replace(problem, logits=logits, drafts=drafts), rejection=True)


@pytest.mark.full
@pytest.mark.parametrize("vocabulary", [1, 2, 127, 129])
def test_small_and_uneven_vocabularies(vocabulary):
    rows = make_rows(
        4, (PARAMS[0], PARAMS[2], SamplingParams(top_p=0.6), SamplingParams(min_p=0.1))
    )
    assert_as_specified(make_problem(rows, 2, vocabulary, rejection=True), rejection=True)


@EITHER
def test_rows_end_where_no_logit_is_finite_and_alone(rejection):
    problem = make_problem(make_rows(6, PARAMS), 2, 300, rejection=rejection, noise=0.1)
    logits = problem.logits.clone()
    logits[0, 0] = float("nan")
    logits[2, 1, 7] = float("nan")
    logits[3, 1] = float("-inf")
    logits[4, 2] = float("inf")
    want, _, _ = assert_as_specified(replace(problem, logits=logits), rejection=rejection)
    assert want[0].tolist() == [-1, -1, -1]


def test_missing_drafts_and_drafts_without_logits():
    problem = make_problem(make_rows(6, PARAMS), 2, 300, rejection=True, noise=0.1)
    drafts, stash = problem.drafts.clone(), problem.draft_logits.clone()
    drafts[0, 0] = drafts[2, 1] = drafts[1, 0] = -1
    stash[3, 0] = float("nan")
    stash[4, 0, 8] = float("nan")
    stash[5, 0] = float("-inf")
    found = replace(problem, drafts=drafts, draft_logits=stash)
    _, number, _ = assert_as_specified(found, rejection=True)
    assert not number[[0, 1, 3, 4, 5]].any()


def test_equal_distributions_accept_or_draw_from_the_target():
    """p = q: every draft stays."""
    rows = make_rows(4, (SamplingParams(), SamplingParams(temperature=0.6)))
    problem = make_problem(rows, 2, 300, rejection=True, noise=0.0)
    _, number, _ = assert_as_specified(problem, rejection=True)
    assert number.tolist() == [2] * 4


@pytest.mark.parametrize("rejection", [False, True])
def test_token_counts_follow_without_the_host(rejection):
    """Two rounds on the device's own counts equal two on the host's; drafts repeat, so that a token
    is counted more than once in a round."""
    params = (SamplingParams(temperature=0.0, frequency_penalty=0.9, repetition_penalty=1.1),
              SamplingParams(frequency_penalty=0.3, presence_penalty=0.1))  # fmt: skip
    rows = make_rows(4, params)
    problem = make_problem(rows, 3, 60, rejection=rejection, noise=0.0)
    repeated = problem.logits[:, :1].expand(-1, 4, -1).contiguous()
    repeated[:, :, 11] = repeated.amax(-1) + 2.0
    drafts = torch.full_like(problem.drafts, 11)
    problem = replace(
        problem, logits=repeated, draft_logits=repeated[:, :3].contiguous(), drafts=drafts
    )
    want, number, sampler = assert_as_specified(problem, rejection=rejection)
    assert number.max() > 1
    for row, tokens in zip(rows, want.tolist(), strict=True):
        for token in tokens:
            if token >= 0:
                row.edits.add(token)
    held = sampler.counts.clone()
    for slot, row in enumerate(rows, start=1):
        sampler.admit(slot, row.edits)
    assert torch.equal(sampler.counts[1:] >> 1, held[1:] >> 1)
    again = [replace(row, position=row.position + 4) for row in rows]
    problem = replace(problem, rows=again)
    with emulate("gfx942"):
        tokens, accepted = sampler.verify(
            problem.logits, drafts, problem.draft_logits if rejection else None, again, [1, 2, 3, 4]
        )
    second = reference(problem, rejection=rejection)
    assert tokens.tolist() == second[0].tolist()
    assert accepted.tolist() == second[1].tolist()
    assert second[0].tolist() != want.tolist()  # the penalty matters


@pytest.mark.full
def test_alone_and_in_a_batch():
    rows = make_rows(6, PARAMS)
    problem = make_problem(rows, 2, 300, rejection=True)
    together = emulated(problem, rejection=True)[0]
    for i in (0, 2, 5):
        one = slice(i, i + 1)
        lone = replace(
            problem, logits=problem.logits[one], drafts=problem.drafts[one],
            draft_logits=problem.draft_logits[one], rows=rows[one],
        )  # fmt: skip
        assert emulated(lone, rejection=True)[0].tolist() == together[one].tolist()


@pytest.mark.parametrize("rejection", [False, True])
def test_drafts_of_the_reference(rejection):
    rows = make_rows(6, PARAMS)
    problem = make_problem(rows, 2, 300, rejection=rejection)
    sampler = DeviceSampler(vocabulary=300, slots=1, device=CPU, arch="gfx942")
    with emulate("gfx942"):
        drafts = sampler.draft(problem.draft_logits[:, 1], rows, 1, rejection=rejection)
    assert torch.equal(drafts, problem.drafts[:, 1])
    assert not sampler.counts.any()


@EITHER
def test_the_token_sampler_draws_rows_without_a_slot_by_torch(rejection):
    rows = make_rows(4, PARAMS)
    problem = make_problem(rows, 2, 300, rejection=rejection)
    sampler = DeviceSampler(vocabulary=300, slots=5, device=CPU, arch="gfx942")
    step = _step(rows, [3, 0, 1, 0])
    with emulate("gfx942"):
        tokens = DeviceTokenSampler(sampler).verify(
            problem.logits, problem.drafts, problem.draft_logits, step, rejection=rejection
        )
    assert tokens.tolist() == reference(problem, rejection=rejection)[0].tolist()


def _step(rows, slots):
    none = np.zeros(0, np.int64)
    return StepInput(
        slots=none, q_start=none, q_len=none, token_ids=none, tables=(), ring_copies=none,
        logit_rows=none, sample_slots=np.array(slots), samples=tuple(rows),
    )  # fmt: skip


def test_the_comparison_sees_a_wrong_draft_distribution():
    problem = make_problem(make_rows(12, (SamplingParams(),)), 2, 300, rejection=True)
    other = replace(problem, draft_logits=problem.draft_logits * 0.5)
    tokens = emulated(other, rejection=True)[0]
    assert tokens.tolist() != reference(problem, rejection=True)[0].tolist()


def test_wrong_arguments_are_named():
    problem = make_problem(make_rows(2, PARAMS), 2, 50, rejection=True)
    sampler = DeviceSampler(vocabulary=50, slots=3, device=CPU, arch="gfx942")
    rows = sampler.verify_rows(problem.rows, [1, 2], positions=3)
    logits, drafts, stash = problem.logits, problem.drafts, problem.draft_logits
    with pytest.raises(ValueError, match=r"drafts are torch.int32 \(2, 2\)"):
        verify_rows(logits, drafts.int(), stash, rows, arch="gfx942")
    with pytest.raises(ValueError, match=r"draft logits are torch.float32 \(2, 1, 50\)"):
        verify_rows(logits, drafts, stash[:, :1], rows, arch="gfx942")
    with pytest.raises(ValueError, match="logits have strides"):
        verify_rows(logits.transpose(0, 1), drafts, stash, rows, arch="gfx942")


@pytest.mark.full
@pytest.mark.parametrize("arch", TARGETS)
def test_compiled_at_the_real_vocabulary(arch):
    """No spills and next to no LDS, for 8 drafts."""
    vocabulary = 200058
    rows = make_rows(4, PARAMS)
    sampler = DeviceSampler(vocabulary=8, slots=5, device=CPU, arch=arch)
    sampler.vocabulary = vocabulary
    sampler.counts = torch.empty(5, vocabulary, dtype=torch.int16, device="meta")
    with compile_only(arch) as kernels:
        for stash in (None, torch.empty(4, 8, vocabulary, device="meta")):
            verify_rows(
                torch.empty(4, 9, vocabulary, device="meta"),
                torch.empty(4, 8, dtype=torch.int64, device="meta"),
                stash,
                sampler.verify_rows(rows, [1, 2, 3, 4], positions=9),
                arch=arch,
            )
    found = [facts(kernel) for kernel in kernels if kernel.metadata.name in KERNELS]
    assert {f.name for f in found} == KERNELS
    for f in found:
        assert f.spills == 0, f
        assert f.lds_bytes <= 1024, f
