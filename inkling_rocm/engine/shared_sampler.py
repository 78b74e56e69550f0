"""One draw for all ranks: rank 0's samplers tell the others' by broadcast.

Every rank sees the same logits, but how a request draws does not leave rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.speculative.round_sampler import RoundSampler
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.host.comm import TorchComm


class SharedSampler:
    """Rank 0's sampler: draws, and tells the other ranks."""

    def __init__(self, sampler: TokenSampler, comm: TorchComm):
        self.counts_tokens = sampler.counts_tokens
        self._sampler = sampler
        self._comm = comm

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        return self._comm.broadcast(self._sampler.sample(logits_nV, step))

    def verify(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.verify(*args, **kwargs))

    def draft(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.draft(*args, **kwargs))

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        return _SharedRounds(self._sampler.for_rounds(rejection=rejection), self._comm)


class ToldSampler:
    """A follower's: is told the tokens."""

    counts_tokens = True

    def __init__(self, comm: TorchComm):
        self._comm = comm

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        return self._told(logits_nV, len(step.logit_rows))

    def verify(self, logits_BMV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._told(logits_BMV, *logits_BMV.shape[:2])

    def draft(self, logits_BV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._told(logits_BV, len(logits_BV))

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        return _ToldRounds(self._told)

    def _told(self, logits: Tensor, *shape: int) -> Tensor:
        return self._comm.broadcast(torch.empty(shape, dtype=torch.int64, device=logits.device))


class _SharedRounds:
    """Rank 0's in graphs: a broadcast of a few numbers can be part of one."""

    def __init__(self, sampler: RoundSampler, comm: TorchComm):
        self._sampler = sampler
        self._comm = comm

    def prepare(self, step: StepInput) -> None:
        self._sampler.prepare(step)

    def draw(self, *args: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.draw(*args))

    def verify(self, *args: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.verify(*args))

    def draft(self, *args: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.draft(*args))


class _ToldRounds:
    """A follower's in rounds."""

    def __init__(self, told: Callable[..., Tensor]):
        self._told = told

    def prepare(self, step: StepInput) -> None:
        pass

    def draw(self, logits_BV: Tensor, *args: Any) -> Tensor:
        return self._told(logits_BV, len(logits_BV))

    def verify(self, logits_BMV: Tensor, *args: Any) -> Tensor:
        return self._told(logits_BMV, *logits_BMV.shape[:2])

    def draft(self, logits_BV: Tensor, *args: Any) -> Tensor:
        return self._told(logits_BV, len(logits_BV))
