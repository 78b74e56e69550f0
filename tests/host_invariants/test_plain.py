"""The tests' own plain host obeys the contract too, so that two hosts agree on what it is."""

import pytest

from tests.engine.tiny import tiny_config, tiny_model
from tests.host_invariants.suite import HostInvariants
from tests.support.plain_host import PlainHost
from tests.support.plain_host import Row as PlainRow

DRAFTS = 4
REQUESTS = 24


class PlainHarness:
    max_rewind = DRAFTS

    def __init__(self, page_size=16):
        self.config = tiny_config()
        self.page_size = page_size
        ring_len = self.config.text.conv_taps - 1 + DRAFTS
        self.host = PlainHost(
            self.config, REQUESTS, max_len=128, page_size=page_size, ring_len=ring_len
        )
        self.computed: dict[int, int] = {}

    def open(self):
        request = len(self.computed) + 1
        self.computed[request] = 0
        return request

    def close(self, request):
        pass

    def step(self, rows, *, pad_tokens=0, pad_rows=0):
        plain = [PlainRow(row.request, self.computed[row.request], row.length) for row in rows]
        plain += [PlainRow(0, 0, 1)] * pad_tokens + [PlainRow(0, 0, 0)] * pad_rows
        for row in rows:
            self.computed[row.request] += row.length
        self.host.prepare(plain)
        return self.host

    def rewind(self, request, tokens):
        self.computed[request] -= tokens


class TestPlainHost(HostInvariants):
    @pytest.fixture
    def make(self):
        return PlainHarness

    @pytest.fixture
    def model(self):
        return tiny_model(tiny_config())
