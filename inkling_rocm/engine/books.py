"""Books what a step has found (tokens, drafts, boundaries, ends) and tells it to the handles."""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import Tensor

from inkling_rocm.engine.executor import StepResult
from inkling_rocm.engine.metrics import EngineMetrics
from inkling_rocm.engine.request import DraftCounts, ErrorCode, FinishReason, Update
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Request, Sequence
from inkling_rocm.engine.speculative.stats import SpeculationStats
from inkling_rocm.engine.step_plan import Flight


class Books:
    """The open requests of an engine, and what they have got.

    Attributes:
        requests: by rid, those that have not ended.
        generated_tokens, finished: tokens and continuations since the start.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        speculation: SpeculationStats | None,
    ):
        self.requests: dict[str, Request] = {}
        self.generated_tokens = self.finished = 0
        self._scheduler = scheduler
        self._metrics = metrics
        self._speculation = speculation
        self._booked: float | None = None  # when the step before was, if one ran just before
        self._outbox: dict[str, tuple[Request, list[Update]]] = {}

    def pause(self) -> None:
        """No step runs now: the next one cannot be timed."""
        self._booked = None

    def book(self, flight: Flight, result: StepResult) -> None:
        """Take over what a step has found."""
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
        self._scheduler.cache.publish(flight.captures)
        for sequence in flight.drawn:
            # Drafts are made for sequences that have a slot, not for continuations that start.
            sequence.drafts = flight.drafts if sequence.slot else 0
        for sequence in flight.forks:
            if sequence.slot:
                self._scheduler.fork(sequence)
        for sequence in (*flight.drawn, *flight.ended):
            if sequence.finished:
                self.retire(sequence)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        error: tuple[str, ErrorCode] | None = None,
    ) -> None:
        """End every continuation of a request. Args: error: message and code of "error"."""
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish(reason, error=error)
            self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Free a finished sequence and report its end, once."""
        request = sequence.request
        self._scheduler.release(sequence)
        if sequence.retired:
            return
        assert sequence.finished is not None
        sequence.retired = True
        self._report(sequence)
        self.finished += 1
        self._metrics.finished(
            sequence.finished,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=sequence.generated,
            seconds=time.perf_counter() - request.submitted,
        )
        if all(s.retired for s in request.sequences):
            self.requests.pop(request.rid, None)

    def fail_all(self, message: str, arrived: Iterable[Request] = ()) -> None:
        """Report an error to every request, and to those that have `arrived` without being added,
        when the engine is beyond use: nothing is freed, what is booked may be what is broken."""
        for request in (*self.requests.values(), *arrived):
            for sequence in request.sequences:
                if not sequence.retired:
                    sequence.retired = True
                    sequence.finish("error", error=(message, "engine_failed"))
                    self._report(sequence)
        self.requests.clear()
        self.flush()

    def flush(self) -> None:
        """Hand the step's updates to their handles."""
        for request, updates in self._outbox.values():
            request.handle.push(updates)
        self._outbox.clear()

    def _book_drafts(self, flight: Flight, result: StepResult) -> None:
        """Count what was drafted and accepted, and time the round if it was nothing but one."""
        if self._speculation is None:
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
        self._speculation.book(
            drafted, accepted, seconds, steps=flight.verified, made=flight.drafts
        )

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
                self.generated_tokens += 1
                if sequence.finished:
                    break
            if sequence.last_token_time == 0.0:
                self._metrics.first_token(now - sequence.request.submitted)
            else:
                for _ in tokens:
                    self._metrics.inter_token((now - sequence.last_token_time) / len(tokens))
            sequence.last_token_time = now
            if sequence.request.stream and not sequence.finished:
                self._report(sequence)

    def _report(self, sequence: Sequence) -> None:
        request = sequence.request
        _, updates = self._outbox.setdefault(request.rid, (request, []))
        updates.append(sequence.take_update())


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
