"""The radix tree: one node a page of tokens, and on some nodes a boundary where a sequence can go
on.

A boundary at position P is usable because everything a forward from P reads is there: the global
pages of [0, P), the window pages of the last keys before P, and a snapshot of the convolution
rings. Every leaf is a boundary, so that nothing is kept that no sequence can use.

With speculation the draft layers' state at a position depends on the next `lookahead` tokens too:
they are part of the key of a page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from inkling_rocm.engine.pages import PagePool


class Node:
    """The tokens of one page, after those of its parents.

    Attributes:
        depth: pages from the root to here. pages: one for each pool; 0 where none is held (of a
            window pool, where no boundary needs it). digest: of the tokens up to here, once known.
        users: boundaries whose window covers this page. snapshot: the ring slot that makes this a
            boundary, else 0. used: a sequence has started from the boundary.
    """

    __slots__ = (
        "children", "depth", "digest", "key", "pages", "parent", "snapshot", "used", "users",
    )  # fmt: skip

    def __init__(self, key: tuple[int, ...], parent: Node | None, pools: int):
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.digest: bytes | None = None
        self.pages = [0] * pools
        self.users = 0
        self.snapshot = 0
        self.used = False


class PrefixTree:
    """Nodes, what they hold of the pools, and the boundaries in order of their last use.

    Args:
        lookahead: tokens after a page that its state depends on.
    """

    def __init__(self, pools: tuple[PagePool, ...], *, lookahead: int = 0):
        self.pools = pools
        self.page_size = pools[0].page_size
        self.lookahead = lookahead
        self.root = Node((), None, len(pools))
        self.boundaries: OrderedDict[Node, None] = OrderedDict()  # least recently used first

    def key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        """What identifies page `index` after the pages before it; shorter where tokens end."""
        start = index * self.page_size
        return tuple(tokens[start : start + self.page_size + self.lookahead])

    def first_page(self, pool: PagePool, position: int) -> int:
        """The first page index of a pool that a sequence starting at `position` reads."""
        if not pool.window:
            return 0
        return max(position - (pool.window - 1), 0) // self.page_size

    def attached(self, node: Node) -> bool:
        """Whether a node is still in the tree."""
        return node is self.root or node.parent is not None

    def walk(self, node: Node, tokens: Sequence[int], end: int) -> Iterator[Node]:
        """The nodes below one along `tokens`, up to page index `end`."""
        for index in range(node.depth, end):
            found = node.children.get(self.key(tokens, index))
            if found is None:
                return
            yield found
            node = found

    def match(self, tokens: Sequence[int], most: int) -> tuple[Node, Node]:
        """The deepest boundary (the root where there is none) and the deepest node of a prefix, at
        positions up to `most`, with the tokens that follow it known."""
        end = min(most, len(tokens) - self.lookahead) // self.page_size
        boundary = node = self.root
        for node in self.walk(self.root, tokens, end):
            if node.snapshot:
                boundary = node
        return boundary, node

    def path(self, node: Node, first: int) -> list[Node]:
        """The nodes of page indices from `first` on down to `node`, in order."""
        nodes = []
        while node.parent is not None and node.depth > first:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def touch(self, node: Node, *, cold: bool = False) -> None:
        """Make a boundary the most recently used one, or the least."""
        self.boundaries.move_to_end(node, last=not cold)

    def add(
        self,
        base: Node,
        tokens: Sequence[int],
        position: int,
        pages: Sequence[tuple[int, Sequence[int]]],
        snapshot: int,
        *,
        cold: bool = False,
    ) -> Node:
        """Make `position` a boundary.

        Args:
            base: an attached node on the way. pages: for each pool the first page index and the
                pages from there up to `position`: of a global pool from below `base`, of a window
                pool from `first_page`. What the tree lacks of them it holds from here on.
        Returns: its node, with this snapshot, or with another where it was a boundary already.
        """
        end = position // self.page_size
        node = base
        for index in range(base.depth, end):
            key = self.key(tokens, index)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node, len(self.pools))
                for number, pool in enumerate(self.pools):
                    if not pool.window:
                        first, of_pool = pages[number]
                        self._put(child, number, of_pool[index - first])
            node = child
        if node.snapshot:
            self.touch(node)
            return node
        node.snapshot = snapshot
        self.boundaries[node] = None
        self.touch(node, cold=cold)
        for number, pool in enumerate(self.pools):
            if not pool.window:
                continue
            first, of_pool = pages[number]
            for user, page in zip(self.path(node, first), of_pool, strict=True):
                user.users += 1
                if not user.pages[number]:
                    self._put(user, number, page)
        return node

    def remove(self, node: Node, save: Callable[[Node, int], None] | None = None) -> int:
        """Make a node no boundary any more, and let go of what no other boundary needs.

        Args:    save: called with node and pool number before a page goes.
        Returns: the snapshot's slot.
        """
        snapshot, node.snapshot, node.used = node.snapshot, 0, False
        del self.boundaries[node]
        for number, pool in enumerate(self.pools):
            if not pool.window:
                continue
            for user in self.path(node, self.first_page(pool, node.depth * self.page_size)):
                user.users -= 1
                if not user.users:
                    self._drop(user, number, save)
        while node.parent is not None and not node.children and not node.snapshot:
            for number in range(len(self.pools)):
                self._drop(node, number, save)
            parent, node.parent = node.parent, None
            del parent.children[node.key]
            node = parent
        return snapshot

    def victim(self, number: int) -> Node:
        """The least recently used boundary without which a pool has more free pages, or may have
        after others have gone as well. The caller knows that the tree alone holds some."""
        pool = self.pools[number]

        def frees(node: Node) -> bool:
            if not pool.window:
                return not node.children and pool.only_cached(node.pages[number])
            first = self.first_page(pool, node.depth * self.page_size)
            return any(pool.only_cached(user.pages[number]) for user in self.path(node, first))

        # Where two sequences have computed the same tokens at once, the tree may hold pages of one
        # above a leaf whose page the other still uses.
        leaves = (node for node in self.boundaries if not node.children)
        return next(filter(frees, self.boundaries), None) or next(leaves)

    def _put(self, node: Node, number: int, page: int) -> None:
        node.pages[number] = page
        self.pools[number].hold((page,))

    def _drop(self, node: Node, number: int, save: Callable[[Node, int], None] | None) -> None:
        if node.pages[number]:
            if save is not None:
                save(node, number)
            self.pools[number].let_go((node.pages[number],))
            node.pages[number] = 0
