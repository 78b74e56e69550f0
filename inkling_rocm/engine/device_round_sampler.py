"""Drawing in graphs on a GPU: parameters in fixed buffers, positions that the device knows.

Rows whose logits are edited are not drawn there, so a parameter changes only with the batch.
Emulated, and tested on an H200.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.kernels.sampling import SamplingRows, sample_rows
from inkling_rocm.kernels.verification import VerifyRows, verify_rows

_PARAMETERS = tuple(f.name for f in fields(SamplingRows) if f.name not in ("position", "edits"))


class DeviceRoundSampler:
    """A RoundSampler that waits for nothing.

    Args: rejection: see Speculation.
    """

    def __init__(self, sampler: DeviceSampler, *, rejection: bool):
        self._sampler = sampler
        self._rejection = rejection
        self._drawn: list[tuple[SamplingParams, int]] = []  # whose parameters the buffers hold
        rows = len(sampler.counts)  # never more than there are slots
        self._verify, self._draft = (self._buffers(rows) for _ in range(2))

    def prepare(self, step: StepInput) -> None:
        """See RoundSampler."""
        drawn = [(row.params, row.seed) for row in step.samples]
        kept = zip(drawn, self._drawn, strict=False)
        if len(drawn) == len(self._drawn) and all(a[0] is b[0] and a[1] == b[1] for a, b in kept):
            return
        assert not any(row.edits.active for row in step.samples)
        self._drawn = drawn
        found = [(self._verify, self._sampler.rows(step.samples, [0] * len(drawn)))]
        if step.round is not None:
            drafts = self._sampler.draft_rows(step.samples, 0, rejection=self._rejection)
            found.append((self._draft, drafts))
        for buffers, rows in found:
            for name in _PARAMETERS:
                getattr(buffers, name)[: len(drawn)].copy_(getattr(rows, name))

    def draw(self, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        """See RoundSampler."""
        return self._one(self._verify, logits_BV, position_B)

    def verify(
        self,
        logits_BMV: Tensor,
        drafts_BN: Tensor,
        draft_logits_BNV: Tensor | None,
        position_B: Tensor,
    ) -> Tensor:
        """See RoundSampler."""
        B, M, _ = logits_BMV.shape
        index = torch.arange(M, device=position_B.device)
        rows = SamplingRows(
            position=(position_B[:, None] + index).flatten(),
            **{
                name: getattr(self._verify, name)[:B, None].expand(B, M).contiguous().view(-1)
                for name in _PARAMETERS
            },
        )
        limit_B = torch.full((B,), M - 1, dtype=torch.int32, device=position_B.device)
        stash = draft_logits_BNV if self._rejection else None
        found = VerifyRows(sampling=rows, limit=limit_B)
        return verify_rows(logits_BMV, drafts_BN, stash, found, arch=self._sampler.arch)[0]

    def draft(self, logits_BV: Tensor, depth: int, position_B: Tensor) -> Tensor:
        """See RoundSampler."""
        return self._one(self._draft, logits_BV, position_B + depth)

    def _one(self, buffers: SamplingRows, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        parameters = {name: getattr(buffers, name)[: len(logits_BV)] for name in _PARAMETERS}
        rows = SamplingRows(position=position_B, **parameters)
        return sample_rows(logits_BV, rows, arch=self._sampler.arch)[0]

    def _buffers(self, rows: int) -> SamplingRows:
        """Of greedy rows, so that whatever padding draws costs little."""
        some = self._sampler.rows([], [])
        made: dict[str, Any] = {
            name: torch.zeros(rows, dtype=getattr(some, name).dtype, device=self._sampler.device)
            for name in _PARAMETERS
        }
        made["top_p"].fill_(1.0)
        made["log_min_p"].fill_(-torch.inf)
        return replace(some, **made)
