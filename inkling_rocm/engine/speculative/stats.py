"""The books of speculation: what was drafted and accepted, and the next round's draft steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inkling_rocm.engine.metrics import EngineMetrics, SpeculationSnapshot
from inkling_rocm.engine.speculative.adaptive import AdaptiveSteps

RECENT = 1000.0  # verifications after which older ones count 1/e in "lately"


class SpeculationStats:
    """Used by EngineCore: `choose` before a round, `book` after it.

    Args:
        num_steps: draft steps of every round, and the most there can be.
        metrics: told of every round.
        adaptive: chooses the steps instead; None = always num_steps.
    """

    def __init__(
        self, num_steps: int, metrics: EngineMetrics, adaptive: AdaptiveSteps | None = None
    ):
        assert adaptive is None or adaptive.most == num_steps
        self._most = self._last_steps = num_steps
        self._metrics = metrics
        self._adaptive = adaptive
        self._rounds = self._verifications = self._timed = 0
        self._seconds = 0.0
        self._drafted_N = np.zeros(num_steps, np.int64)
        self._accepted_N = np.zeros(num_steps, np.int64)
        self._lengths_M = np.zeros(num_steps + 1, np.int64)
        self._recent = np.zeros(3)  # verifications, drafts, accepted drafts, decayed

    def choose(self, batch: int) -> int:
        """Drafts to make in the next round of `batch` rows, which the round after it verifies; call
        once a round."""
        return self._most if self._adaptive is None else self._adaptive.choose(batch)

    def book(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float | None,
        *,
        steps: int | None = None,
        made: int | None = None,
    ) -> None:
        """Take in a round: a verification, and the drafts that were made after it.

        Args:
            drafted, accepted: drafts verified and accepted of each row, [B]; 0 drafted where a row
                had none (a grammar).
            seconds: from the end of the round before to the end of this one; None where that says
                nothing about a round's cost (the first one, a step that computed prompts too).
            steps: drafts a row verifies, also where it had fewer; None = the most that one had.
            made: as chosen for those made for the next round; None = as many.
        """
        if not drafted:
            return
        drafted_B, accepted_B = np.asarray(drafted), np.asarray(accepted)
        assert ((accepted_B >= 0) & (accepted_B <= drafted_B) & (drafted_B <= self._most)).all()
        steps = int(drafted_B.max()) if steps is None else steps
        depth_N1 = np.arange(self._most)[:, None]
        self._last_steps = steps if made is None else made
        self._rounds += 1
        self._verifications += len(drafted)
        self._drafted_N += (depth_N1 < drafted_B).sum(1)
        self._accepted_N += (depth_N1 < accepted_B).sum(1)
        self._lengths_M += np.bincount(accepted_B, minlength=self._most + 1)
        found = np.array([len(drafted), drafted_B.sum(), accepted_B.sum()], np.float64)
        self._recent = self._recent * np.exp(-len(drafted) / RECENT) + found
        if seconds is not None:
            self._seconds += seconds
            self._timed += 1
        if self._adaptive is not None:
            typical = made is None or made == steps
            self._adaptive.book(drafted, accepted, seconds if typical else None, steps=steps)
        self._metrics.speculation_round(drafted, accepted, steps=steps, seconds=seconds)

    def snapshot(self) -> SpeculationSnapshot:
        """Counts as they are now; may be called from any thread."""
        verifications, drafts, correct = self._recent
        return SpeculationSnapshot(
            num_steps=self._last_steps,
            rounds=self._rounds,
            verifications=self._verifications,
            drafted=tuple(self._drafted_N.tolist()),
            accepted=tuple(self._accepted_N.tolist()),
            lengths=tuple(self._lengths_M.tolist()),
            accept_length=float(1.0 + correct / verifications) if verifications else 0.0,
            accept_rate=float(correct / drafts) if drafts else 0.0,
            seconds=self._seconds,
            timed_rounds=self._timed,
        )
