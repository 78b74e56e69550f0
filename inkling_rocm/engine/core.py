"""One step of the engine: schedule, forward, sample, report (step_plan.py plans it). Runs in one
thread; the Engine's.

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
from collections.abc import Iterable
from collections.abc import Sequence as Rows

from torch import Tensor

from inkling_rocm.engine.executor import (
    Executor,
    StepResult,
)
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats
from inkling_rocm.engine.request import DraftCounts, ErrorCode, FinishReason, Update
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Request, Sequence
from inkling_rocm.engine.speculative.stats import SpeculationStats
from inkling_rocm.engine.step_plan import Flight, StepPlanner

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
        self._flight: Flight | None = None
        self._planner = StepPlanner(executor, scheduler, speculation)
        self._outbox: dict[str, tuple[Request, list[Update]]] = {}
        self._prompt_tokens = self._generated_tokens = self._finished = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._flight is None

    def add(self, request: Request) -> None:
        """Take a request in."""
        self.requests[request.rid] = request
        self.scheduler.add(request)

    def abort(self, rid: str, index: int | None = None, reason: FinishReason = "abort") -> None:
        """End a request, or one continuation of it; unknown and ended ones are none of our
        business."""
        if rid not in self.requests:
            return
        request = self.requests[rid]
        if index is None:
            self._end_request(request, reason)
        for sequence in request.sequences:
            if sequence.index == index:
                if not sequence.finished:
                    sequence.finish(reason)
                if not sequence.siblings:  # else it still computes the prompt they start from
                    self._retire(sequence)
        self._flush()

    def abort_all(self) -> None:
        """End every request."""
        for request in list(self.requests.values()):
            self._end_request(request, "abort")
        self._flush()

    def fail_all(self, message: str, arrived: Iterable[Request] = ()) -> None:
        """Report an error to every request, and to those that have `arrived` without being added,
        when the engine is beyond use: nothing is freed, its books may be what is broken."""
        for request in (*self.requests.values(), *arrived):
            for sequence in request.sequences:
                if not sequence.retired:
                    sequence.retired = True
                    sequence.finish("error", error=(message, "engine_failed"))
                    self._outbox_of(sequence)
        self.requests.clear()
        self._flush()

    def step(self) -> None:
        """Start one forward of whatever is scheduled, and book the one before it; or, where running
        ahead does not pay or the host must see the tokens first, book the new one too."""
        started = time.perf_counter()
        in_flight = 0 if self._flight is None else self._flight.drafts
        batch = self._planner.round_batch(in_flight)
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

    def _start(
        self, batch: Rows[tuple[Sequence, int]], as_round: bool
    ) -> tuple[Flight | None, BaseException | None]:
        """Hand a batch to the executor. Returns: the flight, or why there is none."""
        if not batch:
            return None, None
        plan = self._planner.plan_round if as_round else self._planner.plan
        try:
            flight, step = plan(batch)
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
        message = f"{type(error).__name__}: {error}"
        for sequence, _ in batch:
            self._end_request(sequence.request, "error", error=(message, "step_failed"))

    def _book(self, flight: Flight, result: StepResult) -> None:
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

    def _book_drafts(self, flight: Flight, result: StepResult) -> None:
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

    def _add_tokens(self, flight: Flight, result: StepResult) -> None:
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
                sequence.finish("error", error=_why_no_token(sequence))
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
        self,
        request: Request,
        reason: FinishReason,
        *,
        error: tuple[str, ErrorCode] | None = None,
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


def _why_no_token(sequence: Sequence) -> tuple[str, ErrorCode]:
    """Why nothing could be drawn for a sequence: its own request, if that can have been it."""
    if not sequence.edits.excludes:
        return "no token can follow: the logits are not finite", "logits_not_finite"
    constraint = sequence.constraint
    fault = None if constraint is None else constraint.fault
    reason = fault or (
        "logit_bias, penalties, min_new_tokens and the constraint exclude each other"
    )
    return f"no token can follow: {reason}", "no_token_possible"
