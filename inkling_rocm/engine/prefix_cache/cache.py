"""The prefix cache as the scheduler and the core see it.

The life of a boundary: `plan` reserves a snapshot slot for a row of the next step that passes one;
`started` holds its pages, which the sequence may free before the step has run; `publish` puts it in
the tree once the step is booked and all its tokens are known. Whatever happens in between,
`forget`, `failed` and `drop` undo it. The boundary of a prompt chunk is snapshot by the forward
itself, one that a decode step reaches by a copy of the ring before the next step. With speculation
it is known only when a step is booked which boundary its decoding rows have passed; then all that
is done at once.

A running sequence keeps the boundary of its last page only: the next one replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import partial

from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.prefix_cache.stats import CacheStats
from inkling_rocm.engine.prefix_cache.tiers import Tiers
from inkling_rocm.engine.prefix_cache.tree import Node, PrefixTree
from inkling_rocm.engine.rings import ConvRings
from inkling_rocm.engine.sequence import Sequence

# Boundaries of a decoding sequence are at least this far apart, and a forward is cut in two for a
# boundary where prompts part only if that is this far behind the nearest one before it.
LEAST_TOKENS = 16
# Boundaries to look for in the tiers when entries turn out to be lost.
LOAD_ATTEMPTS = 3


@dataclass(eq=False, kw_only=True)
class Capture:
    """A boundary in the making.

    Attributes:
        cold: give it up before any other. running: it replaces the last one of its sequence.
        by_copy: the ring is copied after the step.
        base: a node of the tree on the way to it. pages: held for it, as PrefixTree.add takes them.
        dropped: it will not be, or is, in the tree.
    """

    sequence: Sequence
    position: int
    snapshot: int
    cold: bool
    running: bool
    by_copy: bool
    base: Node = field(init=False)
    pages: list[tuple[int, list[int]]] = field(default_factory=list)
    dropped: bool = False


class PrefixCache:
    """Books of what can be reused; without snapshot slots it never finds nor keeps anything.

    Args:
        lookahead: tokens after a position that its state depends on (draft blocks).

    Attributes:
        tiers: where what is given up goes, and may come back from; None = nowhere.
    """

    def __init__(self, pools: tuple[PagePool, ...], rings: ConvRings, *, lookahead: int = 0):
        self.pools = pools
        self.rings = rings
        self.tree = PrefixTree(pools, lookahead=lookahead)
        self.tiers: Tiers | None = None
        self.page_size = self.tree.page_size
        self.free_snapshots = list(rings.snapshot_slots)
        self.captures: list[Capture] = []  # started and not yet published
        self._planned: list[Capture] = []
        self._attached: list[Sequence] = []  # since the last step that was started
        self._tips: dict[Sequence, Node] = {}  # the deepest node known for a running sequence
        self._last: dict[Sequence, Node] = {}  # its boundary that the next one replaces
        self._branches: dict[Sequence, int] = {}  # where others have left its prompt
        self._rounds: dict[Sequence, int] = {}  # decoding with drafts: settled before the step
        self._interval = -(-LEAST_TOKENS // self.page_size) * self.page_size
        self._snapshots = len(self.free_snapshots)
        self._lookups = self._hits = self._hit_tokens = 0
        self._evictions = {"snapshots": 0, **{pool.name: 0 for pool in pools}}
        for number, pool in enumerate(pools):
            pool.reclaim = partial(self._reclaim, number)

    def attach(self, sequence: Sequence) -> None:
        """Let a sequence that has a slot and nothing computed begin behind the longest prefix that
        can be reused. At least one token, and the lookahead, are left to compute."""
        if not self._snapshots:
            return
        self._lookups += 1
        most = min(len(sequence.tokens) - 1, self._needless(sequence)) - self.tree.lookahead
        if self.tiers is not None:
            self._load(self.tiers, sequence.tokens, most)
        boundary, common = self.tree.match(sequence.tokens, most)
        position = boundary.depth * self.page_size
        if common.depth * self.page_size - position >= self._interval:
            self._branches[sequence] = common.depth * self.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = position
        if boundary is self.tree.root:
            return
        self._hits += 1
        self._hit_tokens += position
        self.tree.touch(boundary)
        boundary.used = True
        for number, pool in enumerate(self.pools):
            first = self.tree.first_page(pool, position)
            pages = [node.pages[number] for node in self.tree.path(boundary, first)]
            pool.share(sequence.slot, first, pages)
        self.rings.fork(boundary.snapshot, sequence.slot)
        sequence.computed = position
        self._tips[sequence] = boundary
        self._attached.append(sequence)

    def in_use(self, sequence: Sequence) -> list[int]:
        """Pages of each pool that a waiting sequence would share with those that run."""
        most = min(len(sequence.tokens) - 1, self._needless(sequence)) - self.tree.lookahead
        boundary, _ = self.tree.match(sequence.tokens, most)
        path = self.tree.path(boundary, 0)
        first = [self.tree.first_page(pool, len(path) * self.page_size) for pool in self.pools]
        return [
            sum(not pool.only_cached(node.pages[number]) for node in path[first[number] :])
            for number, pool in enumerate(self.pools)
        ]

    def limit(self, sequence: Sequence, tokens: int) -> int:
        """How many of the next `tokens` of a prompt to compute: a chunk ends where prompts part, so
        that the next one of them finds a boundary there."""
        ahead = self._branches.get(sequence, 0) - sequence.computed
        return ahead if 0 < ahead < tokens else tokens

    def plan(self, sequence: Sequence, tokens: int) -> tuple[int, int]:
        """Choose the boundary to keep of a row of the next step.

        Returns: the snapshot slot and position that its forward is to fill; (0, 0) = none.
        """
        if sequence.remaining == 1 and (tokens > 1 or self.tree.lookahead):
            self._rounds.setdefault(sequence, sequence.settled)
            return 0, 0
        end = sequence.computed + tokens
        by_copy = tokens == 1
        grid = self._interval if by_copy else self.page_size
        position = min(end, sequence.length - self.tree.lookahead) // grid * grid
        if position <= sequence.computed or not self._snapshots:
            return 0, 0
        if not sequence.pending and self._exists(sequence, position):
            return 0, 0
        snapshot = self._take_snapshot()
        if not snapshot:
            return 0, 0
        capture = Capture(
            sequence=sequence,
            position=position,
            snapshot=snapshot,
            cold=sequence.remaining > tokens and position != self._branches.get(sequence),
            running=position > sequence.prompt_len,
            by_copy=by_copy,
        )
        self._planned.append(capture)
        return (0, 0) if by_copy else (snapshot, position)

    def started(self) -> list[Capture]:
        """The step that was planned has been started.

        Returns: what to `publish` or `drop` when it has run.
        """
        started, self._planned = self._planned, []
        self._attached = []
        for capture in started:
            self._hold(capture)
        return started

    def failed(self) -> list[Sequence]:
        """The step that was planned could not be started: whether its ring copies have been made is
        unknown, so nothing that may depend on them is kept.

        Returns: sequences whose rings may be wrong.
        """
        for capture in self._planned:
            self._drop(capture)
        self.drop(list(self.captures))
        self._rounds.clear()
        self.clear()
        attached, self._planned, self._attached = self._attached, [], []
        return attached

    def publish(self, captures: Rows[Capture]) -> None:
        """A step has been booked: its boundaries can be reused from now on."""
        for capture in captures:
            if not capture.dropped:
                self._publish(capture)
        self.drop(captures)
        for sequence, before in self._rounds.items():
            self._publish_passed(sequence, before)
            self._rounds[sequence] = sequence.settled

    def _publish(self, capture: Capture) -> None:
        sequence = capture.sequence
        known = len(sequence.tokens) >= capture.position + self.tree.lookahead
        if not known or sequence.finished == "error" or not self.tree.attached(capture.base):
            return
        node = self.tree.add(
            capture.base,
            sequence.tokens,
            capture.position,
            capture.pages,
            capture.snapshot,
            cold=capture.cold,
        )
        self._tips[sequence] = node
        last = self._last.pop(sequence, None) if capture.running else None
        if node.snapshot == capture.snapshot:
            capture.snapshot = 0  # the tree's now
            if capture.running:
                self._last[sequence] = node
        if last is not None and last.snapshot and not last.used:
            self._evict(last, save=False)

    def _publish_passed(self, sequence: Sequence, before: int) -> None:
        """Make the boundary reusable that the settled tokens of a sequence have passed since they
        were `before`. For speculation, where that is known when a step is booked; the one after it
        may have been started, and leaves the rings' rows at the boundary alone."""
        position = sequence.settled // self._interval * self._interval
        if position <= before or sequence.finished == "error" or not self._snapshots:
            return
        if self._exists(sequence, position):
            return
        snapshot = self._take_snapshot()
        if snapshot:
            capture = Capture(
                sequence=sequence,
                position=position,
                snapshot=snapshot,
                cold=False,
                running=True,
                by_copy=True,
            )
            self._hold(capture)
            self._publish(capture)
            self.drop([capture])

    def drop(self, captures: Rows[Capture]) -> None:
        """Undo captures that were not published."""
        for capture in captures:
            if not capture.dropped:
                self.captures.remove(capture)
                self._drop(capture)

    def forget(self, sequence: Sequence) -> None:
        """A sequence gives up its slot; what it has published stays."""
        self.drop([c for c in self.captures if c.sequence is sequence])
        for books in (self._tips, self._last, self._branches, self._rounds):
            books.pop(sequence, None)

    def clear(self) -> None:
        """Forget everything that could be reused."""
        while self.tree.boundaries:
            self._evict(next(iter(self.tree.boundaries)), save=False)

    def save(self) -> None:
        """Give everything to the tiers."""
        if self.tiers is not None:
            while self.tree.boundaries:
                self._evict(next(iter(self.tree.boundaries)))

    def close(self) -> None:
        """End the tiers; what they hold is written to the disk first."""
        if self.tiers is not None:
            self.tiers.store.close()

    def prefetch(self, sequence: Sequence) -> None:
        """A sequence waits to begin: read from the disk what it may need."""
        if self.tiers is not None and self._needless(sequence):
            self.tiers.prefetch(sequence.tokens)

    def stats(self) -> CacheStats | None:
        """The counts as they are now; None where nothing can be kept."""
        if not self._snapshots:
            return None
        return CacheStats(
            lookups=self._lookups,
            hits=self._hits,
            hit_tokens=self._hit_tokens,
            evictions=dict(self._evictions),
            boundaries=len(self.tree.boundaries),
            pages={pool.name: pool.cached for pool in self.pools},
            snapshots=self._snapshots,
            tiers=None if self.tiers is None else self.tiers.stats(),
        )

    def _hold(self, capture: Capture) -> None:
        """Refer to the pages of a boundary, and have its rings copied if the forward does not."""
        slot, last = capture.sequence.slot, capture.position // self.page_size
        capture.base = self._tip(capture.sequence)
        for pool in self.pools:
            first = capture.base.depth
            if pool.window:
                first = self.tree.first_page(pool, capture.position)
            assert pool.first[slot] <= first, f"{pool.name}: a page was trimmed too early"
            pages = pool.table[slot, first:last].tolist()
            pool.hold(pages)
            capture.pages.append((first, pages))
        if capture.by_copy:
            self.rings.fork(slot, capture.snapshot)
        self.captures.append(capture)

    def _tip(self, sequence: Sequence) -> Node:
        tip = self._tips.get(sequence, self.tree.root)
        return tip if self.tree.attached(tip) else self.tree.root

    def _exists(self, sequence: Sequence, position: int) -> bool:
        """Whether a sequence's next boundary is there already."""
        depth, node = position // self.page_size, self._tip(sequence)
        for found in self.tree.walk(node, sequence.tokens, depth):
            node = found
        if node.depth < depth or not node.snapshot:
            return False
        self.tree.touch(node)
        self._tips[sequence] = node
        return True

    def _needless(self, sequence: Sequence) -> int:
        """Tokens whose logits nobody needs any more."""
        request = sequence.request
        if request.wants_logits:
            return sum(map(len, request.prompt_logits))
        if request.prompt_logprobs and sequence.index == 0:
            scored = len(request.scored) - 1
            return scored if scored < sequence.prompt_len - 1 else sequence.length
        return sequence.length

    def _take_snapshot(self) -> int:
        if not self.free_snapshots and self.tree.boundaries:
            self._evictions["snapshots"] += 1
            self._evict(next(iter(self.tree.boundaries)))
        return self.free_snapshots.pop() if self.free_snapshots else 0

    def _reclaim(self, number: int) -> None:
        """Give up pages until the pool has one."""
        pool = self.pools[number]
        while not pool.unused:
            held = (c for c in self.captures if any(map(pool.only_cached, c.pages[number][1])))
            capture = next(held, None)
            if capture is not None:
                self.drop([capture])
            else:
                self._evictions[pool.name] += 1
                self._evict(self.tree.victim(number))

    def _evict(self, node: Node, *, save: bool = True) -> None:
        """Give up a boundary, to the tiers if there are any."""
        if save and self.tiers is not None:
            self.tiers.save_snapshot(node)
            snapshot = self.tree.remove(node, self.tiers.save_page)
        else:
            snapshot = self.tree.remove(node)
        self.free_snapshots.append(snapshot)

    def _load(self, tiers: Tiers, tokens: Rows[int], most: int) -> None:
        """Bring the longest prefix to the device that tiers and tree have together, if that is
        longer than what the tree has."""
        if tiers.find(tokens, most) is None:
            return
        snapshot = self._take_snapshot()  # it may cost the tree what was found
        for _ in range(LOAD_ATTEMPTS):
            found = tiers.find(tokens, most)
            if not snapshot or found is None:
                break
            node = tiers.load(found, tokens, snapshot)
            if node is not None and node.snapshot == snapshot:
                return
            most = found.position - 1
        if snapshot:
            self.free_snapshots.append(snapshot)

    def _drop(self, capture: Capture) -> None:
        for pool, (_, pages) in zip(self.pools, capture.pages, strict=False):
            pool.let_go(pages)
        if capture.snapshot:
            self.free_snapshots.append(capture.snapshot)
        capture.dropped = True
