"""Rounds from fixed buffers on a CPU: what a GPU captures, called directly, running ahead."""

from __future__ import annotations

from inkling_rocm.engine.speculative.round_runner import RoundRunner
from tests.engine.speculative.truth import drafter_of, fresh_draft_logits

BUCKETS = (1, 3, 8)


class Rounds:
    """Gives an engine rounds; to be called before its first request.

    Attributes: run: how many were started. ahead: of these, before the one before was booked.
    """

    def __init__(self, engine, *, drafts=None, buckets=BUCKETS, before=None, **options):
        core = engine._core
        self.executor = executor = core.executor
        host, speculation = executor.host, executor.speculation
        drafter = speculation.drafter
        self.run = self.ahead = 0
        self.runner = executor.rounds = RoundRunner(
            drafter._blocks,
            host,
            drafter,
            executor.sampler.for_rounds(rejection=speculation._rejection),
            buckets=buckets,
            drafts=(drafter.depths,) if drafts is None else drafts,
            max_kv=host.pools[0].table.shape[1] * host.pools[0].page_size,
            simulated=speculation.simulated,
            **options,
        )
        executor.runs_ahead = True
        run = executor.rounds.run

        def counted(step):
            self.run += 1
            self.ahead += core._flight is not None
            if before is not None:
                before(step)
            return run(step)

        executor.rounds.run = counted


class DraftErrors:
    """Compares what an engine's drafts are drawn from with a fresh run, after every step of
    whatever kind. To be made after TruthfulSampler and Rounds.

    Attributes: found: largest difference of each row, step by step.
    """

    def __init__(self, engine, truthful):
        self.found: list[float] = []
        self._config = engine.config
        self._drafter = drafter = drafter_of(engine)
        self._texts = truthful.texts
        executor, propose = engine._core.executor, drafter.propose

        def proposing(confirmed):
            propose(confirmed)
            self._compare(confirmed.step.slots[confirmed.drafting])

        drafter.propose = proposing
        if executor.rounds is not None:
            run = executor.rounds.run

            def running(step):
                result = run(step)
                page_size = executor.host.pools[0].page_size
                slots = step.slots.tolist()
                # A row that has ended, unknown to the host, may be behind its pages.
                room = [int(end) * page_size for end in step.tables[0].end]
                rows = zip(slots, room, strict=True)
                self._compare([s for s, r in rows if len(self._texts[s]) <= r + 1])
                return result

            executor.rounds.run = running

    def _compare(self, slots):
        for slot in map(int, slots):
            drafts = self._drafter.tokens[slot].tolist()
            want = fresh_draft_logits(self._config, self._texts[slot], drafts)
            error = (self._drafter.logits[slot] - want).abs().max()
            self.found.append(float(error.nan_to_num(nan=float("inf"))))
