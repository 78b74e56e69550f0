"""Which tokens run next: continuous batching over page pools that may run out.

Every step computes one token of each decoding sequence and, on top, at most `chunk_tokens` prompt
tokens. Rules:

- Sequences are admitted in order of arrival, preempted ones first; nothing overtakes a waiting
  request.
- Of the prompt budget the oldest running prefill is sure of half; the rest goes to the others,
  those with the least left first, and what they do not use goes back to the oldest. So a short
  prompt does not wait behind a long one, and the longest advances in every step.
- A decoding sequence also computes its drafts, if the pages for them are free.
- When pages run out the youngest running sequence gives up its pages and slot and is computed
  again later (its tokens are kept, so its output does not change). The oldest always advances:
  every request fits into the empty pools, which is checked when it is submitted. Pages of the
  prefix cache alone count as free, so it gives up its own before anyone is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from inkling_rocm.engine.pages import PagePool
from inkling_rocm.engine.prefix_cache import PrefixCache
from inkling_rocm.engine.rings import ConvRings
from inkling_rocm.engine.sequence import Request, Sequence


def _by_order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Scheduler:
    """Owns the sequences and decides on pools and slots.

    Args:
        chunk_tokens: most prompt tokens a step. max_running: most sequences in a batch.
        depths: draft blocks that run behind the model.

    Attributes:
        most_drafts: drafts of a sequence that are computed in one step.
        cache: what can be reused of prompts, kept in the snapshot slots of the rings.
    """

    def __init__(
        self,
        pools: tuple[PagePool, ...],
        rings: ConvRings,
        *,
        chunk_tokens: int,
        max_running: int,
        depths: int = 0,
        most_drafts: int = 0,
    ):
        self.pools = pools
        self.rings = rings
        self.cache = PrefixCache(pools, rings, lookahead=depths)
        self.chunk_tokens = chunk_tokens
        self.max_running = max_running
        self.depths, self.most_drafts = depths, most_drafts
        self.waiting: deque[Sequence] = deque()
        self.preempted: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request: its first continuation computes the prompt, the others wait for it."""
        for sequence in request.sequences:
            sequence.depths = self.depths
        first, *siblings = request.sequences
        first.siblings = siblings
        self.cache.prefetch(first)
        self.waiting.append(first)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.preempted or self.running)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The next batch: sequences and how many of their tokens to compute. Pages are
        allocated."""
        self._admit()
        batch = self._decodes()
        self._add_prefills(batch)
        return batch

    def round_rows(self) -> list[Sequence]:
        """The sequences that decode next, if nothing else could run beside them, else none."""
        if any(s.remaining > 1 for s in self.running) or self._admissible() is not None:
            return []
        return [s for s in self.running if not (s.pending and s.complete)]

    def grow_round(self, rows: Iterable[Sequence], drafts: int, in_flight: int) -> bool:
        """Allocate what a round writes to: after a round in flight that may have accepted every
        draft it may begin `in_flight` later. What no token can reach gets no page."""
        for sequence in rows:
            most = sequence.prompt_len + sequence.request.params.max_new_tokens
            ahead = (in_flight if sequence.pending else 0) + 1 + drafts
            if not self._grow(sequence, min(ahead, most - sequence.computed)):
                return False
        return True

    def release(self, sequence: Sequence) -> None:
        """Free what a sequence holds and forget it, whatever it was doing."""
        if sequence.slot:
            self._vacate(sequence)
        elif sequence in self.preempted:
            self.preempted.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def start_failed(self, batch: Iterable[Sequence]) -> None:
        """A step was not started: sequences outside its batch whose copies it had to make begin
        again."""
        copied = [*self.cache.failed(), *(s for s in self.running if s.forked)]
        for sequence in dict.fromkeys(copied):
            if sequence.slot and sequence not in batch:
                self._requeue(sequence)

    def fork(self, parent: Sequence) -> None:
        """Start the siblings of a sequence whose prompt has just been computed. Their tokens hold
        their first sampled one already."""
        length = parent.computed
        for child in parent.siblings:
            if child.finished:
                continue
            child.cached_tokens = parent.cached_tokens
            settled = max(length - child.depths, 0)  # draft blocks have read the parent's token
            if self._can_fork(length, settled):
                child.slot = self.rings.take()
                # Running from here on: a copy that fails (out of memory) must not lose the slot.
                insort(self.running, child, key=_by_order)
                self.rings.fork(parent.slot, child.slot)
                for pool in self.pools:
                    pool.fork(parent.slot, child.slot, length, settled)
                child.computed, child.forked = length, True
            else:
                insort(self.preempted, child, key=_by_order)
        parent.siblings = []

    def _can_fork(self, length: int, settled: int) -> bool:
        return (
            len(self.running) < self.max_running
            and self.rings.free > 0
            and all(pool.free >= pool.unshared(length, settled) for pool in self.pools)
        )

    def _admit(self) -> None:
        promised: list[int] | None = None
        while (sequence := self._admissible(promised)) is not None:
            promised = promised or self._promised(self.running)
            if self.preempted:
                self.preempted.pop(0)
            else:
                self.waiting.popleft()
            sequence.slot = self.rings.take()
            insort(self.running, sequence, key=_by_order)
            self.cache.attach(sequence)
            own = self._promised([sequence])
            promised = [pages + more for pages, more in zip(promised, own, strict=True)]

    def _admissible(self, promised: list[int] | None = None) -> Sequence | None:
        """The waiting sequence that can start now. Args: promised: what `_promised` says of those
        that run, if it is known."""
        queue = self.preempted or self.waiting
        room = len(self.running) < self.max_running and self.rings.free
        if not (room and queue):
            return None
        return queue[0] if self._fits(queue[0], promised) else None

    def _fits(self, sequence: Sequence, promised: list[int] | None) -> bool:
        """Whether the whole of a sequence can be computed beside what already runs, with a page
        left over for each running sequence so that it is not preempted at once."""
        if not self.running:
            return True
        promised = promised or self._promised(self.running)
        shared = self.cache.in_use(sequence)
        for pool, in_use, ahead in zip(self.pools, shared, promised, strict=True):
            wanted = self._pages(pool, sequence.length) - in_use + len(self.running)
            if pool.free - ahead < wanted:
                return False
        return True

    def _promised(self, sequences: Iterable[Sequence]) -> list[int]:
        """Pages of each pool that prompts still need."""
        prefills = [s for s in sequences if s.remaining > 1]
        return [
            sum(min(pool.missing(s.slot, s.length), self._pages(pool, s.length)) for s in prefills)
            for pool in self.pools
        ]

    def _pages(self, pool: PagePool, tokens: int) -> int:
        return pool.pages_for(tokens, self.chunk_tokens)

    def _decodes(self) -> list[tuple[Sequence, int]]:
        batch = []
        for sequence in list(self.running):
            if not sequence.slot or sequence.remaining != 1:
                continue
            if sequence.pending and sequence.complete:
                continue
            drafts = min(sequence.most_drafts, self.most_drafts)
            if drafts and not self._grow(sequence, 1 + drafts):
                drafts = 0
            while sequence.slot and not self._grow(sequence, 1):
                self._preempt(self.running[-1])
            if sequence.slot:
                batch.append((sequence, 1 + drafts))
        return batch

    def _add_prefills(self, batch: list[tuple[Sequence, int]]) -> None:
        prefills = [s for s in self.running if s.remaining > 1]
        for sequence, tokens in self._share(prefills):
            room = self.cache.limit(sequence, min(self._room(sequence), tokens))
            if room > 0 and self._grow(sequence, room):
                batch.append((sequence, room))
        while not batch and prefills:
            # Only prefills run and they hold all pages: the youngest makes room for the oldest.
            self._preempt(self.running[-1])
            room = min(self._room(prefills[0]), prefills[0].remaining, self.chunk_tokens)
            if prefills[0].slot and room > 0 and self._grow(prefills[0], room):
                batch.append((prefills[0], room))

    def _share(self, prefills: list[Sequence]) -> list[tuple[Sequence, int]]:
        """The prompt budget's division, the oldest first."""
        if not prefills:
            return []
        oldest, *others = prefills
        left = self.chunk_tokens
        sure = min(oldest.remaining, left - left // 2)
        shares = []
        left -= sure
        for sequence in sorted(others, key=lambda s: s.remaining):
            take = min(sequence.remaining, left)
            if take:
                shares.append((sequence, take))
                left -= take
        return [(oldest, min(oldest.remaining, sure + left)), *shares]

    def _room(self, sequence: Sequence) -> int:
        """Tokens of a sequence that could be computed with the free pages."""
        for pool in self.pools:
            pool.trim(sequence.slot, sequence.settled)
        return min(pool.room(sequence.slot) for pool in self.pools) - sequence.computed

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate pages for the next tokens of a sequence, in all pools or in none."""
        slot, length = sequence.slot, sequence.computed + tokens
        for pool in self.pools:
            pool.trim(slot, sequence.settled)
        if any(pool.missing(slot, length) > pool.free for pool in self.pools):
            return False
        for pool in self.pools:
            pool.extend(slot, length)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert len(self.running) > 1, (
            f"{sequence.request.rid}: alone and out of pages; submit lets only fitting requests in"
        )
        self._requeue(sequence)
        self.preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        insort(self.preempted, sequence, key=_by_order)

    def _vacate(self, sequence: Sequence) -> None:
        self.cache.forget(sequence)
        for pool in self.pools:
            pool.release(sequence.slot)
        self.rings.give_back(sequence.slot)
        sequence.slot = sequence.computed = sequence.drafts = 0
        sequence.forked = False
        self.running.remove(sequence)
