"""The distribution of sampled tokens, by its definition and by counting."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine import SamplingParams


def chi_square_z(counts: NDArray, probs: NDArray) -> float:
    """Standardised chi-square of counts against probabilities; rare outcomes are pooled."""
    expected = probs * counts.sum()
    common = expected >= 5
    pooled_counts = np.append(counts[common], counts[~common].sum())
    pooled = np.append(expected[common], expected[~common].sum())
    some = pooled > 0
    statistic = ((pooled_counts[some] - pooled[some]) ** 2 / pooled[some]).sum()
    freedom = max(some.sum() - 1, 1)
    return float((statistic - freedom) / math.sqrt(2 * freedom))


def reference_probs(logits: Tensor, params: SamplingParams) -> NDArray:
    """The distribution by its definition, float64: temperature, top-k, top-p, min-p."""
    x = logits.double().numpy() / params.temperature
    order = np.argsort(-x, kind="stable")
    probs = np.exp(x - x.max())
    keep = np.ones(len(x), bool)
    if params.top_k > 0:
        keep[order[params.top_k :]] = False
    probs = np.where(keep, probs, 0)
    probs /= probs.sum()
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        keep[order[(before >= params.top_p) & (np.arange(len(x)) > 0)]] = False
    keep &= probs >= params.min_p * probs.max()
    probs = np.where(keep, probs, 0)
    return probs / probs.sum()
