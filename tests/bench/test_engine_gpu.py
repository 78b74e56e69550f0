"""Host gaps are told from the device's own."""

from bench.engine_gpu import Activity, spans_of


def test_gaps_by_whose_they_are():
    found = spans_of(
        [
            Activity("sample", 30.0, 34.0, 2),  # waited 6 us for the host
            Activity("gemm", 0.0, 10.0, 1),
            Activity("norm", 12.0, 20.0, 1),
            Activity("attention", 18.0, 24.0, 1),
            Activity("copy", 21.0, 22.0, 3),  # beside the graph
            Activity("gemm", 34.5, 40.0, 4),
        ]
    )
    assert (found.busy, found.inside, found.between) == (31.5, 2.0, 6.5)
    assert found.total == 40.0
    assert found.before == {"sample": 6.0, "gemm": 0.5, "copy": 0.0}
