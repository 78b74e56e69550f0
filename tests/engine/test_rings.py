"""Copies of rings, many at once, are what one after the other gives."""

import numpy as np
import pytest
import torch

from inkling_rocm.engine.rings import ConvRings
from tests.engine.tiny import tiny_config


def rings_of(slots: int) -> ConvRings:
    rings = ConvRings(
        tiny_config().text, slots=slots, dtype=torch.float32, device=torch.device("cpu")
    )
    for storage in rings.storage:
        storage.copy_(torch.arange(storage.numel()).view(storage.shape))
    return rings


@pytest.mark.parametrize(
    "copies",
    [
        [(1, 40), (2, 41), (3, 42)],
        [(s, 60 - s) for s in range(1, 28)],  # more than go at once
        [(1, 40), (1, 41), (2, 40)],  # a target twice: the last counts
        [(1, 2), (2, 3), (3, 4), (4, 1)],  # read after it was written: in order
        [],
    ],
)
def test_many_are_copied_as_in_order(copies):
    found, wanted = rings_of(64), rings_of(64)
    pairs = np.array(copies, np.int32).reshape(-1, 2)
    found.copy(pairs)
    for source, target in copies:
        for storage in wanted.storage:
            storage[:, target] = storage[:, source]
    for a, b in zip(found.storage, wanted.storage, strict=True):
        assert torch.equal(a, b)
