"""What rank 0 tells and what the others are told are broadcasts of the same shapes, in turn. (That
ranks then give the same tokens is tested with real ones: test_tensor_parallel.py, test_nccl.py.)"""

from types import SimpleNamespace

import pytest
import torch

from inkling_rocm.engine.shared_sampler import SharedSampler, ToldSampler

B, M, V = 3, 4, 7  # rows, tokens a row, vocabulary


class Drawn:
    """In place of a sampler, for steps and for rounds."""

    counts_tokens = True

    def for_rounds(self, *, rejection):
        return self

    def sample(self, logits_nV, step):
        return torch.arange(len(step.logit_rows))

    def verify(self, logits_BMV, *rest, **how):
        return torch.arange(B * M).view(B, M)

    def draft(self, logits_BV, *rest, **how):
        return torch.arange(B)

    draw = draft


class Told(list):
    """In place of a group: what was broadcast."""

    def broadcast(self, x):
        self.append((tuple(x.shape), x.dtype))
        return x


STEP = SimpleNamespace(logit_rows=range(B))
CALLS = {
    "sample": lambda s: s.sample(torch.zeros(B, V), STEP),
    "verify": lambda s: s.verify(torch.zeros(B, M, V), torch.zeros(B, M - 1), None, STEP),
    "draft": lambda s: s.draft(torch.zeros(B, V), [], 0, rejection=False),
    "draw in rounds": lambda s: s.for_rounds(rejection=False).draw(
        torch.zeros(B, V), torch.zeros(B)
    ),
    "verify in rounds": lambda s: s.for_rounds(rejection=True).verify(
        torch.zeros(B, M, V), torch.zeros(B, M - 1), None, torch.zeros(B)
    ),
    "draft in rounds": lambda s: s.for_rounds(rejection=True).draft(
        torch.zeros(B, V), 1, torch.zeros(B)
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_told_is_what_is_drawn(call):
    told, heard = Told(), Told()
    drawn = CALLS[call](SharedSampler(Drawn(), told))
    assert told == [(tuple(drawn.shape), torch.int64)]
    CALLS[call](ToldSampler(heard))
    assert heard == told
