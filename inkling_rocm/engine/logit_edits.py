"""Per-sequence edits of the logits before sampling: penalties, bias, masked stop ids, grammar.

Edits are sparse (ids and values of one row), except a grammar's mask. `apply_edits` gathers those
of all rows into a few tensor operations.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.request import SamplingParams

# A logit times or divided by less than this is finite in fp32.
_LARGEST_PENALTY = 1e30


class TokenMask(Protocol):
    """A grammar's current opinion."""

    def allowed(self) -> NDArray | None:
        """bool [vocabulary] of permitted next tokens; None = all."""
        ...


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Distinct tokens (int64) and how often each was generated (fp32)."""

    ids: NDArray
    counts: NDArray


class TokenCounts:
    """Distinct tokens of one sequence with their number among the generated ones, kept up to date
    token by token.

    Args: prompt_ids: counted as seen, with zero occurrences.
    """

    def __init__(self, prompt_ids: Sequence[int]):
        distinct = dict.fromkeys(prompt_ids)
        self._index = {token: i for i, token in enumerate(distinct)}
        self._ids = np.fromiter(distinct, np.int64, len(distinct))
        self._counts = np.zeros(len(distinct), np.float32)

    def add(self, token: int) -> None:
        """Count one generated token."""
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            spare = max(64, at)
            self._ids = np.append(self._ids, np.zeros(spare, np.int64))
            self._counts = np.append(self._counts, np.zeros(spare, np.float32))
        self._ids[at] = token
        self._counts[at] += 1

    def after(self, tokens: Sequence[int]) -> SeenTokens:
        """What the counts would be after some more generated tokens."""
        fresh = [t for t in dict.fromkeys(tokens) if t not in self._index]
        at = {token: len(self._index) + i for i, token in enumerate(fresh)}
        counts = np.append(self.counts, np.zeros(len(fresh), np.float32))
        for token in tokens:
            counts[at[token] if token in at else self._index[token]] += 1
        return SeenTokens(np.append(self.ids, np.array(fresh, np.int64)), counts)

    @property
    def ids(self) -> NDArray:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray:
        return self._counts[: len(self._index)]


class LogitEdits:
    """What changes the logits of one sequence.

    Args:
        stop_ids: masked until min_new_tokens tokens were generated.
        mask: the grammar, if there is one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int],
        mask: TokenMask | None = None,
    ):
        self.params = params
        self.mask = mask
        penalised = (
            params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
        )
        seen = prompt_ids if params.repetition_penalty != 1.0 else ()
        self.counts: TokenCounts | SeenTokens | None = TokenCounts(seen) if penalised else None
        self.bias_ids = np.array(list(params.logit_bias), np.int64)
        self.bias = np.array(list(params.logit_bias.values()), np.float32)
        self.stop_ids = np.array(stop_ids if params.min_new_tokens else (), np.int64)
        self._generated = 0

    def add(self, token: int) -> None:
        """Record a generated token."""
        self._generated += 1
        if self.counts is not None:
            assert isinstance(self.counts, TokenCounts), "what `after` returned is for one step"
            self.counts.add(token)

    def after(self, tokens: Sequence[int]) -> LogitEdits:
        """The edits once `tokens` were generated too, for use in this step: nothing can be added to
        them, and a grammar, which must see each token, is left out."""
        if not len(tokens):
            return self
        ahead = copy.copy(self)
        ahead.mask = None
        ahead._generated += len(tokens)
        if self.counts is not None:
            assert isinstance(self.counts, TokenCounts), "what `after` returned is for one step"
            ahead.counts = self.counts.after(tokens)
        return ahead

    @property
    def holds_back_stop(self) -> bool:
        return self.holds_back_stop_after(0)

    def holds_back_stop_after(self, tokens: int) -> bool:
        """Whether stop ids will still be masked once `tokens` more were generated."""
        generated = self._generated + tokens
        return len(self.stop_ids) > 0 and generated < self.params.min_new_tokens

    @property
    def active(self) -> bool:
        """Whether the next token's logits are changed at all."""
        return (
            self.counts is not None
            or len(self.bias_ids) > 0
            or self.mask is not None
            or self.holds_back_stop
        )

    @property
    def excludes(self) -> bool:
        """Whether they may leave no token that can be drawn, or logits beyond fp32."""
        penalty = self.params.repetition_penalty
        return (
            self.mask is not None
            or self.holds_back_stop
            or not bool(np.isfinite(self.bias).all())
            or not 1 / _LARGEST_PENALTY < penalty < _LARGEST_PENALTY
        )


def apply_edits(logits_nV: Tensor, edits: Sequence[tuple[int, LogitEdits]]) -> None:
    """Edit logits in place: penalties, then bias, then masks.

    Args: logits_nV: fp32 [n, V]. edits: (row, its edits).
    """
    _apply_penalties(logits_nV, [(row, e) for row, e in edits if e.counts is not None])
    biased = [(row, e) for row, e in edits if len(e.bias_ids)]
    if biased:
        index = _index([(row, e.bias_ids) for row, e in biased], logits_nV.device)
        values = torch.from_numpy(np.concatenate([e.bias for _, e in biased]))
        logits_nV.index_put_(index, values.to(logits_nV.device), accumulate=True)
    held = [(row, e.stop_ids) for row, e in edits if e.holds_back_stop]
    if held:
        logits_nV[_index(held, logits_nV.device)] = float("-inf")
    for row, e in edits:
        allowed = None if e.mask is None else e.mask.allowed()
        if allowed is not None:
            mask = torch.from_numpy(allowed).to(logits_nV.device)
            logits_nV[row].masked_fill_(~mask, float("-inf"))


def _index(rows: Sequence[tuple[int, NDArray]], device) -> tuple[Tensor, Tensor]:
    """Flat (row, id) indices of several rows' ids."""
    row = np.repeat([row for row, _ in rows], [len(ids) for _, ids in rows])
    ids = np.concatenate([ids for _, ids in rows])
    return torch.from_numpy(row).to(device), torch.from_numpy(ids).to(device)


def _apply_penalties(logits_nV: Tensor, edits: Sequence[tuple[int, LogitEdits]]) -> None:
    counted = [(row, e, e.counts) for row, e in edits if e.counts is not None]
    if not counted:
        return
    device = logits_nV.device
    lengths = [len(counts.ids) for _, _, counts in counted]
    index = _index([(row, counts.ids) for row, _, counts in counted], device)
    counts = torch.from_numpy(np.concatenate([c.counts for _, _, c in counted])).to(device)

    def spread(name: str) -> Tensor:
        values = np.array([getattr(e.params, name) for _, e, _ in counted], np.float32)
        return torch.from_numpy(np.repeat(values, lengths)).to(device)

    values = logits_nV[index]
    repetition = spread("repetition_penalty")
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread("frequency_penalty") * counts
    values -= spread("presence_penalty") * (counts > 0)
    logits_nV[index] = values
