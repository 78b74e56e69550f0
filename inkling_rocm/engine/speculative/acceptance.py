"""How often drafts of each depth are accepted, from what verification found lately.

Depth k is tried where the k drafts before it were accepted; its rate p_k is conditional on that. A
verification of N drafts gives 1 + sum over n <= N of p_0 ... p_(n-1) tokens in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FIRST_RATE = 0.8  # before anything was seen: high, so that drafting is tried
PRIOR_TRIALS = 4.0  # how many trials the rate of the depth before counts for
LEAST_VARIANCE = 0.05  # of one trial: a depth that never failed yet is not certain


class AcceptanceEstimate:
    """Exponentially decayed acceptance rates per depth.

    Trials are forgotten as others of the same depth come (so a rate settles within `memory` trials
    at any batch size) and, slowly, as rounds pass (so a depth that is not drafted any more becomes
    uncertain instead of staying bad).

    Args:
        depths: the most drafts of a row.
        memory: trials of a depth after which older ones count 1/e.
        patience: rounds after which they do.
    """

    def __init__(self, depths: int, *, memory: float = 256.0, patience: float = 1024.0):
        self.depths = depths
        self._kept_by_trial = 1.0 - 1.0 / memory
        self._kept_by_round = 1.0 - 1.0 / patience
        self._tried_N = np.zeros(depths)
        self._accepted_N = np.zeros(depths)

    def book(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take in one round: how many drafts each row had, and how many of them were accepted."""
        drafted_B1 = np.asarray(drafted)[:, None]
        accepted_B1 = np.asarray(accepted)[:, None]
        depth_N = np.arange(self.depths)
        tried_N = ((depth_N < drafted_B1) & (depth_N <= accepted_B1)).sum(0)
        kept_N = self._kept_by_round * self._kept_by_trial**tried_N
        self._tried_N = kept_N * self._tried_N + tried_N
        self._accepted_N = kept_N * self._accepted_N + (depth_N < accepted_B1).sum(0)

    def rates(self) -> tuple[NDArray, NDArray]:
        """Returns: conditional rates [N] and their variances [N]. What has not been tried is taken
        to be as good as the depth before."""
        rates_N = np.empty(self.depths)
        before = FIRST_RATE
        for depth in range(self.depths):
            accepted = self._accepted_N[depth] + PRIOR_TRIALS * before
            before = rates_N[depth] = accepted / (self._tried_N[depth] + PRIOR_TRIALS)
        spread_N = np.maximum(rates_N * (1.0 - rates_N), LEAST_VARIANCE)
        return rates_N, spread_N / (self._tried_N + PRIOR_TRIALS)


def expected_tokens(rates_N: NDArray) -> NDArray:
    """Tokens a verification gives in the mean, by the number of drafts: [N + 1], from 1 on."""
    return np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(rates_N))])


def log_tokens_gradient(rates_N: NDArray) -> NDArray:
    """d log(expected_tokens[n]) / d rates[k]: [N + 1, N]."""
    depths = len(rates_N)
    reached_N = np.cumprod(rates_N)
    gradient = np.zeros((depths + 1, depths))
    for depth in range(depths):
        # Without the factor of the depth itself, which may be 0.
        before = reached_N[depth - 1] if depth else 1.0
        rest = before * np.cumprod(np.concatenate([[1.0], rates_N[depth + 1 :]]))
        gradient[depth + 1 :, depth] = np.cumsum(rest)
    return gradient / expected_tokens(rates_N)[:, None]
