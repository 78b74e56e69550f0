"""How decode steps and rounds draw from fixed buffers: engine/token_sampler.py where only the
device knows the positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from inkling_rocm.engine.executor import StepInput

if TYPE_CHECKING:
    from inkling_rocm.engine.token_sampler import TokenSampler


class RoundSampler(Protocol):
    """Draws for the rows of one round after the other. Of B rows, the first are those of the step,
    the rest are padding, of which anything may be drawn."""

    def prepare(self, step: StepInput) -> None:
        """What the host knows of the next step's rows goes to fixed buffers; not captured. No row's
        logits are edited."""
        ...

    def draw(self, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        """One token a row of a decode step; see TokenSampler.sample.

        Args:    position_B: int64, of the token to draw.
        Returns: int64 [B]. The logits survive.
        """
        ...

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        position_B: Tensor,
    ) -> Tensor:
        """See TokenSampler.verify.

        Args:    position_B: int64, of the first token to draw. draft_logits_BNV: None = accept
                 where equal.
        Returns: int64 [B, N + 1]. The logits survive.
        """
        ...

    def draft(self, logits_BV: Tensor, depth: int, position_B: Tensor) -> Tensor:
        """See TokenSampler.draft.

        Args:    position_B: int64, of the first draft.
        Returns: int64 [B].
        """
        ...


class TorchRoundSampler:
    """Asks the device for the positions: for a CPU."""

    def __init__(self, sampler: TokenSampler, *, rejection: bool):
        self._sampler = sampler
        self._rejection = rejection
        self._step: StepInput | None = None

    def prepare(self, step: StepInput) -> None:
        self._step = step

    def draw(self, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        step = self._at(position_B)
        n = len(step.samples)
        tokens_B = torch.full((len(logits_BV),), -1, dtype=torch.int64)
        tokens_B[:n] = self._sampler.sample(logits_BV[:n], step)
        return tokens_B

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        position_B: Tensor,
    ) -> Tensor:
        step = self._at(position_B)
        n = len(step.samples)
        tokens_BM = torch.full(logits_BMV.shape[:2], -1, dtype=torch.int64)
        tokens_BM[:n] = self._sampler.verify(
            logits_BMV[:n],
            drafts_BN[:n],
            None if draft_logits_BNV is None else draft_logits_BNV[:n],
            step,
            rejection=self._rejection,
        )
        return tokens_BM

    def draft(self, logits_BV: Tensor, depth: int, position_B: Tensor) -> Tensor:
        rows = self._at(position_B).samples
        drafts_B = torch.zeros(len(logits_BV), dtype=torch.int64)
        drafts_B[: len(rows)] = self._sampler.draft(
            logits_BV[: len(rows)], rows, depth, rejection=self._rejection
        )
        return drafts_B

    def _at(self, position_B: Tensor) -> StepInput:
        """The step with the samples at their positions."""
        assert self._step is not None, "prepare comes first"
        samples = self._step.samples
        positions = position_B[: len(samples)].tolist()
        placed = [replace(row, position=p) for row, p in zip(samples, positions, strict=True)]
        return replace(self._step, samples=tuple(placed))
