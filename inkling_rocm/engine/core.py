"""One step of the engine: schedule, forward, sample, report (step_plan.py plans it, books.py books
what it found). Runs in one thread; the Engine's.

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

from inkling_rocm.engine.books import Books
from inkling_rocm.engine.executor import Executor
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats
from inkling_rocm.engine.request import FinishReason
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
        self._flight: Flight | None = None
        self._planner = StepPlanner(executor, scheduler, speculation)
        self._books = Books(scheduler, metrics, speculation)
        self.requests = self._books.requests
        self._prompt_tokens = 0

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
            self._books.end(request, reason)
        for sequence in request.sequences:
            if sequence.index == index:
                if not sequence.finished:
                    sequence.finish(reason)
                if not sequence.siblings:  # else it still computes the prompt they start from
                    self._books.retire(sequence)
        self._books.flush()

    def abort_all(self) -> None:
        """End every request."""
        for request in list(self.requests.values()):
            self._books.end(request, "abort")
        self._books.flush()

    def fail_all(self, message: str, arrived: Iterable[Request] = ()) -> None:
        """Report an error to every request, and to those that have `arrived` without being added,
        when the engine is beyond use."""
        self._books.fail_all(message, arrived)

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
            self._books.pause()
        assert batch or self.idle or self._flight, "sequences wait but none can run"
        flight, error = self._start(batch, as_round)
        self._land()
        self._flight = flight
        if error is not None:
            self._fail(batch, error)
        if flight is not None and (flight.host_needed or not self.executor.runs_ahead):
            self._land()
        self._books.flush()
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
            generated_tokens=self._books.generated_tokens,
            preemptions=scheduler.preemptions,
            requests_finished=self._books.finished,
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
            self._books.book(flight, flight.output.wait())
        except STEP_ERRORS as error:
            self._fail(flight.batch, error)

    def _fail(self, batch: Rows[tuple[Sequence, int]], error: BaseException) -> None:
        logger.error("a step with %d sequences failed", len(batch), exc_info=error)
        message = f"{type(error).__name__}: {error}"
        for sequence, _ in batch:
            self._books.end(sequence.request, "error", error=(message, "step_failed"))
