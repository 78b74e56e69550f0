"""Between the tree and the stores: what the tree gives up is put there, and what it lacks for a
longer hit is taken from there.

Keys are a chain of hashes: a page's is that of its parent and its own tokens, a boundary's that of
its last page. So an entry is only found behind the very tokens it was computed from.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.prefix_cache.stats import TiersStats
from inkling_rocm.engine.prefix_cache.store import HostStore
from inkling_rocm.engine.prefix_cache.transfer import page_views, restore, slot_views
from inkling_rocm.engine.prefix_cache.tree import Node, PrefixTree
from inkling_rocm.engine.rings import ConvRings

logger = logging.getLogger(__name__)

SNAPSHOT = b"snapshot"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A boundary that can be put together from the tree and the stores.

    Attributes:
        base: the deepest node of the tree on the way to it. digests: of each page before it.
    """

    position: int
    base: Node
    digests: list[bytes]


class Tiers:
    """Entries of one model's state.

    Args:
        fingerprint: StateFingerprint.digest(), where every chain of keys begins.
    """

    def __init__(
        self,
        store: HostStore,
        tree: PrefixTree,
        rings: ConvRings,
        fingerprint: bytes,
    ):
        self.store = store
        self._loads = self._failed_loads = 0
        self._tree = tree
        self._rings = rings
        self._pools = tree.pools
        self._device = tree.pools[0].storage.device
        tree.root.digest = fingerprint

    def stats(self) -> TiersStats:
        lower = self.store.lower
        return TiersStats(
            loads=self._loads,
            failed_loads=self._failed_loads,
            host=self.store.stats(),
            disk=None if lower is None else lower.stats(),
        )

    def save_page(self, node: Node, number: int) -> None:
        """Put the page that a node holds of a pool."""
        pool = self._pools[number]
        key = _entry(self._digest(node), pool.name.encode())
        self._put(key, page_views(pool, node.pages[number]))

    def save_snapshot(self, node: Node) -> None:
        """Put a boundary's snapshot."""
        self._make_copies()
        key = _entry(self._digest(node), SNAPSHOT)
        self._put(key, slot_views(self._rings, node.snapshot))

    def prefetch(self, tokens: Sequence[int]) -> None:
        """Begin to read from the disk what a sequence with these tokens may hit."""
        if self.store.lower is None:
            return
        found = self.find(tokens, len(tokens) - 1 - self._tree.lookahead)
        if found is not None:
            keys = (key for _, _, key in self._missing(found))
            self.store.prefetch([*keys, _entry(found.digests[-1], SNAPSHOT)])

    def find(self, tokens: Sequence[int], most: int) -> Found | None:
        """The last boundary at most at `most` of which tree and tiers together have each part; None
        where the tree alone has it, or there is none."""
        tree = self._tree
        known, _ = tree.match(tokens, most)
        end = min(most, len(tokens) - tree.lookahead) // tree.page_size
        nodes = list(tree.walk(tree.root, tokens, end))
        digests = [self._digest(node) for node in nodes]
        whole = [pool.name.encode() for pool in self._pools if not pool.window]
        for index in range(len(nodes), end):
            before = digests[-1] if digests else self._digest(tree.root)
            digest = _chain(before, tree.key(tokens, index))
            if not all(self.store.contains(_entry(digest, name)) for name in whole):
                break
            digests.append(digest)
        for depth in range(len(digests), known.depth, -1):
            if not self.store.contains(_entry(digests[depth - 1], SNAPSHOT)):
                continue
            base = nodes[depth - 1] if depth <= len(nodes) else (nodes or [tree.root])[-1]
            found = Found(position=depth * tree.page_size, base=base, digests=digests[:depth])
            if all(self.store.contains(key) for _, _, key in self._missing(found)):
                return found
        return None

    def load(self, found: Found, tokens: Sequence[int], snapshot: int) -> Node | None:
        """Bring what is missing of a boundary to the device and into the tree.

        Args:    snapshot: a free slot.
        Returns: its node; None = an entry was lost after all, or there are too few pages.
        """
        self._make_copies()  # they may concern pages and slots that are free by now
        path = self._tree.path(found.base, 0)
        missing = self._missing(found)
        pages: list[dict[int, int]] = []  # by page index, of each pool
        for number, pool in enumerate(self._pools):
            first = self._tree.first_page(pool, found.position)
            pages.append({n.depth - 1: n.pages[number] for n in path[first:] if n.pages[number]})
            # Taking pages makes the tree give up others; not those.
            pool.refer(pages[-1].values())
        try:
            for number, index, key in missing:
                pool = self._pools[number]
                entry = self._get(key) if pool.free else None
                if entry is None:
                    self._failed_loads += 1
                    return None
                page = pages[number][index] = pool.take()
                restore(page_views(pool, page), entry)
            entry = self._get(_entry(found.digests[-1], SNAPSHOT))
            if entry is None or not self._tree.attached(found.base):
                self._failed_loads += 1
                return None
            restore(slot_views(self._rings, snapshot), entry)
            self._loads += 1
            return self._tree.add(
                found.base,
                tokens,
                found.position,
                [self._behind(found, number, of_pool) for number, of_pool in enumerate(pages)],
                snapshot,
            )
        finally:
            for pool, of_pool in zip(self._pools, pages, strict=True):
                pool.unrefer(of_pool.values())

    def _behind(self, found: Found, number: int, pages: dict[int, int]) -> tuple[int, list[int]]:
        """Pages of a pool as PrefixTree.add takes them."""
        first = self._first(found, self._pools[number])
        end = found.position // self._tree.page_size
        return first, [pages[index] for index in range(first, end)]

    def _missing(self, found: Found) -> list[tuple[int, int, bytes]]:
        """Pool, page index and key of the pages that the tree does not have."""
        path = self._tree.path(found.base, 0)
        return [
            (number, index, _entry(found.digests[index], pool.name.encode()))
            for number, pool in enumerate(self._pools)
            for index in range(self._first(found, pool), len(found.digests))
            if index >= len(path) or not path[index].pages[number]
        ]

    def _first(self, found: Found, pool: PagePool) -> int:
        return self._tree.first_page(pool, found.position) if pool.window else found.base.depth

    def _put(self, key: bytes, tensors: Mapping[str, Tensor]) -> None:
        """Without memory for the copy the entry is lost, not the engine."""
        try:
            self.store.put(key, tensors)
        except torch.OutOfMemoryError as error:
            logger.warning("prefix cache: an entry was not kept: %s", error)

    def _get(self, key: bytes) -> dict[str, Tensor] | None:
        """None = a miss, or no memory for the copy."""
        try:
            return self.store.get(key, self._device)
        except torch.OutOfMemoryError as error:
            logger.warning("prefix cache: an entry was not read: %s", error)
            return None

    def _make_copies(self) -> None:
        """Make the copies now that wait for the next step: the same on the device, whose order is
        the order they are asked for."""
        self._rings.copy(self._rings.take_copies())
        for pool in self._pools:
            pool.copy_pages(pool.take_copies())

    def _digest(self, node: Node) -> bytes:
        unknown = []
        while node.digest is None:
            assert node.parent is not None
            unknown.append(node)
            node = node.parent
        digest = node.digest
        for node in reversed(unknown):
            digest = node.digest = _chain(digest, node.key)
        return digest


def _chain(parent: bytes, key: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + array("q", key).tobytes()).digest()


def _entry(digest: bytes, part: bytes) -> bytes:
    return hashlib.sha256(digest + part).digest()
