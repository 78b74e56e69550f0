"""Drawing in rounds on emulated AMD code gives what the specification gives, at positions that only
the device knows."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from gcn_emulator.triton_driver import emulate
from inkling_rocm.engine.device_round_sampler import DeviceRoundSampler
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.speculative.round_sampler import TorchRoundSampler
from inkling_rocm.engine.token_sampler import TorchSampler

CPU = torch.device("cpu")
V, N = 300, 2
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(seed=4, top_k=9, top_p=0.8),
)


def step_of(params) -> StepInput:
    rows = [SampleRow(p, p.seed or 0, -1, LogitEdits(p, (), ())) for p in params]
    return SimpleNamespace(samples=tuple(rows), round=object())


def specified(step, positions, logits, drafts, stash, draft_logits, *, rejection):
    """What a step that knows its positions draws."""

    class AtPositions(TorchRoundSampler):
        def _at(self, position_B):
            rows = zip(self._step.samples, position_B.tolist(), strict=False)
            placed = [SampleRow(r.params, r.seed, p, r.edits) for r, p in rows]
            return SimpleNamespace(samples=tuple(placed))

    sampler = AtPositions(TorchSampler(), rejection=rejection)
    sampler.prepare(step)
    return (
        sampler.verify(logits, drafts, stash, positions),
        sampler.draft(draft_logits, 1, positions + 3),
    )


@pytest.mark.parametrize("rejection", [False, True])
def test_as_specified(rejection):
    """Three rows and one of padding; then another batch in the same buffers."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(4, N + 1, V, generator=generator) * 2
    stash = logits[:, :N] + torch.randn(4, N, V, generator=generator)
    drafts = stash.argmax(-1)
    drafts[1, 1] = -1
    positions = torch.tensor([5, 80, 1, 1])
    with emulate("gfx942"):
        device = DeviceSampler(vocabulary=V, slots=5, device=CPU, arch="gfx942")
        sampler = DeviceRoundSampler(device, rejection=rejection)
        for params in (PARAMS, PARAMS[:0:-1]):
            step = step_of(params)
            sampler.prepare(step)
            sampler.prepare(step)  # nothing has changed
            got = (
                sampler.verify(logits, drafts, stash, positions),
                sampler.draft(logits[:, 0], 1, positions + 3),
            )
            want = specified(
                step, positions, logits, drafts, stash, logits[:, 0], rejection=rejection
            )
            for found, expected in zip(got, want, strict=True):
                assert torch.equal(found[: len(params)], expected[: len(params)])
