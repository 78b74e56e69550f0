"""What a caller asks of the engine and what it hands back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
# Why a continuation ended in "error": what the request asks for excludes every token; the logits
# were not finite; the step it was part of failed; the engine is beyond use.
ErrorCode = Literal["no_token_possible", "logits_not_finite", "step_failed", "engine_failed"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Names are SGLang's.

    Attributes:
        max_new_tokens: most tokens to generate; min_new_tokens: stop ids are masked before this
            many.
        temperature: 0 = greedy. top_k: -1 = all. top_p, min_p: 1 and 0 = off.
        frequency_penalty, presence_penalty: subtracted per occurrence / once, over generated
            tokens.
        repetition_penalty: divides positive and multiplies negative logits of prompt and generated
            tokens; 1 = off.
        logit_bias: token id -> added to its logit, after penalties, before temperature.
        stop: texts that end the output (not included in it unless no_stop_trim); stop_token_ids:
            ids, beside the model's own. ignore_eos: the model's own stop ids do not end the output.
        n: continuations; they share the prompt's pages.
        seed: makes the sampled tokens a function of (seed, position, logits) alone, whatever else
            is in the batch; continuation i of n uses seed + i. None = drawn by the engine.
        skip_special_tokens: leave special tokens out of the text.
        json_schema, regex, json_object: constrain the output text; at most one of them (grammar
            included).
        grammar: a Lark grammar in llguidance's dialect over the output tokens, special ones written
            <[id]>; a model's stop ids are admitted wherever it accepts.
        constraint_start_ids: the constraint begins after one of these ids was generated; empty = at
            once.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    n: int = 1
    seed: int | None = None
    skip_special_tokens: bool = True
    json_schema: str | None = None
    regex: str | None = None
    json_object: bool = False
    grammar: str | None = None
    constraint_start_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log probability of one token under the raw softmax over the real vocabulary rows (before
    temperature and penalties), with the most likely alternatives."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """What speculation did for one continuation.

    Attributes:
        verify_ct: verifications. proposed, correct: drafts verified and accepted.
        histogram: verifications by how many drafts they accepted, from none to the most seen.
    """

    verify_ct: int = 0
    proposed: int = 0
    correct: int = 0
    histogram: tuple[int, ...] = ()

    def after(self, drafted: int, accepted: int) -> DraftCounts:
        """The counts with one more verification."""
        histogram = list(self.histogram) + [0] * (accepted + 1 - len(self.histogram))
        histogram[accepted] += 1
        return DraftCounts(
            verify_ct=self.verify_ct + 1,
            proposed=self.proposed + drafted,
            correct=self.correct + accepted,
            histogram=tuple(histogram),
        )


@dataclass(frozen=True, kw_only=True)
class Update:
    """What became new on one continuation since the last update.

    Attributes:
        index: which of the n continuations.
        token_ids: newly generated ids. text: newly final text (held back while it may begin a stop
            string or an incomplete UTF-8 character); empty when the engine has no tokenizer.
        logprobs: one a token id, when asked for.
        prompt_logprobs: in the first update, when asked for: one a prompt token (None for the
            first).
        finish_reason: None while running; matched_stop: the id or text that ended it. error,
            error_code: why it ended in "error", for people and for programs.
        prompt_tokens, completion_tokens, cached_tokens: counts so far.
        draft_counts: what speculation did so far; None before the first verification.
        created: time.perf_counter() when the engine made it.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_counts: DraftCounts | None = None
    created: float = field(default=0.0, compare=False)


class GenerationError(RuntimeError):
    """A request that the engine could not finish; `code` as in Update.error_code."""

    def __init__(self, message: str, *, code: ErrorCode | None):
        super().__init__(message)
        self.code = code


class RequestError(ValueError):
    """A request the engine refuses before running it. `code` is a stable machine-readable word such
    as "context_length_exceeded", "invalid_value", "queue_full"; `param` names the offending
    argument."""

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.code = code
        self.param = param
