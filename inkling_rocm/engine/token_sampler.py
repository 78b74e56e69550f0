"""How an executor draws the tokens of a step: on the host's terms or wholly on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.engine.speculative.verification import draw_drafts, verify_draft

if TYPE_CHECKING:  # it imports Triton
    from inkling_rocm.engine.device_sampler import DeviceSampler


class TokenSampler(Protocol):
    """Draws one token for each of a step's logit rows.

    Attributes:
        counts_tokens: whether it keeps the token counts of penalties itself.
    """

    counts_tokens: bool

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        """Returns: int64 [n] on the device of the logits; -1 where no logit is finite. The logits
        survive if the step asks for log probabilities."""
        ...

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        step: StepInput,
        *,
        rejection: bool,
    ) -> Tensor:
        """The tokens of step.samples, int64 [B, N + 1]; see verification.verify_draft."""
        ...

    def draft(
        self, logits_BV: Tensor, rows: Sequence[SampleRow], depth: int, *, rejection: bool
    ) -> Tensor:
        """One draft a row, int64 [B]; see verification.draw_drafts."""
        ...


class _TorchVerification:
    """Verification and drafting as specified, which wait for the device."""

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        step: StepInput,
        *,
        rejection: bool,
    ) -> Tensor:
        return verify_draft(
            logits_BMV, drafts_BN, draft_logits_BNV, step.samples, rejection=rejection
        )[0]

    def draft(
        self, logits_BV: Tensor, rows: Sequence[SampleRow], depth: int, *, rejection: bool
    ) -> Tensor:
        return draw_drafts(logits_BV, rows, depth, rejection=rejection)


class TorchSampler(_TorchVerification):
    """sampler.sample; waits for the device."""

    counts_tokens = False

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        return _drawn_by_torch(logits_nV, step.samples, keep_logits=bool(step.logprobs))


class DeviceTokenSampler(_TorchVerification):
    """The sampling kernels; waits for nothing.

    Rows without a slot of their own (continuations that start with this token) are drawn by the
    torch sampler: token counts on the device belong to slots.
    """

    counts_tokens = True

    def __init__(self, sampler: DeviceSampler):
        self._sampler = sampler
        self._counted: dict[int, LogitEdits] = {}  # whose token counts a slot holds

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        slots = step.sample_slots.tolist()
        for slot, row in zip(slots, step.samples, strict=True):
            if slot and row.edits.counts is not None and self._counted.get(slot) is not row.edits:
                self._sampler.admit(slot, row.edits)
                self._counted[slot] = row.edits
        if all(slots):
            return self._sampler.sample(logits_nV, step.samples, slots)[0]
        own = np.flatnonzero(step.sample_slots)
        others = np.flatnonzero(step.sample_slots == 0)
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits_nV.device)
        for rows, draw in ((own, self._draw), (others, self._draw_others)):
            index = torch.from_numpy(rows).to(logits_nV.device)
            tokens[index] = draw(
                logits_nV[index],
                [step.samples[i] for i in rows],
                [slots[i] for i in rows],
            )
        return tokens

    def _draw(self, logits_nV: Tensor, rows: list[SampleRow], slots: list[int]) -> Tensor:
        return self._sampler.sample(logits_nV, rows, slots)[0]

    def _draw_others(self, logits_nV: Tensor, rows: list[SampleRow], slots: list[int]) -> Tensor:
        return _drawn_by_torch(logits_nV, rows, keep_logits=False)


def _drawn_by_torch(logits_nV: Tensor, rows, *, keep_logits: bool) -> Tensor:
    tokens = sample(logits_nV, rows, keep_logits=keep_logits)
    found = [-1 if token is None else token for token in tokens]
    return torch.tensor(found, dtype=torch.int64, device=logits_nV.device)
