"""What the engine reports to an observer, and a snapshot of its state.

The engine knows no metrics library: it calls an `EngineMetrics`, by default one that ignores
everything. Calls come from the engine's thread and must return quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from inkling_rocm.engine.prefix_cache.stats import CacheStats
from inkling_rocm.engine.request import FinishReason


@dataclass(frozen=True, kw_only=True)
class SpeculationSnapshot:
    """What speculation has done since the start; a row's part of a verification counts as one.

    Attributes:
        num_steps: draft steps of the last round, as chosen: rows near their end have fewer drafts.
        rounds: verification forwards. verifications: rows in them.
        drafted, accepted: drafts by depth, from depth 0 on. A draft counts as drafted at its depth
            whether or not the drafts before it were accepted.
        lengths: verifications by how many drafts they accepted, from none on.
        accept_length: tokens a verification gave lately, the sampled one included; accept_rate:
            share of drafts accepted lately. 0 before the first round.
        seconds: of the rounds that were timed. timed_rounds: how many were.
    """

    num_steps: int
    rounds: int
    verifications: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    lengths: tuple[int, ...]
    accept_length: float
    accept_rate: float
    seconds: float
    timed_rounds: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """State of the engine between two steps.

    Attributes:
        queued: requests that wait for their first step, and preempted continuations; running:
            continuations in the batch.
        pages_used, pages_total: usable pages (the sink excluded) of each pool, "global" and
            "window"; a model without one kind of layer has no such key.
        conv_slots_used, conv_slots_total: ring slots, the sink excluded.
        prompt_tokens, generated_tokens: computed prompt tokens (recomputed ones too) and sampled
            tokens since the start.
        preemptions, requests_finished: since the start.
        speculation: None without it. prefix_cache: None when it is off.
    """

    queued: int
    running: int
    pages_used: dict[str, int]
    pages_total: dict[str, int]
    conv_slots_used: int
    conv_slots_total: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    requests_finished: int
    speculation: SpeculationSnapshot | None = None
    prefix_cache: CacheStats | None = None


class EngineMetrics(Protocol):
    """Receives observations from the engine's thread."""

    def step(self, stats: EngineStats, *, tokens: int, seconds: float) -> None:
        """A forward of `tokens` tokens ended; also called with 0 tokens when the engine becomes
        idle."""
        ...

    def first_token(self, seconds: float) -> None:
        """Submit to first token of one continuation."""
        ...

    def inter_token(self, seconds: float) -> None:
        """Between two tokens of one continuation."""
        ...

    def speculation_round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        steps: int,
        seconds: float | None,
    ) -> None:
        """Drafts of a round were verified: how many each row had and how many were accepted.
        `seconds` is None where the round was not timed."""
        ...

    def finished(
        self, reason: FinishReason, *, prompt_tokens: int, completion_tokens: int, seconds: float
    ) -> None:
        """One continuation ended, `seconds` after it was submitted."""
        ...


class NoMetrics:
    """Ignores every observation."""

    def step(self, stats: EngineStats, *, tokens: int, seconds: float) -> None:
        pass

    def first_token(self, seconds: float) -> None:
        pass

    def inter_token(self, seconds: float) -> None:
        pass

    def speculation_round(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        steps: int,
        seconds: float | None,
    ) -> None:
        pass

    def finished(
        self, reason: FinishReason, *, prompt_tokens: int, completion_tokens: int, seconds: float
    ) -> None:
        pass
