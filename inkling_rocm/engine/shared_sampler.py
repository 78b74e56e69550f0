"""One draw for all ranks: rank 0's samplers tell the others' by broadcast.

Every rank sees the same logits, but how a request draws does not leave rank 0. A broadcast of a few
numbers can be part of a graph, as rounds and decode steps want it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from inkling_rocm.engine.executor import StepInput
from inkling_rocm.engine.speculative.round_sampler import RoundSampler
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.host.comm import TorchComm

_Sampler = TypeVar("_Sampler", bound=TokenSampler | RoundSampler)


class _Telling(Generic[_Sampler]):
    """Rank 0's side of what steps and rounds both draw."""

    def __init__(self, sampler: _Sampler, comm: TorchComm):
        self._sampler = sampler
        self._comm = comm

    def verify(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.verify(*args, **kwargs))

    def draft(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.draft(*args, **kwargs))


class SharedSampler(_Telling[TokenSampler]):
    """Rank 0's sampler: draws, and tells the other ranks."""

    def __init__(self, sampler: TokenSampler, comm: TorchComm):
        super().__init__(sampler, comm)
        self.counts_tokens = sampler.counts_tokens

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        return self._comm.broadcast(self._sampler.sample(logits_nV, step))

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        return _SharedRounds(self._sampler.for_rounds(rejection=rejection), self._comm)

    def compile(self, logits_nV: Tensor) -> None:
        self._sampler.compile(logits_nV)


class _SharedRounds(_Telling[RoundSampler]):
    def prepare(self, step: StepInput) -> None:
        self._sampler.prepare(step)

    def draw(self, *args: Any) -> Tensor:
        return self._comm.broadcast(self._sampler.draw(*args))


class _Told:
    """A follower's side of what steps and rounds both draw."""

    def __init__(self, comm: TorchComm):
        self._comm = comm

    def verify(self, logits_BMV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._told(logits_BMV, *logits_BMV.shape[:2])

    def draft(self, logits_BV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._told(logits_BV, len(logits_BV))

    def _told(self, logits: Tensor, *shape: int) -> Tensor:
        return self._comm.broadcast(torch.empty(shape, dtype=torch.int64, device=logits.device))


class ToldSampler(_Told):
    """A follower's sampler: is told the tokens."""

    counts_tokens = True

    def sample(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        return self._told(logits_nV, len(step.logit_rows))

    def for_rounds(self, *, rejection: bool) -> RoundSampler:
        return _ToldRounds(self._comm)

    def compile(self, logits_nV: Tensor) -> None:
        pass  # rank 0 draws


class _ToldRounds(_Told):
    def prepare(self, step: StepInput) -> None:
        pass

    def draw(self, logits_BV: Tensor, *args: Any) -> Tensor:
        return self._told(logits_BV, len(logits_BV))
