"""What a step computes: from sequences to a StepInput, and to a Flight, which says what will be
booked when it has run."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np

from inkling_rocm.engine.executor import (
    DRAFT_TOKEN,
    LAST_TOKEN,
    DraftInput,
    Executor,
    RoundInput,
    Score,
    StepInput,
    StepOutput,
)
from inkling_rocm.engine.prefix_cache import Capture
from inkling_rocm.engine.request import TokenLogprob
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Sequence
from inkling_rocm.engine.speculative.stats import SpeculationStats


@dataclass(kw_only=True)
class Flight:
    """A step that was started: what to do with its result.

    Attributes:
        drawn: sequences that get a token, in the order of the result. ended: those that were only
            to compute their prompt. forks: those whose siblings start.
        logit_rows: of each of `drawn`. drafts: to be made for each sequence that gets a token.
        decoding: the sequences of the batch that compute no prompt.
        verified: drafts a row of a round, also where it had fewer; None = not a round.
        scored: prompt rows asked for. host_needed: the next step cannot be scheduled before this
            one is booked. captures: boundaries for the prefix cache.
    """

    batch: Rows[tuple[Sequence, int]]
    drawn: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    forks: list[Sequence] = field(default_factory=list)
    scored: list[tuple[Sequence, Score]] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    drafts: int = 0
    verified: int | None = None
    decoding: frozenset[Sequence] = frozenset()
    host_needed: bool = False
    captures: list[Capture] = field(default_factory=list)
    output: StepOutput = field(init=False)


class StepPlanner:
    """Plans the steps of one engine."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, speculation: SpeculationStats | None
    ):
        self.executor = executor
        self.scheduler = scheduler
        self.speculation = speculation
        self._chosen: int | None = None  # drafts to make in the next step, if that was decided

    def round_batch(self, in_flight: int) -> list[tuple[Sequence, int]]:
        """The next round, pages allocated; empty where the next step cannot be one.

        Args: in_flight: drafts verified by a round that has not been booked.
        """
        self._chosen = None
        if self.speculation is None:
            return []
        rows = self.scheduler.round_rows()
        if not rows or any(sequence.edits.active for sequence in rows):
            return []
        self._chosen = drafts = self.speculation.choose(len(rows))
        if not self.executor.takes_round(len(rows), drafts):
            return []
        # Of a slot for which none were made (a continuation's first), those on the device are
        # somebody else's. Otherwise there may be more or fewer than are verified now.
        if drafts and not all(sequence.drafts for sequence in rows):
            return []
        if not self.scheduler.grow_round(rows, drafts, in_flight):
            return []
        return [(sequence, 1 + drafts) for sequence in rows]

    def plan(self, batch: Rows[tuple[Sequence, int]]) -> tuple[Flight, StepInput]:
        """What a step computes, and what will be booked when it has run."""
        flight = Flight(batch=batch)
        ids: list[int] = []
        rows: list[int] = []
        lengths: list[int] = []
        verify: list[int] = []
        snapshots = [self.scheduler.cache.plan(s, tokens) for s, tokens in batch]
        for sequence, tokens in batch:
            start, first = sequence.computed, len(ids)
            verify.append(tokens - 1 if sequence.remaining == 1 else 0)
            if sequence.remaining == 1:
                ids.append(LAST_TOKEN if sequence.pending else sequence.tokens[-1])
                ids += [DRAFT_TOKEN] * verify[-1]
            else:
                ids += sequence.tokens[start : start + tokens]
            if start < sequence.prompt_len:
                self._plan_score(flight, sequence, start, first, tokens)
            if sequence.remaining > tokens:
                continue
            group = [sequence, *sequence.siblings]
            flight.forks += [sequence] if sequence.siblings else []
            if sequence.request.wants_logits or not sequence.request.params.max_new_tokens:
                flight.ended += group
            else:
                flight.drawn += group
                rows += range(len(ids) - 1 - verify[-1], len(ids))
                rows += [len(ids) - 1] * len(sequence.siblings)
                lengths += [1 + verify[-1]] + [1] * len(sequence.siblings)
        flight.host_needed = bool(
            flight.forks
            or flight.ended
            or flight.scored
            or self.executor.draft_steps
            or any(map(self._needs_host, flight.drawn))
        )
        slots = np.array([s.slot for s, _ in batch], np.int64)
        wanted = [
            s.request.logprobs for s, n in zip(flight.drawn, lengths, strict=True) for _ in range(n)
        ]
        flight.logit_rows = lengths
        flight.decoding = frozenset(s for s, _ in batch if s.computed >= s.prompt_len)
        if self.speculation is not None:
            chosen = self._chosen
            if chosen is None:
                chosen = self.speculation.choose(len(flight.decoding) or len(batch))
            flight.drafts = chosen
        step = StepInput(
            slots=slots,
            q_start=np.array([s.computed for s, _ in batch], np.int64),
            q_len=np.array([tokens for _, tokens in batch], np.int64),
            token_ids=np.array(ids, np.int64),
            tables=tuple(pool.take_changes(slots) for pool in self.scheduler.pools),
            ring_copies=self.scheduler.rings.take_copies(),
            logit_rows=np.array(rows, np.int64),
            sample_slots=np.array([s.slot for s in flight.drawn], np.int64),
            samples=tuple(
                SampleRow(s.request.params, s.seed, s.length, s.edits) for s in flight.drawn
            ),
            edited=any(s.edits.active for s in flight.drawn),
            logprobs=_wanted(wanted),
            scores=tuple(score for _, score in flight.scored),
            draft=self._draft_input(batch, verify, lengths, flight.drafts)
            if self.executor.draft_steps
            else None,
            snapshots=np.array(snapshots, np.int32) if any(map(any, snapshots)) else None,
        )
        return flight, step

    def plan_round(self, batch: Rows[tuple[Sequence, int]]) -> tuple[Flight, StepInput]:
        """The same for a round."""
        rows, count = [sequence for sequence, _ in batch], len(batch)
        drafts, depths = batch[0][1] - 1, self.executor.draft_steps
        for sequence, tokens in batch:
            self.scheduler.cache.plan(sequence, tokens)
        start = np.full(count, -1, np.int64)
        recent = np.zeros((count, depths), np.int64)
        for i, sequence in enumerate(rows):
            if not sequence.pending:
                start[i] = len(sequence.tokens) - 1
                last = sequence.tokens[-depths:]
                recent[i, depths - len(last) :] = last
        slots = np.array([s.slot for s in rows], np.int64)
        wanted = [s.request.logprobs for s in rows for _ in range(1 + drafts)]
        step = StepInput(
            slots=slots,
            q_start=np.array([s.computed for s in rows], np.int64),
            q_len=np.full(count, 1 + drafts, np.int64),
            token_ids=np.array([LAST_TOKEN, *[DRAFT_TOKEN] * drafts] * count, np.int64),
            tables=tuple(pool.take_changes(slots) for pool in self.scheduler.pools),
            ring_copies=self.scheduler.rings.take_copies(),
            logit_rows=np.arange(count * (1 + drafts)),
            sample_slots=slots,
            samples=tuple(SampleRow(s.request.params, s.seed, s.length, s.edits) for s in rows),
            logprobs=_wanted(wanted),
            draft=DraftInput(
                verify=np.full(count, drafts, np.int64),
                sample_rows=np.full(count, 1 + drafts, np.int64),
                settled=np.array([s.settled for s in rows], np.int64),
                known_ids=np.zeros(0, np.int64),
                known_len=np.zeros(count, np.int64),
                steps=drafts,
            ),
            round=RoundInput(start=start, recent=recent, drafts=drafts),
        )
        flight = Flight(
            batch=batch,
            drawn=rows,
            logit_rows=[1 + drafts] * count,
            drafts=drafts,
            verified=drafts,
            decoding=frozenset(rows),
        )
        return flight, step

    def _draft_input(
        self,
        batch: Rows[tuple[Sequence, int]],
        verify: list[int],
        lengths: list[int],
        steps: int,
    ) -> DraftInput:
        """What the draft blocks need to know of a step's rows."""
        known: list[list[int]] = []
        for (sequence, tokens), drafts in zip(batch, verify, strict=True):
            # A draft block reads as far ahead as there are depths.
            end = sequence.computed + tokens - drafts + self.executor.draft_steps
            known.append(sequence.tokens[sequence.settled + 1 : end])
        return DraftInput(
            verify=np.array(verify, np.int64),
            sample_rows=np.array(lengths, np.int64),
            settled=np.array([s.settled for s, _ in batch], np.int64),
            known_ids=np.array([token for tokens in known for token in tokens], np.int64),
            known_len=np.array([len(tokens) for tokens in known], np.int64),
            steps=steps,
        )

    def _needs_host(self, sequence: Sequence) -> bool:
        """Whether the token after the next cannot be drawn before the host has seen the next: what
        its logits are edited with depends on it."""
        edits = sequence.edits
        return (
            edits.mask is not None
            or edits.holds_back_stop
            or (edits.counts is not None and not self.executor.counts_tokens)
        )

    def _plan_score(
        self, flight: Flight, sequence: Sequence, start: int, first: int, tokens: int
    ) -> None:
        """Ask for what a request wants to know about its prompt; rows that were scored before a
        preemption are skipped."""
        request = sequence.request
        end = start + tokens
        if request.wants_logits:
            have = sum(map(len, request.prompt_logits))
        elif request.prompt_logprobs and sequence.index == 0:
            request.scored = request.scored or [
                TokenLogprob(token_id=request.prompt_ids[0], logprob=None)
            ]
            have = len(request.scored) - 1
            end = min(end, sequence.prompt_len - 1)  # the last predicts no prompt id
        else:
            return
        begin = max(have, start)
        if begin >= end:
            return
        following = None
        if not request.wants_logits:
            following = tuple(request.prompt_ids[begin + 1 : end + 1])
        score = Score(
            first=first + begin - start,
            rows=end - begin,
            following=following,
            top=request.logprobs or 0,
        )
        flight.scored.append((sequence, score))


def _wanted(tops: Rows[int | None]) -> tuple[int, ...]:
    """StepInput.logprobs."""
    if all(top is None for top in tops):
        return ()
    return tuple(-1 if top is None else top for top in tops)
