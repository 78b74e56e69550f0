"""What a round costs, by batch bucket and draft steps, from rounds that were timed.

Where a (bucket, steps) was run, its cost is a running median. Between two step counts of a bucket
it is interpolated. Where one alone was run, the others are taken to cost the least that is
possible, so that they are tried: what another batch size costs says too little, because verifying a
small batch reads weights, a large one computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SAMPLES = 15  # of which the median is taken
ENOUGH = 3  # samples without which a cell counts as not measured
UNMEASURED_ERROR = 0.15  # relative, of the estimate
LEAST_ERROR = 0.01  # of a median
DRIFT = 0.1  # relative: how much a cost may have moved within HORIZON
HORIZON = 4096  # rounds of the bucket after which a sample is dropped for a newer one
MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median over mad / sqrt(samples)


class _Cell:
    """Timed rounds of one bucket and step count."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self.median = self.spread = 0.0  # seconds; mad / median

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, now: int, seconds: float) -> None:
        while self._samples and now - self._samples[0][0] > HORIZON:
            self._samples.popleft()
        self._samples.append((now, seconds))
        values = np.array([seconds for _, seconds in self._samples])
        self.median = float(np.median(values))
        self.spread = float(np.median(np.abs(values - self.median))) / self.median

    def error(self, now: int, spread: float) -> float:
        """Relative standard error, by the spread of single times; grows while the cell is not
        run."""
        noise = max(MEDIAN_ERROR * spread / len(self) ** 0.5, LEAST_ERROR)
        return float(np.hypot(noise, DRIFT * (now - self._samples[-1][0]) / HORIZON))


class RoundCost:
    """Seconds of a round by (bucket, steps).

    Args:
        most: the most draft steps.
        buckets: batch sizes as they are run, ascending; a batch costs what its bucket does. Empty =
            every batch size is its own.
    """

    def __init__(self, most: int, buckets: Sequence[int] = ()):
        self.most = most
        self._buckets = tuple(buckets)
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._rounds: dict[int, int] = {}

    def bucket(self, batch: int) -> int:
        """The bucket a batch is run in; itself where none is large enough."""
        return next((size for size in self._buckets if size >= batch), batch)

    def book(self, bucket: int, steps: int, seconds: float) -> None:
        """Take in the time of a round."""
        self._rounds[bucket] = now = self._rounds.get(bucket, 0) + 1
        self._cells.setdefault((bucket, steps), _Cell()).add(now, seconds)

    def measured(self, bucket: int, steps: int) -> bool:
        """Whether enough rounds were timed there to tell."""
        return len(self._cells.get((bucket, steps), ())) >= ENOUGH

    def of_bucket(self, bucket: int) -> tuple[NDArray, NDArray]:
        """Of a bucket where something is measured.

        Returns: seconds [most + 1] by steps from 0 on, and their relative standard errors.
        """
        known = [n for n in range(self.most + 1) if self.measured(bucket, n)]
        cells = [self._cells[bucket, n] for n in known]
        # Of few samples the spread is often far too small: that of the noisiest counts for all.
        spread = max(cell.spread for cell in cells)
        seconds_S = _between(known, [cell.median for cell in cells], self.most)
        errors_S = np.full(self.most + 1, UNMEASURED_ERROR)
        errors_S[known] = [cell.error(self._rounds[bucket], spread) for cell in cells]
        return seconds_S, errors_S


def _between(known: Sequence[int], seconds: Sequence[float], most: int) -> NDArray:
    """Seconds by steps, [most + 1], from those of some, ascending: straight lines between them and
    beyond the last two; with one alone the least that is possible, proportional to the tokens for
    fewer steps and no more for more steps."""
    steps_S = np.arange(most + 1.0)
    found_S = np.interp(steps_S, known, seconds)
    if len(known) > 1:
        for near, next_ in ((0, 1), (-1, -2)):
            slope = (seconds[next_] - seconds[near]) / (known[next_] - known[near])
            beyond = steps_S < known[0] if near == 0 else steps_S > known[-1]
            line_S = seconds[near] + max(slope, 0.0) * (steps_S - known[near])
            found_S[beyond] = line_S[beyond]
    fewer = steps_S < known[0]
    least_S = seconds[0] * (steps_S + 1.0) / (known[0] + 1.0)
    if len(known) == 1:
        found_S[fewer] = least_S[fewer]
    return np.maximum(found_S, np.where(fewer, least_S, 0.0))
