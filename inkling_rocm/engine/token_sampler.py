"""How an executor draws the tokens of a step: on the host's terms or wholly on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.engine.speculative.round_sampler import RoundSampler, TorchRoundSampler
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
        """The tokens of step.samples, int64 [B, N + 1]; see verification.verify_draft. The logits
        survive."""
        ...

    def draft(
        self, logits_BV: Tensor, rows: Sequence[SampleRow], depth: int, *, rejection: bool
    ) -> Tensor:
        """One draft a row, int64 [B]; see verification.draw_drafts."""
        ...

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        """What verifies and drafts in rounds from fixed buffers."""
        ...

    def compile(self, logits_nV: Tensor) -> None:
        """Launch what draws such rows, whatever a request asks for; only where nothing is started
        (compile_ahead.py)."""
        ...


class TorchSampler:
    """As specified: sampler.sample and speculative/verification.py; waits for the device."""

    counts_tokens = False

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        return _drawn_by_torch(logits_nV, step.samples, keep_logits=bool(step.logprobs))

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

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        return TorchRoundSampler(self, rejection=rejection)

    def compile(self, logits_nV: Tensor) -> None:
        pass  # there is nothing to compile


class DeviceTokenSampler:
    """The sampling and verification kernels; waits for nothing.

    Rows without a slot of their own (continuations that start with this token) are drawn by the
    torch sampler: token counts on the device belong to slots.
    """

    counts_tokens = True

    def __init__(self, sampler: DeviceSampler):
        self._sampler = sampler
        self._counted: dict[int, LogitEdits] = {}  # whose token counts a slot holds

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        slots = self._admitted(step)
        if all(slots):
            return self._sampler.sample(logits_nV, step.samples, slots)[0]
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits_nV.device)
        for rows, samples, own in _by_owner(step):
            index = torch.from_numpy(rows).to(logits_nV.device)
            if own is None:
                tokens[index] = _drawn_by_torch(logits_nV[index], samples, keep_logits=False)
            else:
                tokens[index] = self._sampler.sample(logits_nV[index], samples, own)[0]
        return tokens

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        step: StepInput,
        *,
        rejection: bool,
    ) -> Tensor:
        slots = self._admitted(step)
        stash = draft_logits_BNV if rejection else None
        if all(slots):
            return self._sampler.verify(logits_BMV, drafts_BN, stash, step.samples, slots)[0]
        shape = logits_BMV.shape[:2]
        tokens = torch.empty(shape, dtype=torch.int64, device=logits_BMV.device)
        for rows, samples, own in _by_owner(step):
            index = torch.from_numpy(rows).to(logits_BMV.device)
            some = None if stash is None else stash[index]
            if own is None:
                tokens[index] = verify_draft(
                    logits_BMV[index], drafts_BN[index], some, samples, rejection=rejection
                )[0]
            else:
                tokens[index] = self._sampler.verify(
                    logits_BMV[index], drafts_BN[index], some, samples, own
                )[0]
        return tokens

    def draft(
        self, logits_BV: Tensor, rows: Sequence[SampleRow], depth: int, *, rejection: bool
    ) -> Tensor:
        return self._sampler.draft(logits_BV, rows, depth, rejection=rejection)

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        from inkling_rocm.engine.device_round_sampler import DeviceRoundSampler  # imports Triton

        return DeviceRoundSampler(self._sampler, rejection=rejection)

    def compile(self, logits_nV: Tensor) -> None:
        self._sampler.compile(logits_nV)

    def _admitted(self, step: StepInput) -> list[int]:
        """The slots of a step's samples, which hold these sequences' token counts."""
        slots = step.sample_slots.tolist()
        for slot, row in zip(slots, step.samples, strict=True):
            if slot and row.edits.counts is not None and self._counted.get(slot) is not row.edits:
                self._sampler.admit(slot, row.edits)
                self._counted[slot] = row.edits
        return slots


def _by_owner(step: StepInput) -> Iterator[tuple[NDArray, list[SampleRow], list[int] | None]]:
    """Rows with a slot of their own, then those without: indices, how to draw, slots or None."""
    for own in (True, False):
        rows = np.flatnonzero((step.sample_slots != 0) == own)
        samples = [step.samples[i] for i in rows]
        yield rows, samples, step.sample_slots[rows].tolist() if own else None


def _drawn_by_torch(logits_nV: Tensor, rows, *, keep_logits: bool) -> Tensor:
    tokens = sample(logits_nV, rows, keep_logits=keep_logits)
    found = [-1 if token is None else token for token in tokens]
    return torch.tensor(found, dtype=torch.int64, device=logits_nV.device)
