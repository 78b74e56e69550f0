"""One step of the engine: schedule, forward, sample, report. Runs in one thread; the Engine's.

With an executor that runs ahead, a step is scheduled and started before the tokens of the previous
one are read back: a decoding row then takes its input from the device. What follows from that:

- A sequence that turns out to have ended has had one more token computed. It is dropped, and the
  pages and slot are free at once: whoever gets them writes to them in a later step.
- A sequence that must end with the pending token (max_new_tokens) is not scheduled again.
- With speculation only rounds run ahead (RoundInput): how many tokens the round before has found,
  and which, is on the device. Its pages were allocated for the most that may have been accepted.
  Any other step waits until the round in flight is booked, and is booked before the next one.
- A step is booked before the next one is scheduled (it is synchronous) when the host must see its
  tokens first: a grammar, a stop id held back by min_new_tokens, penalties where the executor does
  not count tokens, continuations to fork, prompt scores.

A step that raises ends the requests of its batch with an error and frees what they held; the others
go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from inkling_rocm.engine.executor import (
    DRAFT_TOKEN,
    LAST_TOKEN,
    DraftInput,
    Executor,
    RoundInput,
    Score,
    StepInput,
    StepOutput,
    StepResult,
)
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats
from inkling_rocm.engine.prefix_cache import Capture
from inkling_rocm.engine.request import DraftCounts, FinishReason, TokenLogprob, Update
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Request, Sequence
from inkling_rocm.engine.speculative.stats import SpeculationStats

logger = logging.getLogger(__name__)

# What a forward can raise: torch's errors (out of memory too) are RuntimeErrors, the rest are
# mistakes of ours. Anything else (KeyboardInterrupt, SystemExit) ends the engine.
STEP_ERRORS = (
    RuntimeError,
    MemoryError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
)


@dataclass(kw_only=True)
class _Flight:
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


class EngineCore:
    """The engine without its thread."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        speculation: SpeculationStats | None = None,
    ):
        self.executor = executor
        self.scheduler = scheduler
        self.metrics = metrics
        self.speculation = speculation
        self._booked: float | None = None  # when the step before was, if one ran just before
        self.requests: dict[str, Request] = {}
        self._flight: _Flight | None = None
        self._chosen: int | None = None  # drafts to make in the next step, if that was decided
        self._outbox: dict[str, tuple[Request, list[Update]]] = {}
        self._prompt_tokens = self._generated_tokens = self._finished = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._flight is None

    def add(self, request: Request) -> None:
        """Take a request in."""
        self.requests[request.rid] = request
        self.scheduler.add(request)

    def abort(self, rid: str) -> None:
        """End a request; unknown and ended ones are none of our business."""
        if rid in self.requests:
            self._end_request(self.requests[rid], "abort")
            self._flush()

    def abort_all(self) -> None:
        """End every request."""
        for request in list(self.requests.values()):
            self._end_request(request, "abort")
        self._flush()

    def fail_all(self, message: str) -> None:
        """Report an error to every request when the engine is beyond use: nothing is freed, because
        its books may be what is broken."""
        for request in self.requests.values():
            for sequence in request.sequences:
                if not sequence.retired:
                    sequence.retired = True
                    sequence.finish("error", error=message)
                    self._outbox_of(sequence)
        self.requests.clear()
        self._flush()

    def step(self) -> None:
        """Start one forward of whatever is scheduled, and book the one before it; or, where running
        ahead does not pay or the host must see the tokens first, book the new one too."""
        started = time.perf_counter()
        batch = self._round_batch()
        as_round = bool(batch)
        if not as_round:
            if self._flight is not None and self.executor.draft_steps:
                self._land()
            batch = self.scheduler.schedule()
        if not batch:
            self._booked = None
        assert batch or self.idle or self._flight, "sequences wait but none can run"
        flight, error = self._start(batch, as_round)
        self._land()
        self._flight = flight
        if error is not None:
            self._fail(batch, error)
        if flight is not None and (flight.host_needed or not self.executor.runs_ahead):
            self._land()
        self._flush()
        tokens = sum(tokens for _, tokens in batch)
        self.metrics.step(self.stats(), tokens=tokens, seconds=time.perf_counter() - started)

    def stats(self) -> EngineStats:
        """Counts as they are now; may be called from any thread."""
        scheduler = self.scheduler
        return EngineStats(
            queued=len(scheduler.waiting) + len(scheduler.preempted),
            running=len(scheduler.running),
            pages_used={pool.name: pool.used for pool in scheduler.pools},
            pages_total={pool.name: pool.total for pool in scheduler.pools},
            conv_slots_used=scheduler.rings.used,
            conv_slots_total=scheduler.rings.total,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=scheduler.preemptions,
            requests_finished=self._finished,
            speculation=None if self.speculation is None else self.speculation.snapshot(),
            prefix_cache=scheduler.cache.stats(),
        )

    def _round_batch(self) -> list[tuple[Sequence, int]]:
        """The next round, pages allocated; empty where the next step cannot be one."""
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
        in_flight = 0 if self._flight is None else self._flight.drafts
        if not self.scheduler.grow_round(rows, drafts, in_flight):
            return []
        return [(sequence, 1 + drafts) for sequence in rows]

    def _start(
        self, batch: Rows[tuple[Sequence, int]], as_round: bool
    ) -> tuple[_Flight | None, BaseException | None]:
        """Hand a batch to the executor. Returns: the flight, or why there is none."""
        if not batch:
            return None, None
        try:
            flight, step = self._plan_round(batch) if as_round else self._plan(batch)
            flight.output = self.executor.run(step)
        except STEP_ERRORS as error:
            self.scheduler.start_failed([sequence for sequence, _ in batch])
            return None, error
        flight.captures = self.scheduler.cache.started()
        for sequence, tokens in batch:
            start = sequence.computed
            sequence.forked = False
            # Of drafts it is not known yet how many count.
            sequence.computed += tokens if sequence.remaining > 1 else 1
            if start < sequence.prompt_len:
                self._prompt_tokens += min(sequence.computed, sequence.prompt_len) - start
        for sequence in flight.drawn:
            sequence.pending += 1
        return flight, None

    def _plan(self, batch: Rows[tuple[Sequence, int]]) -> tuple[_Flight, StepInput]:
        """What a step computes, and what will be booked when it has run."""
        flight = _Flight(batch=batch)
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
        flight.decoding = frozenset(s for s, _ in batch if s.remaining == 1)
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
            logprobs=_wanted(wanted),
            scores=tuple(score for _, score in flight.scored),
            draft=self._draft_input(batch, verify, lengths, flight.drafts)
            if self.executor.draft_steps
            else None,
            snapshots=np.array(snapshots, np.int32) if any(map(any, snapshots)) else None,
        )
        return flight, step

    def _plan_round(self, batch: Rows[tuple[Sequence, int]]) -> tuple[_Flight, StepInput]:
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
        flight = _Flight(
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
        self, flight: _Flight, sequence: Sequence, start: int, first: int, tokens: int
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

    def _land(self) -> None:
        """Wait for the step in flight, if there is one, and book what it found."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            self._book(flight, flight.output.wait())
        except STEP_ERRORS as error:
            self._fail(flight.batch, error)

    def _fail(self, batch: Rows[tuple[Sequence, int]], error: BaseException) -> None:
        logger.error("a step with %d sequences failed", len(batch), exc_info=error)
        for sequence, _ in batch:
            message = f"{type(error).__name__}: {error}"
            self._end_request(sequence.request, "error", error=message)

    def _book(self, flight: _Flight, result: StepResult) -> None:
        for (sequence, _), found in zip(flight.scored, result.scores, strict=True):
            request = sequence.request
            if isinstance(found, Tensor):
                request.prompt_logits.append(found)
            else:
                request.scored += found
        for sequence in flight.ended:
            if sequence.finished is None:
                sequence.finish("length")
        self._book_drafts(flight, result)
        self._add_tokens(flight, result)
        self.scheduler.cache.publish(flight.captures)
        for sequence in flight.drawn:
            # Drafts are made for sequences that have a slot, not for continuations that start.
            sequence.drafts = flight.drafts if sequence.slot else 0
        for sequence in flight.forks:
            if sequence.slot:
                self.scheduler.fork(sequence)
        for sequence in (*flight.drawn, *flight.ended):
            if sequence.finished:
                self._retire(sequence)

    def _book_drafts(self, flight: _Flight, result: StepResult) -> None:
        """Count what was drafted and accepted, and time the round if it was nothing but one."""
        if self.speculation is None:
            return
        now, before = time.perf_counter(), self._booked
        self._booked = now
        drafted: list[int] = []
        accepted: list[int] = []
        for sequence, tokens, rows in zip(
            flight.drawn, result.tokens, flight.logit_rows, strict=True
        ):
            if sequence in flight.decoding and tokens and not sequence.finished:
                drafted.append(min(rows - 1, sequence.drafts))
                accepted.append(len(tokens) - 1)
                counts = sequence.draft_counts or DraftCounts()
                sequence.draft_counts = counts.after(drafted[-1], accepted[-1])
        alone = before is not None and len(flight.decoding) == len(flight.batch)
        seconds = now - before if alone and before is not None else None
        self.speculation.book(drafted, accepted, seconds, steps=flight.verified, made=flight.drafts)

    def _add_tokens(self, flight: _Flight, result: StepResult) -> None:
        now = time.perf_counter()
        row = 0  # of the result's log probabilities
        for sequence, tokens, rows in zip(
            flight.drawn, result.tokens, flight.logit_rows, strict=True
        ):
            sequence.pending -= 1
            first, row = row, row + rows
            if sequence.finished:  # it had ended before this step, or was aborted meanwhile
                continue
            if not tokens:
                constraint = sequence.constraint
                fault = None if constraint is None else constraint.fault
                message = fault or (
                    "the logits are not finite, or logit_bias, min_new_tokens and the constraint "
                    "exclude each other"
                )
                sequence.finish("error", error=f"no token can follow: {message}")
                continue
            sequence.computed += len(tokens) - 1
            for i, token in enumerate(tokens):
                sequence.add(token, result.logprobs.get(first + i))
                self._generated_tokens += 1
                if sequence.finished:
                    break
            if sequence.last_token_time == 0.0:
                self.metrics.first_token(now - sequence.request.submitted)
            else:
                for _ in tokens:
                    self.metrics.inter_token((now - sequence.last_token_time) / len(tokens))
            sequence.last_token_time = now
            if sequence.request.stream and not sequence.finished:
                self._outbox_of(sequence)

    def _end_request(
        self, request: Request, reason: FinishReason, *, error: str | None = None
    ) -> None:
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish(reason, error=error)
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Free a finished sequence and report its end, once."""
        request = sequence.request
        self.scheduler.release(sequence)
        if sequence.retired:
            return
        assert sequence.finished is not None
        sequence.retired = True
        self._outbox_of(sequence)
        self._finished += 1
        self.metrics.finished(
            sequence.finished,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=sequence.generated,
            seconds=time.perf_counter() - request.submitted,
        )
        if all(s.retired for s in request.sequences):
            self.requests.pop(request.rid, None)

    def _outbox_of(self, sequence: Sequence) -> None:
        request = sequence.request
        _, updates = self._outbox.setdefault(request.rid, (request, []))
        updates.append(sequence.take_update())

    def _flush(self) -> None:
        """Hand the step's updates to their handles."""
        for request, updates in self._outbox.values():
            request.handle.push(updates)
        self._outbox.clear()


def _wanted(tops: Rows[int | None]) -> tuple[int, ...]:
    """StepInput.logprobs."""
    if all(top is None for top in tops):
        return ()
    return tuple(-1 if top is None else top for top in tops)
