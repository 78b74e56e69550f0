"""The books of recorded graphs, with recording itself replaced: what is recorded on a GPU is tested
there (test_gpu.py, test_prefill_graphs_gpu.py, speculative/test_rounds_gpu.py)."""

from contextlib import nullcontext

import pytest
import torch

from inkling_rocm.engine import graphs as recording
from inkling_rocm.engine.graphs import RecordedGraphs


class Recorded:
    def __init__(self, part, log):
        self.part, self.log = part, log

    def replay(self):
        self.part()

    def reset(self):
        self.log.append("reset")


class Stream:
    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(recording, "_record", lambda part, pool, stream: Recorded(part, log))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return log


def test_the_largest_is_recorded_first_and_stages_are_replayed_in_order(log):
    graphs = RecordedGraphs()

    def stages(size):
        return [lambda: log.append((size, "first")), lambda: log.append((size, "second"))]

    graphs.record([(2, 1), (8, 1), (8, 3)], stages, progress=False)
    assert [size for size, _ in log[::2]] == [(8, 3), (8, 1), (2, 1)]
    log.clear()
    assert graphs.replay((8, 1))
    assert log == [((8, 1), "first"), ((8, 1), "second")]
    assert not graphs.replay((4, 1))


def test_nothing_is_left_after_a_release_or_of_what_was_recorded_before(log):
    graphs = RecordedGraphs()
    graphs.record([1, 2], lambda size: [lambda: None], progress=False)
    graphs.record([4], lambda size: [lambda: None], progress=False)
    assert log == ["reset", "reset"]
    assert (len(graphs), graphs.replay(1), graphs.replay(4)) == (1, False, True)
    graphs.release()
    assert log == ["reset"] * 3
    assert not graphs.replay(4)
