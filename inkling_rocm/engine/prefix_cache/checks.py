"""The books of the prefix cache as assertions, for tests and for hunting a fault in the field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from inkling_rocm.engine.prefix_cache.cache import PrefixCache
from inkling_rocm.engine.prefix_cache.tree import Node
from inkling_rocm.engine.sequence import Sequence


def check_books(cache: PrefixCache, running: Iterable[Sequence]) -> None:
    """Count everything anew between two steps: references are those of sequences, tree and
    captures, no page or snapshot is lost or owned twice, every boundary can be used.

    Args:   running: all sequences that have a slot.
    Raises: AssertionError.
    """
    nodes = list(_nodes(cache.tree.root))
    _check_tree(cache, nodes)
    for number, pool in enumerate(cache.pools):
        by_cache = Counter(node.pages[number] for node in nodes if node.pages[number])
        assert max(by_cache.values(), default=1) == 1, f"{pool.name}: two nodes hold one page"
        for capture in cache.captures:
            by_cache.update(capture.pages[number][1])
        references = Counter(by_cache)
        for sequence in running:
            first, end = pool.first[sequence.slot], pool.end[sequence.slot]
            references.update(pool.table[sequence.slot, first:end].tolist())
        assert 0 not in references, f"{pool.name}: the sink is in use"
        for page in range(1, pool.total + 1):
            found, held = pool.references[page], pool.held[page]
            assert found == references[page], f"{pool.name} page {page}: {found} references"
            assert held == by_cache[page], f"{pool.name} page {page}: held {held} times"
        assert pool.unused == pool.total - len(references), f"{pool.name}: pages were lost"
        assert pool.cached == len(by_cache)
        assert pool.reclaimable == sum(references[page] == held for page, held in by_cache.items())
    snapshots = [node.snapshot for node in nodes if node.snapshot] + cache.free_snapshots
    snapshots += [capture.snapshot for capture in cache.captures]
    assert sorted(snapshots) == list(cache.rings.snapshot_slots), f"snapshots: {snapshots}"


def _check_tree(cache: PrefixCache, nodes: list[Node]) -> None:
    tree = cache.tree
    users: Counter[Node] = Counter()
    assert {node for node in nodes if node.snapshot} == set(tree.boundaries)
    for node in tree.boundaries:
        for number, pool in enumerate(cache.pools):
            first = tree.first_page(pool, node.depth * tree.page_size)
            needed = tree.path(node, first)
            assert all(user.pages[number] for user in needed), f"{pool.name}: not usable"
            if pool.window:
                users.update(needed)
    for node in nodes:
        assert node.children or node.snapshot, "a leaf is no boundary"
        assert node.users == users[node]
        for number, pool in enumerate(cache.pools):
            if pool.window:
                assert bool(node.pages[number]) == bool(users[node])


def _nodes(root: Node) -> Iterable[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        for key, child in node.children.items():
            assert child.key == key
            assert child.parent is node
            assert child.depth == node.depth + 1
            waiting.append(child)
            yield child
