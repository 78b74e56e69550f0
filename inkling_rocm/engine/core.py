"""One step of the engine: schedule, forward, sample, report. Runs in one thread; the Engine's.

A step that raises ends the requests of its batch with an error and frees what they held; the others
go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.logprobs import token_logprobs
from inkling_rocm.engine.metrics import EngineMetrics, EngineStats
from inkling_rocm.engine.request import FinishReason, TokenLogprob, Update
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.engine.scheduler import Scheduler
from inkling_rocm.engine.sequence import Request, Sequence
from inkling_rocm.model import InklingModel

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
# Prompt logits held at a time: bounds the memory of prompt log probabilities.
SCORED_LOGITS = 1 << 24


class EngineCore:
    """The engine without its thread.

    Args:
        vocabulary: the model's real rows.
    """

    def __init__(
        self,
        model: InklingModel,
        host: EmbeddedHost,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        *,
        vocabulary: int,
    ):
        self.model = model
        self.host = host
        self.scheduler = scheduler
        self.metrics = metrics
        self.requests: dict[str, Request] = {}
        self._vocabulary = vocabulary
        self._outbox: dict[str, tuple[Request, list[Update]]] = {}
        self._prompt_tokens = self._generated_tokens = self._finished = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

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
        """Run one forward of whatever is scheduled."""
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        assert batch or self.idle, "sequences wait but none can run"
        try:
            with torch.inference_mode():
                self._run(batch)
        except STEP_ERRORS as error:
            logger.exception("a step with %d sequences failed", len(batch))
            for sequence, _ in batch:
                message = f"{type(error).__name__}: {error}"
                self._end_request(sequence.request, "error", error=message)
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
        )

    def _run(self, batch: Rows[tuple[Sequence, int]]) -> None:
        if not batch:
            return
        ids: list[int] = []
        for sequence, tokens in batch:
            if sequence.remaining == 1:
                ids.append(sequence.tokens[-1])
            else:
                ids += sequence.tokens[sequence.computed : sequence.computed + tokens]
        q_len = np.array([tokens for _, tokens in batch], np.int64)
        self.host.prepare(
            np.array([s.slot for s, _ in batch], np.int64),
            np.array([s.computed for s, _ in batch], np.int64),
            q_len,
        )
        input_ids = self.host.input_ids(np.array(ids, np.int64))
        hidden_TH = self.model.forward(input_ids, self.host)
        ready, last_rows = [], []
        for (sequence, tokens), end in zip(batch, np.cumsum(q_len).tolist(), strict=True):
            start = sequence.computed
            sequence.computed += tokens
            if start < sequence.prompt_len:
                self._prompt_tokens += min(sequence.computed, sequence.prompt_len) - start
                self._score_prompt(sequence, start, hidden_TH[end - tokens : end])
            if sequence.remaining == 0:
                ready.append(sequence)
                last_rows.append(end - 1)
        if ready:
            self._advance(ready, last_rows, hidden_TH)

    def _advance(self, ready: Rows[Sequence], last_rows: list[int], hidden_TH: Tensor) -> None:
        """Sample the next token of every sequence whose tokens are all computed."""
        drawn: list[Sequence] = []
        ended: list[Sequence] = []
        rows: list[int] = []
        for sequence, row in zip(ready, last_rows, strict=True):
            group = [sequence, *sequence.siblings]
            if sequence.request.wants_logits or not sequence.request.params.max_new_tokens:
                for member in group:
                    member.finish("length")
                    ended.append(member)
                continue
            drawn += group
            rows += [row] * len(group)
        if drawn:
            if rows != list(range(len(hidden_TH))):
                hidden_TH = hidden_TH[torch.tensor(rows, device=hidden_TH.device)]
            logits_nV = self.model.logits(hidden_TH, self.host)
            self._sample(drawn, logits_nV)
        for sequence in ready:
            if sequence.siblings:
                self.scheduler.fork(sequence)
        for sequence in (*drawn, *ended):
            if sequence.finished:
                self._retire(sequence)

    def _sample(self, sequences: Rows[Sequence], logits_nV: Tensor) -> None:
        rows = [SampleRow(s.request.params, s.seed, len(s.tokens), s.edits) for s in sequences]
        scored = [i for i, s in enumerate(sequences) if s.request.logprobs is not None]
        tokens = sample(logits_nV, rows, keep_logits=bool(scored))
        logprobs: dict[int, TokenLogprob] = {}
        if scored:
            raw = logits_nV if len(scored) == len(rows) else logits_nV[scored]
            tops = [sequences[i].request.logprobs or 0 for i in scored]
            # A row without a token gets token 0's; it is not used.
            found = token_logprobs(raw, [tokens[i] or 0 for i in scored], tops)
            logprobs = dict(zip(scored, found, strict=True))
        now = time.perf_counter()
        for i, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if token is None:
                constraint = sequence.constraint
                fault = None if constraint is None else constraint.fault
                message = fault or (
                    "the logits are not finite, or logit_bias, min_new_tokens and the constraint "
                    "exclude each other"
                )
                sequence.finish("error", error=f"no token can follow: {message}")
                continue
            sequence.add(token, logprobs.get(i))
            self._generated_tokens += 1
            if sequence.generated == 1:
                self.metrics.first_token(now - sequence.request.submitted)
            else:
                self.metrics.inter_token(now - sequence.last_token_time)
            sequence.last_token_time = now
            if sequence.request.stream and not sequence.finished:
                self._outbox_of(sequence)

    def _score_prompt(self, sequence: Sequence, start: int, hidden_nH: Tensor) -> None:
        """Keep what a request wants to know about its prompt; rows that were scored before a
        preemption are skipped."""
        request = sequence.request
        if request.wants_logits:
            have = sum(map(len, request.prompt_logits))
        elif request.prompt_logprobs and sequence.index == 0:
            have = max(len(request.scored) - 1, 0)
            request.scored = request.scored or [
                TokenLogprob(token_id=request.prompt_ids[0], logprob=None)
            ]
            hidden_nH = hidden_nH[
                : sequence.prompt_len - 1 - start
            ]  # the last predicts no prompt id
        else:
            return
        for rows in hidden_nH[max(have - start, 0) :].split(SCORED_LOGITS // self._vocabulary + 1):
            if len(rows) == 0:
                continue
            logits_nV = self.model.logits(rows, self.host)
            if request.wants_logits:
                request.prompt_logits.append(logits_nV.cpu())
                continue
            at = len(request.scored)
            following = request.prompt_ids[at : at + len(rows)]
            top = [request.logprobs or 0] * len(rows)
            request.scored += token_logprobs(logits_nV, following, top)

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
