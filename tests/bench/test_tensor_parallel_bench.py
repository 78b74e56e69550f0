"""What the comparison of ranks says of tokens that differ."""

import pytest

from bench.tensor_parallel import equal_share, mode_of


def test_modes():
    assert mode_of("tp1") == (1, 1)
    assert mode_of("tp2") == (2, 1)
    assert mode_of("ep8") == (8, 8)
    with pytest.raises(ValueError, match="pp2"):
        mode_of("pp2")


def test_a_row_counts_up_to_its_first_difference():
    wanted = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert equal_share(wanted, wanted) == 1.0
    assert equal_share([[1, 9, 3, 4], [5, 6, 7, 8]], wanted) == 5 / 8
    assert equal_share([[9, 2, 3, 4], [9, 6, 7, 8]], wanted) == 0.0
