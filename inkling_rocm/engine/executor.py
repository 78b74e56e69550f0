"""The seam between the books and the device: EngineCore decides and books, an Executor computes.

A StepInput says everything about one forward in numpy arrays, so that it can be sent to the other
ranks of a tensor-parallel group as it is (without `samples`, which only the rank that samples
needs). An executor may return before the step has run; `StepOutput.wait` gives its tokens. So that
the next step can be started before that, a decode row may ask for "the token sampled last for this
slot", which the executor keeps on its device.

With speculation (engine/speculative) a decoding row also computes the drafts that the step before
made for its slot, and gets as many tokens as were accepted, and one more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.request import TokenLogprob
from inkling_rocm.engine.sampler import SampleRow

LAST_TOKEN = -1  # in StepInput.token_ids: the token sampled last for the row's slot
DRAFT_TOKEN = -2  # the next of the drafts made for the row's slot


@dataclass(frozen=True, kw_only=True)
class TableChanges:
    """What changed in one page pool since the previous step.

    Attributes:
        entries: int32 [m, 3], (slot, column, page) set in the page table, in this order.
        first: int32 [B], first live page index of each row of the step. end: int32 [B], one past
            the last.
        copies: int32 [c, 2], (source, target) pages to copy in this order before the forward.
    """

    entries: NDArray
    first: NDArray
    end: NDArray
    copies: NDArray


@dataclass(frozen=True, kw_only=True)
class Score:
    """Prompt rows whose logits are wanted beside sampling.

    Attributes:
        first, rows: tokens first .. first + rows - 1 of the forward.
        following: the prompt ids that come next, whose log probabilities are wanted with `top`
            alternatives; None = the fp32 logits themselves.
    """

    first: int
    rows: int
    following: tuple[int, ...] | None = None
    top: int = 0


@dataclass(frozen=True, kw_only=True)
class DraftInput:
    """What speculation adds to a step.

    Attributes:
        verify: int64 [B], drafts at the end of each row, to be accepted or not.
        sample_rows: int64 [n], logit rows of each of StepInput.samples: drafts + 1.
        settled: int64 [B], positions below it have final draft state.
        known_ids: int64 [K], the tokens known at positions settled + 1 and on, row after row;
            known_len: int64 [B], how many of each row.
        steps: drafts to make afterwards for each row that samples.
    """

    verify: NDArray
    sample_rows: NDArray
    settled: NDArray
    known_ids: NDArray
    known_len: NDArray
    steps: int


@dataclass(frozen=True, kw_only=True)
class RoundInput:
    """What makes a step a round (host/round.py): every row decodes and verifies the same number of
    drafts; those a row lacks are -1 on the device. q_start, token_ids and the positions of
    `samples` are those of rows that got one token in the round before; the device knows better.

    Attributes:
        start: int64 [B], position of the last known token; -1 = where the round before ended.
        recent: int64 [B, N], the tokens up to it, one for each depth; 0 where start is -1 or there
            are fewer.
        drafts: to verify of each row, and to be made.
    """

    start: NDArray
    recent: NDArray
    drafts: int


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """One forward.

    Attributes:
        slots, q_start, q_len: int64 [B], sequence slot, absolute first position, tokens.
        token_ids: int64 [T]; LAST_TOKEN only in rows of one token, DRAFT_TOKEN at the end of rows.
        tables: one for each page pool.
        ring_copies: int32 [c, 2], (source, target) slots whose rings are copied first.
        snapshots: int32 [B, 2], (slot, position): of each row the rings as they are at a position,
            to be kept in a snapshot slot, 0 = nowhere; None = of no row.
        logit_rows: int64 [n], tokens whose next token is sampled; may repeat. With `draft` one
            sample has several in a row.
        sample_slots: int64 [n], where the sampled token is kept for LAST_TOKEN; 0 = nowhere.
        samples: how to draw each of them; empty on a rank that is told the tokens. edited: whether
            the logits of any are edited before.
        logprobs: alternatives wanted with the sampled tokens of each row, [n], -1 = no log
            probability; empty = none at all.
        scores: prompt rows to score.
        draft: None without speculation. round: None = the rows are laid out afresh.
    """

    slots: NDArray
    q_start: NDArray
    q_len: NDArray
    token_ids: NDArray
    tables: tuple[TableChanges, ...]
    ring_copies: NDArray
    logit_rows: NDArray
    sample_slots: NDArray
    samples: tuple[SampleRow, ...] = ()
    edited: bool = False
    logprobs: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()
    draft: DraftInput | None = None
    snapshots: NDArray | None = None
    round: RoundInput | None = None

    @property
    def is_decode(self) -> bool:
        """Every row has one token, samples its next in order, and nothing else is asked."""
        rows = len(self.slots)
        return (
            len(self.token_ids) == rows
            and not self.scores
            and self.draft is None
            and len(self.logit_rows) == rows
            and bool((self.q_len == 1).all())
            and bool((self.logit_rows == np.arange(rows)).all())
        )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step found.

    Attributes:
        tokens: those of each sample, in order; without speculation one, and none where no token
            has a finite logit.
        logprobs: by row of StepInput.logit_rows, those that were asked for.
        scores: one for each of StepInput.scores: fp32 [rows, V] on the CPU, or log probabilities.
    """

    tokens: list[tuple[int, ...]]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    scores: list[Tensor | list[TokenLogprob]] = field(default_factory=list)


class StepOutput(Protocol):
    """A step that was started."""

    def wait(self) -> StepResult:
        """Block until the step has run. Called once."""
        ...


class Executor(Protocol):
    """Runs forwards of one model in the order they are given.

    Attributes:
        runs_ahead: whether starting a step before the previous one's tokens are known pays.
        counts_tokens: whether penalties are computed from token counts it keeps itself; if not, a
            penalised sequence cannot be run ahead.
        draft_steps: most drafts it makes for a row; 0 = no speculation.
    """

    runs_ahead: bool
    counts_tokens: bool
    draft_steps: int

    def takes_round(self, rows: int, drafts: int) -> bool:
        """Whether a decoding batch of so many rows, each with so many drafts and without logit
        edits, can be run as a round. Rounds run ahead, other steps of speculation do not."""
        ...

    def run(self, step: StepInput) -> StepOutput:
        """Start a step; the arrays are not read after this returns.

        Raises: RuntimeError and the other errors of a forward; nothing of the step counts then.
        """
        ...
