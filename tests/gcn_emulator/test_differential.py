"""Generated kernels: emulator(gfx942) and emulator(gfx950) against Triton's interpreter."""

import numpy as np
import pytest
import triton
from differential import compare
from kernelgen import FAMILIES, generate


def release(version):
    return tuple(int(x) for x in version.split(".")[:2])


pytestmark = pytest.mark.skipif(
    release(triton.__version__) < (3, 7) and release(np.__version__) >= (2, 4),
    reason="the interpreter of Triton 3.6 needs numpy below 2.4 (scalars from 1-d arrays)",
)


def fast_seeds():
    """The first seed of every family (seeds are consecutive for the worker processes)."""
    return 0, 24


def test_fast_subset():
    first, last = fast_seeds()
    count, problems, mnemonics, _ = compare(first, last)
    assert not problems, problems
    assert count == last - first
    assert len(mnemonics) > 100


def test_fast_subset_covers_most_families():
    seen = {generate(seed).name.split("_")[0] for seed in range(*fast_seeds())}
    assert len(seen) >= len(FAMILIES) - 2


def test_seeds_that_found_something():
    """3038: v_mul_hi_i32_i24 was unknown."""
    _, problems, mnemonics, _ = compare(3038, 3039)
    assert not problems, problems
    assert mnemonics["v_mul_hi_i32_i24_e32"]


@pytest.mark.full
@pytest.mark.parametrize("first", range(100, 1000, 100))
def test_many(first):
    _, problems, _, _ = compare(first, first + 100)
    assert not problems, problems
