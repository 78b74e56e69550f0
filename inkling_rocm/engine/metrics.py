"""What the engine reports to an observer, and a snapshot of its state.

The engine knows no metrics library: it calls an `EngineMetrics`, by default one that ignores
everything. Calls come from the engine's thread and must return quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inkling_rocm.engine.request import FinishReason


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

    def finished(
        self, reason: FinishReason, *, prompt_tokens: int, completion_tokens: int, seconds: float
    ) -> None:
        pass
