"""The embedded host, and broken variants of it that the suite must catch."""

from functools import partial

import numpy as np
import pytest
import torch

from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.memory import build_pools, plan_memory
from inkling_rocm.engine.rings import ConvRings
from inkling_rocm.model import InklingModel
from inkling_rocm.ops import resolve_ops
from kernel_base.arch import arch_of_device
from tests.engine.tiny import tiny_config, tiny_model
from tests.host_invariants.harness import Probe, Row
from tests.host_invariants.suite import HostInvariants

DRAFTS = 4
CPU = torch.device("cpu")


class EmbeddedHarness:
    """Requests get the slots the scheduler would give them, in order."""

    max_rewind = DRAFTS

    def __init__(self, page_size=16, host_class=EmbeddedHost, device=CPU):
        self.config = tiny_config()
        self.page_size = page_size
        text = self.config.text
        args = EngineArgs(
            model_path="tiny", page_size=page_size, max_running_requests=8, max_total_tokens=2048
        )
        plan = plan_memory(text, args, dtype=torch.float32, device=device)
        self.pools, _ = build_pools(text, plan, dtype=torch.float32, device=device)
        self.rings = ConvRings(
            text, slots=plan.slots, dtype=torch.float32, device=device, draft_tokens=DRAFTS
        )
        for pool in self.pools:
            pool.storage[:, :, 1:] = float("nan")
        for storage in self.rings.storage:
            storage[:, 1:] = float("nan")
        self.host = host_class(
            text,
            self.pools,
            self.rings,
            max_tokens=600,
            max_rows=40,
            device=device,
            check=host_class is EmbeddedHost,
        )
        self.slots: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    def open(self):
        request = len(self.computed) + 1
        self.slots[request], self.computed[request] = self.rings.take(), 0
        return request

    def close(self, request):
        slot = self.slots.pop(request)
        for pool in self.pools:
            pool.release(slot)
        self.rings.give_back(slot)

    def step(self, rows, *, pad_tokens=0, pad_rows=0):
        slots = [self.slots[row.request] for row in rows]
        starts = [self.computed[row.request] for row in rows]
        for slot, start, row in zip(slots, starts, rows, strict=True):
            for pool in self.pools:
                pool.trim(slot, max(start - DRAFTS, 0))
                pool.extend(slot, start + row.length)
            self.computed[row.request] += row.length
        self.host.prepare(
            np.array(slots, np.int64),
            np.array(starts, np.int64),
            np.array([row.length for row in rows], np.int64),
            pad_tokens=pad_tokens,
            pad_rows=pad_rows,
        )
        return self.host

    def rewind(self, request, tokens):
        self.computed[request] -= tokens


class TestEmbeddedHost(HostInvariants):
    @pytest.fixture
    def make(self):
        return EmbeddedHarness

    @pytest.fixture
    def model(self):
        return tiny_model(tiny_config())


@pytest.mark.gpu
class TestOnAGpu:
    """What a model's results show of the invariants, through the kernels."""

    @pytest.fixture
    def make(self):
        return partial(EmbeddedHarness, device=torch.device("cuda"))

    @pytest.fixture
    def model(self):
        return triton_model(torch.device("cuda"))

    test_i2 = HostInvariants.test_i2_padding_changes_nothing
    test_i3 = HostInvariants.test_i3_rerunning_overwrites
    test_i4 = HostInvariants.test_i4_chunks_and_neighbours_change_nothing
    test_i6 = HostInvariants.test_i6_rows_may_be_empty
    test_i7 = HostInvariants.test_i7_row_order_is_arbitrary_and_slots_are_not_shared


def triton_model(device):
    config = tiny_config()
    weights = {name: w.to(device) for name, w in tiny_model(config).weights.items()}
    ops = resolve_ops(config, arch_of_device(device), dtype="float32")
    return InklingModel(config, weights, ops)


class _WindowOneShort(EmbeddedHost):
    def prepare(self, *args, **kwargs):
        super().prepare(*args, **kwargs)
        self.kv(0).first_page[:] += 1


class _SlotOff(EmbeddedHost):
    def prepare(self, *args, **kwargs):
        super().prepare(*args, **kwargs)
        slot = self.kv(2).slot
        slot[slot > 0] = slot[slot > 0].roll(1)


class _StaleRing(EmbeddedHost):
    def prepare(self, slots, q_start, q_len, **kwargs):
        super().prepare(slots, q_start, q_len, **kwargs)
        if q_start[0]:
            self.conv(0, "k").slot[:] = self.conv(0, "k").slot.flip(0)


@pytest.mark.parametrize("broken", [_WindowOneShort, _SlotOff, _StaleRing])
def test_the_probe_catches_a_broken_host(broken):
    harness = EmbeddedHarness(host_class=broken)
    probe = Probe(harness.config)
    first, second = harness.open(), harness.open()

    def run():
        for lengths in ((20, 9), (4, 1), (30, 12), (1, 1)):
            rows = [Row(first, lengths[0]), Row(second, lengths[1])]
            probe.run(harness.step(rows), rows)

    with pytest.raises(AssertionError):
        run()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda h: h.pools[1].references.__setitem__(int(h.pools[1].table[h.slots[1], 0]), 2),
            "shared",
        ),
        (lambda h: h.pools[0].table.__setitem__((h.slots[1], 1), 0), "I1"),
        (lambda h: h.pools[0].table.__setitem__(h.slots[1], h.pools[0].table[h.slots[2]]), "I7"),
        (lambda h: h.slots.__setitem__(1, h.slots[2]), "I7"),
    ],
)
def test_the_step_check_names_the_broken_invariant(fault, message):
    harness = EmbeddedHarness()
    first, second = harness.open(), harness.open()
    harness.step([Row(first, 5), Row(second, 5)])
    harness.step([Row(first, 13), Row(second, 13)])
    if message == "shared":
        harness.rewind(first, 12)
    fault(harness)
    with pytest.raises(AssertionError, match=message):
        harness.step([Row(first, 1), Row(second, 1)])
