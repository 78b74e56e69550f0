"""How many draft steps a batch should have: those that give the most tokens per second.

Tokens a round come from acceptance per depth (acceptance.py), seconds from timed rounds
(round_cost.py). Both are uncertain, and a step count that is not run teaches nothing, so every
EVERY rounds of a batch bucket the controller compares the others with the one it has settled on:

- surely better (gain - Z errors > MARGIN): settle on it. Noise does not move it, so it does not
  oscillate between step counts that are equally good;
- perhaps better (gain + Z errors > MARGIN): run it for PROBE rounds to know more. What has not
  been run for long becomes uncertain again, so a change is found out. The wait between probes
  grows while they change nothing, and is short again after a change;
- otherwise: leave it.

Given the same calls it does the same. Which steps it chooses changes speed, never tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inkling_rocm.engine.speculative.acceptance import (
    AcceptanceEstimate,
    expected_tokens,
    log_tokens_gradient,
)
from inkling_rocm.engine.speculative.round_cost import RoundCost

logger = logging.getLogger(__name__)

EVERY = 16  # timed rounds between two decisions
PROBE = 2  # rounds; what the first drafts, the second verifies
LONGEST_WAIT = 128  # timed rounds between two probes
GROWTH = 1.25  # of the wait, by every probe of what was measured before
CHANGE = 0.15  # of the estimated tokens per second, relative, after which probes come faster again
MARGIN = 0.02  # relative gain in tokens per second that is worth a change
Z = 2.0  # standard errors that make it sure


@dataclass
class _Bucket:
    """Attributes:
    settled: steps of ordinary rounds. probe: of the next `probes` rounds.
    rounds: that were timed. wait: of them, before the next probe at `next_probe`.
    speed: log tokens per second when the wait was short last.
    """

    settled: int
    probe: int = 0
    probes: int = 0
    rounds: int = 0
    wait: float = EVERY
    next_probe: float = 0
    speed: float = -math.inf


class AdaptiveSteps:
    """Chooses the draft steps of each round.

    Args:
        most: the most steps there are blocks for. least: the fewest to choose; 0 = may leave
            speculation out.
        buckets: batch sizes as the engine runs them, ascending; empty = each is its own.
    """

    def __init__(self, most: int, *, least: int = 1, buckets: Sequence[int] = ()):
        if not 0 <= least <= most:
            raise ValueError(
                f"adaptive draft steps: least {least}, most {most}: wanted 0 <= least <= most"
            )
        self.most, self.least = most, least
        self.acceptance = AcceptanceEstimate(most)
        self.cost = RoundCost(most, buckets)
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, batch: int) -> int:
        """Steps of the next round of `batch` rows; call once a round."""
        state = self._state(self.cost.bucket(batch))
        if not state.probes:
            return state.settled
        state.probes -= 1
        return state.probe

    def settled(self, batch: int) -> int:
        """Steps of ordinary rounds of `batch` rows."""
        return self._state(self.cost.bucket(batch)).settled

    def book(
        self,
        drafted: Sequence[int],
        accepted: Sequence[int],
        seconds: float | None,
        *,
        steps: int,
    ) -> None:
        """Take in a round.

        Args:
            drafted, accepted: drafts verified and accepted of each row, [B].
            seconds: how long it took; None where that says nothing about `steps`: a prompt chunk
                ran too, or another number of drafts was made than verified.
            steps: as chosen for it; rows may have had fewer drafts.
        """
        if not drafted:
            return
        self.acceptance.book(drafted, accepted)
        if seconds is None:
            return
        bucket = self.cost.bucket(len(drafted))
        self.cost.book(bucket, steps, seconds)
        state = self._state(bucket)
        state.rounds += 1
        if state.rounds % EVERY == 0:
            self._decide(bucket, state)

    def _state(self, bucket: int) -> _Bucket:
        """Of a bucket; a new one begins where the nearest stands, the first with all steps."""
        if bucket not in self._buckets:
            near = min(self._buckets, key=lambda b: (abs(math.log(b / bucket)), b), default=None)
            settled = self.most if near is None else self._buckets[near].settled
            self._buckets[bucket] = _Bucket(settled)
        return self._buckets[bucket]

    def _decide(self, bucket: int, state: _Bucket) -> None:
        if not self.cost.measured(bucket, state.settled):
            return
        rates_N, variances_N = self.acceptance.rates()
        seconds_S, cost_errors_S = self.cost.of_bucket(bucket)
        speed_S = np.log(expected_tokens(rates_N) / seconds_S)
        gradient_SN = log_tokens_gradient(rates_N)
        now = state.settled
        gains_S = speed_S - speed_S[now]
        # Errors of the acceptance rates move both sides of a comparison, mostly together.
        errors_S = np.sqrt(
            (gradient_SN - gradient_SN[now]) ** 2 @ variances_N
            + cost_errors_S**2
            + cost_errors_S[now] ** 2
        )
        sure_S, perhaps_S = gains_S - Z * errors_S, gains_S + Z * errors_S
        others = [s for s in range(self.least, self.most + 1) if s != now]
        better = [s for s in others if sure_S[s] > MARGIN and self.cost.measured(bucket, s)]
        if better or abs(speed_S[now] - state.speed) > CHANGE:
            state.speed, state.wait, state.next_probe = speed_S[now], EVERY, 0
        if better:
            state.settled = max(better, key=lambda s: gains_S[s])
            logger.info("batches of up to %d: draft steps %d -> %d", bucket, now, state.settled)
            return
        uncertain = [s for s in others if perhaps_S[s] > MARGIN]
        if uncertain and state.rounds >= state.next_probe:
            state.probe, state.probes = max(uncertain, key=lambda s: perhaps_S[s]), PROBE
            state.next_probe = state.rounds + state.wait
            if self.cost.measured(bucket, state.probe):
                state.wait = min(state.wait * GROWTH, LONGEST_WAIT)
