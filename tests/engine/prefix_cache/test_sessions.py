"""Random multi-turn sessions under memory pressure: outputs are those of a run without a cache, and
the books are right after every step."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.prefix_cache.checks import check_books
from inkling_rocm.engine.prefix_cache.disk_store import DiskStore
from inkling_rocm.engine.prefix_cache.store import HostStore
from inkling_rocm.engine.prefix_cache.tiers import Tiers
from tests.engine import history_model
from tests.engine.history_model import add_request, assert_empty, history_core, reference_tokens

MOST_TOKENS = 150


@dataclass
class Session:
    """A conversation: what was said so far, and the turn that is being answered."""

    rng: random.Random
    system: list[int]
    turns: int
    history: list[int] = field(default_factory=list)
    request: object = None
    aborted: bool = False

    def params(self):
        rng = self.rng
        return SamplingParams(
            max_new_tokens=rng.choice((1, 5, 20, 50)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(1000),
            n=rng.choice((1, 1, 1, 2)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
            logit_bias={history_model.EOS: 3.0} if rng.random() < 0.5 else {},
        )

    def prompt(self):
        rng = self.rng
        if not self.history:
            self.history = list(self.system)
        elif rng.random() < 0.15:  # edited somewhere
            self.history = self.history[: rng.randrange(1, len(self.history) + 1)]
        said = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        self.history = (self.history + said)[:MOST_TOKENS]
        return self.history

    def answered(self):
        """Check the answer, and go on from one of its continuations."""
        request = self.request
        params, handle = request.params, request.handle
        reasons = set(handle.reasons().values())
        if not self.aborted:
            assert reasons <= {"stop", "length"}, handle.updates
            for index in range(params.n):
                expected = reference_tokens(request.prompt_ids, params, seed=params.seed + index)
                assert handle.tokens(index) == expected
        self.history = request.prompt_ids + handle.tokens(self.rng.randrange(params.n))
        self.request, self.aborted = None, False
        self.turns -= 1


def run_sessions(core, count, seed, *, at_once=10):
    """Returns: how often things happened."""
    rng = random.Random(seed)
    systems = [[rng.randrange(256) for _ in range(n)] for n in (3, 20, 37, 64, 90)]
    waiting = [
        Session(random.Random(seed * 10_000 + i), rng.choice(systems), rng.randint(1, 4))
        for i in range(count)
    ]
    open_sessions, order, seen = [], 0, Counter()
    while waiting or open_sessions:
        while waiting and len(open_sessions) < at_once:
            open_sessions.append(waiting.pop())
        for session in open_sessions:
            if session.request is None and rng.random() < 0.3:
                order += 1
                asks = {"logprobs": 1, "prompt_logprobs": True} if rng.random() < 0.1 else {}
                session.request = add_request(
                    core, order, session.prompt(), session.params(), **asks
                )
            elif session.request is not None and rng.random() < 0.002:
                core.abort(session.request.rid)
                session.aborted = True
                seen["aborts"] += 1
        if not core.idle:
            core.step()
            check_books(core.scheduler.cache, core.scheduler.running)
        for session in list(open_sessions):
            request = session.request
            if request is not None and len(request.handle.reasons()) == request.params.n:
                session.answered()
                seen["turns"] += 1
                if not session.turns:
                    open_sessions.remove(session)
    stats = core.scheduler.cache.stats()
    return seen | Counter(
        hits=stats.hits,
        hit_tokens=stats.hit_tokens,
        lookups=stats.lookups,
        **stats.evictions,
        preemptions=core.scheduler.preemptions,
    )


# What is short, and what must have happened therefore.
SETTINGS = {
    "snapshots": (
        {"page_size": 16, "max_total_tokens": 480, "prefix_snapshots": 9},
        ("hits", "snapshots", "aborts"),
    ),
    "global": (
        {"page_size": 1, "max_total_tokens": 220, "prefix_snapshots": 40},
        ("hits", "global", "preemptions"),
    ),
    "window": (
        {"page_size": 16, "max_total_tokens": 480, "prefix_snapshots": 40, "window_pages": 10},
        ("hits", "window"),
    ),
}


PLAIN, AHEAD = None, (1, 2, 4, 8)
FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("short", "mode", "count"),
    [
        ("snapshots", PLAIN, 15),
        ("global", AHEAD, 15),
        ("window", AHEAD, 15),
        *(pytest.param(short, PLAIN, 200, marks=FULL) for short in SETTINGS),
        *(pytest.param(short, AHEAD, 200, marks=FULL) for short in SETTINGS),
    ],
)
def test_outputs_are_those_without_a_cache(short, mode, count, monkeypatch):
    monkeypatch.setattr(history_model, "BUCKETS", mode)
    args, expected = SETTINGS[short]
    core = history_core(**args, chunked_prefill_size=33)
    seen = run_sessions(core, count, seed=5)
    assert all(seen[what] for what in expected), seen
    assert_empty(core)


def with_tiers(core, folder, *, host_bytes, disk_bytes=0):
    """Give a core's prefix cache a host tier, and a disk tier if that has bytes."""
    fingerprint = bytes(32)
    disk = DiskStore(folder, disk_bytes, fingerprint) if disk_bytes else None
    cache = core.scheduler.cache
    store = HostStore(host_bytes, disk, block_bytes=4096)
    cache.tiers = Tiers(store, cache.tree, cache.rings, fingerprint)
    return store


@pytest.mark.parametrize(
    ("disk_bytes", "mode", "count"),
    [
        (0, PLAIN, 15),
        (400_000, AHEAD, 15),
        pytest.param(0, AHEAD, 1000, marks=FULL),
        pytest.param(400_000, PLAIN, 1000, marks=FULL),
        pytest.param(400_000, AHEAD, 1000, marks=FULL),
    ],
)
def test_outputs_with_tiers_are_those_without_a_cache(
    disk_bytes, mode, count, monkeypatch, tmp_path
):
    """Little room everywhere: entries move between all tiers and fall out of the last."""
    monkeypatch.setattr(history_model, "BUCKETS", mode)
    core = history_core(
        page_size=16, max_total_tokens=304, prefix_snapshots=9, window_pages=10,
        chunked_prefill_size=33,
    )  # fmt: skip
    host_bytes = 40 * 4096 if disk_bytes else 120 * 4096
    store = with_tiers(core, tmp_path, host_bytes=host_bytes, disk_bytes=disk_bytes)
    run_sessions(core, count, seed=7)
    tiers = core.scheduler.cache.stats().tiers
    store.flush()
    store.close()
    assert tiers.loads > 0
    assert tiers.host.evictions > 0
    assert_empty(core)
