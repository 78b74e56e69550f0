"""The tree on its own: keys, boundaries, who goes first; the cache's steps where they fail."""

import pytest
import torch

from inkling_rocm.engine import SamplingParams
from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.prefix_cache.checks import check_books
from inkling_rocm.engine.prefix_cache.tree import PrefixTree
from tests.engine import history_model
from tests.engine.history_model import (
    EOS,
    HistoryModel,
    add_request,
    assert_empty,
    history_core,
    reference_tokens,
    run_to_end,
)

PAGE, WINDOW = 4, 6
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
PROMPT = [(7 * i + 3) % 250 for i in range(70)]


def make_tree(lookahead=0):
    pools = tuple(
        PagePool(
            layers=(index,),
            window=window,
            pages=60,
            page_size=PAGE,
            num_kv_heads=1,
            head_dim=2,
            slots=4,
            context_length=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        for index, window in enumerate((0, WINDOW))
    )
    return PrefixTree(pools, lookahead=lookahead)


def add(tree, tokens, position, snapshot, base=None, **options):
    """Make a boundary of pages that nobody else has."""
    base = base or tree.root
    pages = []
    for pool in tree.pools:
        first = tree.first_page(pool, position) if pool.window else base.depth
        pages.append((first, [pool.take() for _ in range(first, position // PAGE)]))
    node = tree.add(base, tokens, position, pages, snapshot, **options)
    for pool, (_, of_pool) in zip(tree.pools, pages, strict=True):
        pool.unrefer(of_pool)
    return node


def held(tree):
    return [pool.cached for pool in tree.pools]


def test_a_boundary_needs_its_window_and_all_that_is_before_it():
    tree = make_tree()
    tokens = list(range(40))
    node = add(tree, tokens, 20, 1)
    # The five keys before 20 lie in pages 3 and 4.
    assert held(tree) == [5, 2]
    assert tree.match(tokens, 39) == (node, node)
    assert tree.match(tokens, 19)[0] is tree.root, "nothing below was kept"
    assert tree.match(tokens, 19)[1].depth == 4
    longer = add(tree, tokens, 28, 2, base=node)
    assert held(tree) == [7, 4]
    assert tree.remove(node) == 1
    assert held(tree) == [7, 2]
    assert tree.match(tokens, 39)[0] is longer
    assert tree.match(tokens, 27)[0] is tree.root
    assert tree.remove(longer) == 2
    assert held(tree) == [0, 0]
    assert all(pool.unused == pool.total for pool in tree.pools)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 8])
def test_the_tokens_that_a_page_depends_on_are_in_its_key(lookahead):
    tree = make_tree(lookahead)
    tokens = list(range(40))
    node = add(tree, tokens, 20, 1)
    for changed in range(40):
        other = [*tokens[:changed], 99, *tokens[changed + 1 :]]
        expected = node if changed >= 20 + lookahead else tree.root
        assert tree.match(other, 39)[0] is expected, changed
    assert tree.match(tokens[: 20 + lookahead], 20)[0] is node
    assert tree.match(tokens[: 19 + lookahead], 20)[0] is tree.root


def test_who_goes_first():
    tree = make_tree()
    first = add(tree, [1] * 30, 20, 1)
    second = add(tree, [2] * 30, 20, 2)
    cold = add(tree, [3] * 30, 20, 3, cold=True)
    assert list(tree.boundaries) == [cold, first, second]
    tree.touch(first)
    assert list(tree.boundaries) == [cold, second, first]
    # A boundary whose pages a sequence uses frees none.
    for pool in tree.pools:
        pool.refer([cold.pages[pool.window > 0]])
        assert tree.victim(pool.window > 0) in (cold, second)
    assert tree.victim(0) is second
    # One with others behind it frees no global page, but its window.
    behind = add(tree, [2] * 30, 28, 4, base=second)
    assert tree.victim(0) is first
    assert tree.victim(1) in (cold, second)
    tree.touch(second)
    assert list(tree.boundaries)[-2:] == [behind, second]


def test_books_notice_mistakes():
    core = history_core(page_size=16)
    add_request(core, 1, PROMPT, GREEDY)
    run_to_end(core)
    cache = core.scheduler.cache
    check_books(cache, ())
    node = next(iter(cache.tree.boundaries))
    pool, page = cache.pools[0], node.pages[0]
    for break_it, mend in (
        (lambda: pool.hold([page]), lambda: pool.let_go([page])),
        (lambda: pool.refer([page]), lambda: pool.unrefer([page])),
        (lambda: cache.free_snapshots.append(node.snapshot), cache.free_snapshots.pop),
    ):
        break_it()
        with pytest.raises(AssertionError):
            check_books(cache, ())
        mend()
        check_books(cache, ())


@pytest.fixture(params=[None, (1, 2, 4, 8)], ids=["plain", "ahead"])
def mode(request, monkeypatch):
    monkeypatch.setattr(history_model, "BUCKETS", request.param)


class Failing(HistoryModel):
    """Raises in forward number `at`, counted from 0."""

    def __init__(self, at):
        super().__init__(before=self._count)
        self.left = at

    def _count(self, meta):
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("planted")


@pytest.mark.parametrize("at", range(1, 9, 2))
@pytest.mark.usefixtures("mode")
def test_a_failed_step_leaves_nothing_wrong(at):
    """A second request hits what the first left; one of their steps fails."""
    core = history_core(page_size=16, chunked_prefill_size=32, model=Failing(at))
    for order in range(1, 5):
        request = add_request(core, order, PROMPT, GREEDY)
        other = add_request(core, 10 + order, PROMPT[:40] + PROMPT[:9], GREEDY)
        while not core.idle:
            core.step()
            check_books(core.scheduler.cache, core.scheduler.running)
        for one in (request, other):
            if one.handle.reasons() != {0: "error"}:
                assert one.handle.tokens() == reference_tokens(one.prompt_ids, GREEDY)
    assert core.scheduler.cache.stats().hits > 0
    assert_empty(core)


@pytest.mark.usefixtures("mode")
def test_a_preempted_sequence_hits_what_it_left():
    core = history_core(page_size=16, chunked_prefill_size=32)
    request = add_request(core, 1, PROMPT, GREEDY)
    (sequence,) = request.sequences
    while sequence.generated < 11:
        core.step()
    core.scheduler.running.insert(0, None)  # _preempt refuses to preempt the last one
    core.scheduler._preempt(sequence)
    core.scheduler.running.remove(None)
    run_to_end(core)
    assert request.handle.tokens() == reference_tokens(PROMPT, GREEDY)
    stats = core.scheduler.cache.stats()
    assert stats.hits == 1
    assert stats.hit_tokens in (64, 80), "80 is known once the step that reached it is booked"
    assert sequence.cached_tokens == 0
    assert_empty(core)


def test_shared_pages_do_not_keep_a_sequence_waiting():
    """Six of ten pages hold the prompt of a running sequence; another with the same one needs two
    more."""
    core = history_core(page_size=16, max_total_tokens=160, chunked_prefill_size=16)
    prompt = PROMPT + PROMPT[:26]
    long = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    first = add_request(core, 1, prompt, long)
    while not first.handle.tokens():
        core.step()
    second = add_request(core, 2, prompt + PROMPT[:8], long)
    third = add_request(core, 3, PROMPT[::-1], long)
    core.step()
    assert second.sequences[0].slot
    assert not third.sequences[0].slot
    run_to_end(core)
    for request in (first, second, third):
        assert request.handle.tokens() == reference_tokens(request.prompt_ids, long)
    assert_empty(core)


@pytest.mark.usefixtures("mode")
def test_only_confirmed_tokens_are_in_the_tree():
    """Sequences that end by a stop id have a step in flight beyond it when they run ahead."""
    params = SamplingParams(max_new_tokens=60, seed=8, logit_bias={EOS: 3.5})
    core = history_core(page_size=1, max_running_requests=4)
    requests = [add_request(core, i, PROMPT[: 20 + i], params) for i in range(1, 5)]
    known = set()
    while not core.idle:
        core.step()
        for request in requests:
            tokens = request.sequences[0].tokens
            known |= {tuple(tokens[:end]) for end in range(1, len(tokens) + 1)}
        for node in core.scheduler.cache.tree.boundaries:
            path = core.scheduler.cache.tree.path(node, 0)
            assert tuple(token for node in path for token in node.key) in known
    assert_empty(core)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("moment", range(1, 14, 3))
def test_aborted_between_a_boundary_and_its_booking(moment):
    core = history_core(page_size=1, chunked_prefill_size=24)
    add_request(core, 1, PROMPT, GREEDY)
    for _ in range(moment):
        core.step()
    core.abort("r1")
    check_books(core.scheduler.cache, ())
    again = add_request(core, 2, PROMPT, GREEDY)
    run_to_end(core)
    assert again.handle.tokens() == reference_tokens(PROMPT, GREEDY)
    assert_empty(core)
