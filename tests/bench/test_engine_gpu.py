"""Host gaps are told from the device's own."""

import gc

from bench.engine.gaps import Activity, Doing, collections_noted, meanwhile, spans_of


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
    assert found.longest == (24.0, 30.0, "sample")


def test_what_the_host_did_in_a_gap():
    doings = [
        Doing("step", 0.0, 26.0),
        Doing("cudaMalloc", 25.0, 29.0),
        Doing("step", 29.0, 40.0),
        Doing("cudaFree", 31.0, 32.0),
    ]
    assert meanwhile(doings, 24.0, 30.0) == {"cudaMalloc": 4.0, "step": 3.0}


def test_garbage_collections_are_noted():
    noted = []
    with collections_noted(noted):
        gc.collect()
    gc.collect()
    ((_, start, end),) = (each for each in noted if each[0] == "garbage collection 2")
    assert start < end
