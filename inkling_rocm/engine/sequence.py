"""One continuation of a request: its tokens, what is computed of them, its output so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from inkling_rocm.engine.constraint import Constraint
from inkling_rocm.engine.detokenizer import Detokenizer, StopStrings
from inkling_rocm.engine.handle import RequestHandle
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.request import (
    DraftCounts,
    ErrorCode,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    Update,
)
from inkling_rocm.engine.token_list import TokenList
from inkling_rocm.engine.tokenizer import Tokenizer


@dataclass(eq=False, kw_only=True)
class Request:
    """A submitted request.

    Attributes:
        order: arrival number; seed: of continuation 0; both are set when the request is queued.
        logprobs: alternatives a generated token, None = no log probabilities.
        prompt_logprobs: alternatives are `logprobs` too. stop_ids: every id that ends the output.
        stream: send updates as they come, not only when a continuation ends.
        constraint: fresh state of the grammar.
        wants_logits: keep the fp32 logits of the prompt in prompt_logits and generate nothing.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    handle: RequestHandle
    stop_ids: frozenset[int]
    order: int = 0
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    stream: bool = True
    constraint: Constraint | None = None
    wants_logits: bool = False
    submitted: float = field(default_factory=time.perf_counter)
    scored: list[TokenLogprob] = field(default_factory=list)
    prompt_logits: list[Tensor] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)


class Sequence:
    """One continuation.

    Attributes:
        tokens: prompt and generated ids. pending: tokens sampled by steps that have not been
            booked, at most 1 when a step is scheduled. computed: how many of both have K/V in the
            pools, or will once the steps that were started have run.
        slot: sequence slot while running, else 0.
        depths: draft blocks that run behind the model. drafts: tokens that were drafted for it.
        forked: its state is a copy of another continuation's and no step has run since.
        cached_tokens: tokens that were not computed because the prefix cache had them, when the
            sequence first began to run; None before.
        siblings: continuations that start from this one's prompt once it is computed.
        finished: why it ended, None while it has not. retired: its end was reported.
        draft_counts: what speculation did for it; None before its first verification.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None):
        params = request.params
        self.request = request
        self.index = index
        self.tokens = TokenList(request.prompt_ids)
        self.prompt_len = len(request.prompt_ids)
        self.pending = 0
        self.computed = 0
        self.slot = 0
        self.depths = 0
        self.drafts = 0
        self.forked = False
        self.cached_tokens: int | None = None
        self.siblings: list[Sequence] = []
        self.finished: FinishReason | None = None
        self.retired = False
        self.last_token_time = 0.0
        self.draft_counts: DraftCounts | None = None
        self.constraint = None if request.constraint is None else request.constraint.copy()
        self.edits = LogitEdits(
            params, request.prompt_ids, sorted(request.stop_ids), self.constraint
        )
        self._detokenizer = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        self._stop_strings = StopStrings(params.stop, keep_match=params.no_stop_trim)
        self._matched: int | str | None = None
        self._error: tuple[str, ErrorCode] | None = None
        self._reported = False
        self._new_ids: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[TokenLogprob] = []

    @property
    def order(self) -> tuple[int, int]:
        """Sorts sequences by arrival."""
        return (self.request.order, self.index)

    @property
    def seed(self) -> int:
        return self.request.seed + self.index

    @property
    def length(self) -> int:
        """Tokens, pending ones included."""
        return self.prompt_len + len(self.tokens.own) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def settled(self) -> int:
        """Positions below this have final state in every layer. Depth m of the draft blocks reads
        at position p the token at p + m + 1, so it is final once that token is known. After a fork
        what was computed has read the last token of the other continuation."""
        known = self.prompt_len + self.generated - self.forked
        return max(min(self.computed, known - self.depths), 0)

    @property
    def most_drafts(self) -> int:
        """Drafts worth verifying: no more than may still be generated beside a sampled token, and
        none where a grammar must see each token before the next can be drawn."""
        if self.constraint is not None:
            return 0
        left = self.request.params.max_new_tokens - (self.length - self.prompt_len)
        return max(min(self.drafts, left - 1), 0)

    @property
    def complete(self) -> bool:
        """Whether a pending token is the last, whatever it turns out to be."""
        return self.length - self.prompt_len >= self.request.params.max_new_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens.own)

    def add(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token and find out whether it is the last."""
        params = self.request.params
        self.tokens.append(token)
        self._new_ids.append(token)
        if logprob is not None:
            self._new_logprobs.append(logprob)
        self.edits.add(token)
        if token in self.request.stop_ids:
            self._add_text(token if params.no_stop_trim else None)
            if self.finished is None:
                self.finish("stop", matched=token)
            return
        self._add_text(token)
        if self.finished is not None:
            return
        if self.constraint is not None and (fault := self.constraint.add(token)):
            self.finish("error", error=(fault, "no_token_possible"))
        elif self.generated >= params.max_new_tokens:
            self.finish("length")

    def finish(
        self,
        reason: FinishReason,
        *,
        matched: int | str | None = None,
        error: tuple[str, ErrorCode] | None = None,
    ) -> None:
        """End the continuation; text that was held back becomes final unless a stop string
        matched. Args: error: message and code of the reason "error"."""
        self.finished, self._matched, self._error = reason, matched, error
        if self._detokenizer is not None and not isinstance(matched, str):
            text, stop = self._stop_strings.add(self._detokenizer.finish())
            self._new_text.append(text)
            if stop is None:
                self._new_text.append(self._stop_strings.finish())

    def _add_text(self, token: int | None) -> None:
        if self._detokenizer is None or token is None:
            return
        text = self._detokenizer.add(token)
        if self.generated < self.request.params.min_new_tokens:
            self._new_text.append(text)
            return
        text, stop = self._stop_strings.add(text)
        if text:
            self._new_text.append(text)
        if stop is not None:
            self.finish("stop", matched=stop)

    def take_update(self) -> Update:
        """What is new since the last call."""
        message, code = self._error or (None, None)
        update = Update(
            index=self.index,
            token_ids=tuple(self._new_ids),
            text="".join(self._new_text),
            logprobs=tuple(self._new_logprobs),
            prompt_logprobs=() if self._reported else tuple(self.request.scored),
            finish_reason=self.finished,
            matched_stop=self._matched,
            error=message,
            error_code=code,
            prompt_tokens=self.prompt_len,
            completion_tokens=self.generated,
            draft_counts=self.draft_counts,
            cached_tokens=self.cached_tokens or 0,
            created=time.perf_counter(),
        )
        self._reported = True
        self._new_ids, self._new_text, self._new_logprobs = [], [], []
        return update
