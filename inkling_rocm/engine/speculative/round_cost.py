"""What a round costs, by batch bucket and draft steps, from rounds that were timed.

Where a (bucket, steps) was run lately, its cost is a running median. Elsewhere it is estimated: a
bilinear fit over all medians, scaled to those of the bucket, and kept between what fewer and more
rows or steps were seen to cost.
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
        """Returns: seconds [most + 1] by steps from 0 on, and their relative standard errors. At
        least one round must have been booked, of whatever bucket."""
        seconds_S, errors_S = self._estimate(bucket), np.full(self.most + 1, UNMEASURED_ERROR)
        now = self._rounds.get(bucket, 0)
        measured = [n for n in range(self.most + 1) if self.measured(bucket, n)]
        # Of few samples the spread is often far too small: that of the noisiest counts for all.
        spread = max((self._cells[bucket, n].spread for n in measured), default=0.0)
        for steps in measured:
            cell = self._cells[bucket, steps]
            seconds_S[steps], errors_S[steps] = cell.median, cell.error(now, spread)
        return seconds_S, errors_S

    def _estimate(self, bucket: int) -> NDArray:
        """The fit, [most + 1]. Of the solutions that few medians leave, lstsq takes the smallest:
        with one median the cost is nearly proportional to steps, so fewer look cheap and are
        tried."""
        cells = list(self._cells.items())
        at = np.array([key for key, _ in cells], np.float64)
        medians = np.array([cell.median for _, cell in cells])
        fit = np.linalg.lstsq(
            _terms(at[:, 0], at[:, 1]) / medians[:, None], np.ones(len(cells)), rcond=None
        )[0]
        steps_S = np.arange(self.most + 1.0)
        fitted_S = _terms(np.full(self.most + 1, float(bucket)), steps_S) @ fit
        own = at[:, 0] == bucket
        if own.any():
            there = fitted_S[at[own, 1].astype(np.int64)]
            if (there > 0).all():
                fitted_S *= np.median(medians[own] / there)
        for index, steps in enumerate(steps_S):
            less = medians[(at[:, 0] <= bucket) & (at[:, 1] <= steps)]
            more = medians[(at[:, 0] >= bucket) & (at[:, 1] >= steps)]
            low = less.max(initial=medians.min() / (self.most + 1))
            high = max(more.min(initial=np.inf), low)
            fitted_S[index] = np.clip(fitted_S[index], low, high)
        return fitted_S


def _terms(batch: NDArray, steps: NDArray) -> NDArray:
    return np.stack([np.ones_like(batch), batch, steps, batch * steps], axis=1)
