"""Memory contents and addresses for the tests of memory instructions."""

import numpy as np

LANES = np.arange(64)
PARTIAL = 0x00FF00FF12345678
LDS = np.random.default_rng(5).integers(0, 256, 8192).astype(np.uint8)


def lanes(row):
    return [int(x) for x in row]


def word(data, at, size=4):
    return int.from_bytes(bytes(data[at : at + size]), "little")


def addresses(unit, seed=0):
    return (np.random.default_rng(seed).permutation(256)[:64] * unit).astype(np.uint32)
