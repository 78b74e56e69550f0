"""Verification of drafts on a GPU at the real vocabulary: tokens, distribution, graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.speculative.verification import verify_draft
from inkling_rocm.engine.speculative.verification_register import make_problem, make_rows, on_device
from inkling_rocm.kernels.verification import verify_rows
from tests.kernels.test_verification import MORE
from tests.support.sampling import chi_square_z, reference_probs

pytestmark = pytest.mark.gpu
VOCABULARY = 200058


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_the_cpu(device, arch, dtype, rejection):
    """All but near ties: one row may differ."""
    rows = make_rows(24, MORE)
    problem = make_problem(rows, 3, VOCABULARY, rejection=rejection, dtype=dtype)
    want, _ = verify_draft(
        problem.logits, problem.drafts, problem.draft_logits, rows, rejection=rejection
    )
    tokens, accepted, _ = on_device(problem, device, arch, rejection=rejection)
    different = [i for i in range(len(rows)) if not torch.equal(tokens[i], want[i])]
    assert len(different) <= 1, [(rows[i].params, tokens[i], want[i]) for i in different]
    # Accepted drafts and one token more, which is at least there where a logit is finite.
    assert torch.equal((tokens >= 0).sum(1), accepted + 1)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.8)], ids=str)
def test_distribution(device, arch, params):
    """Chi-square of the first token of 20000 rounds over 2500 tokens, two chunks."""
    count, vocabulary = 20000, 2500
    one = make_problem(make_rows(1, (params,)), 1, vocabulary, rejection=True, noise=1.0)
    rows = make_rows(count, (params,))
    sampler = DeviceSampler(vocabulary=vocabulary, slots=1, device=device, arch=arch)
    logits, stash = (
        x.to(device).expand(count, -1, -1).contiguous() for x in (one.logits, one.draft_logits)
    )
    drafts = sampler.draft(stash[:, 0], rows, 0, rejection=True)[:, None].contiguous()
    tokens, _ = sampler.verify(logits, drafts, stash, rows, [0] * count)
    counts = torch.bincount(tokens[:, 0].cpu(), minlength=vocabulary).numpy()
    probs = reference_probs(one.logits[0, 0], params)
    assert not counts[probs == 0].any()
    assert abs(chi_square_z(counts, probs)) < 5


def test_a_graph_replays_what_eager_calls_decide(device, arch):
    rows = make_rows(12, MORE)
    problem = make_problem(rows, 3, 20000, rejection=True)
    logits, drafts, stash = (
        x.to(device) for x in (problem.logits, problem.drafts, problem.draft_logits)
    )
    sampler = DeviceSampler(vocabulary=20000, slots=13, device=device, arch=arch)
    for slot, row in enumerate(rows, start=1):
        sampler.admit(slot, row.edits)
    found = sampler.verify_rows(rows, list(range(1, 13)), positions=4)

    def call():
        return verify_rows(logits, drafts, stash, found, arch=arch)

    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, accepted = call()
    for _ in range(3):
        found.sampling.position.add_(4)
        before = sampler.counts.clone()
        graph.replay()
        replayed = tokens.clone(), accepted.clone(), sampler.counts.clone()
        sampler.counts.copy_(before)
        eager = call()
        assert torch.equal(replayed[0], eager[0])
        assert torch.equal(replayed[1], eager[1])
        assert torch.equal(replayed[2], sampler.counts)
