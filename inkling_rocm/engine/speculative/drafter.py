"""The interface between a step and what proposes the next tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.sampler import SampleRow


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """What a step has found, row by row: the positions below `end` are computed and their tokens
    final, whatever the row had drafted beyond.

    Attributes:
        step: as it was run.
        hidden_TH: the model's result for the step's tokens.
        first: int64 [B], where each row starts in hidden_TH.
        end: int64 [B].
        tokens: tokens each row has got, the last of them at position `end`; none where a prompt
            goes on.
        rows: how the tokens of each row that has got some are drawn, the position being that of the
            first draft; empty on a rank that is told the drafts.
    """

    step: StepInput
    hidden_TH: Tensor
    first: NDArray
    end: NDArray
    tokens: Sequence[tuple[int, ...]]
    rows: Sequence[SampleRow]

    @property
    def drafting(self) -> NDArray:
        """Rows that have got tokens and so can be drafted for, int64 [n]."""
        return np.array([b for b, tokens in enumerate(self.tokens) if tokens], np.int64)


class Drafter(Protocol):
    """Proposes tokens.

    Attributes:
        depths: most drafts of a row.
        tokens: int64 [slots, depths], the drafts of each sequence slot; -1 = there is none from
            here on.
        logits: fp32 [slots, depths, V] they were drawn from; None if nobody asks.
    """

    depths: int
    tokens: Tensor
    logits: Tensor | None

    def taps(self, num_tokens: int) -> dict[int, Tensor]:
        """Where the model's forward of a step is to put what this drafter reads of its layers
        (InklingModel.forward), to be used by `propose` for that step; empty = it reads nothing."""
        ...

    def propose(self, confirmed: Confirmed) -> None:
        """Take over a step's rows, and put step.draft.steps drafts into `tokens` (and `logits`) for
        those in confirmed.drafting."""
        ...
