"""Drafts that are often right in engines whose rounds draw on the device, and what they leave."""

from __future__ import annotations

import random
from collections.abc import Mapping

from tests.engine.speculative.truth import drafter_of, fresh_draft_logits

Texts = Mapping[tuple[tuple[int, ...], int], list[int]]


class KnownTexts:
    """Replaces the drafts of rounds, with probability `share` each, by what is known to come; to
    be made before the engine's first request.

    Args:
        texts: by prompt and continuation, prompt and output.
        compare: the config with whose CPU model the draft logits that a round leaves are compared;
            for greedy requests, and an engine that keeps them (rejection sampling).
        roll: see fresh_draft_logits.

    Attributes: errors: largest difference of each row and round.
    """

    def __init__(self, engine, texts: Texts, share: float, *, compare=None, roll=0):
        self.errors: list[float] = []
        self._engine, self._texts, self._share, self._config = engine, texts, share, compare
        self._rng, self._roll = random.Random(1), roll
        self._drafter = drafter_of(engine)
        self._runner = runner = engine._core.executor.rounds
        assert runner is not None, "rounds were not captured"
        run = runner.run

        def running(step):
            self._put(step)
            result = run(step)
            if compare is not None:
                self._compare(step)
            return result

        runner.run = running

    def accepted(self) -> int:
        """Drafts so far."""
        return sum(self._engine.stats().speculation.accepted)

    def _rows(self, step):
        """Slot and text of each row."""
        running = {s.slot: s for s in self._engine._core.scheduler.running}
        for slot in step.slots.tolist():
            sequence = running[slot]
            prompt = tuple(sequence.tokens[: sequence.prompt_len])
            yield slot, self._texts[prompt, sequence.index]

    def _put(self, step):
        tokens = self._drafter.tokens
        for (slot, text), given in zip(self._rows(step), step.round.start.tolist(), strict=True):
            start = int(self._runner.length[slot]) if given < 0 else given
            made = tokens[slot, : step.round.drafts].tolist()
            coming = zip(made, text[start + 1 :], strict=False)
            for depth, (draft, token) in enumerate(coming):
                if draft >= 0 and self._rng.random() < self._share:
                    tokens[slot, depth] = token

    def _compare(self, step):
        room = step.tables[0].end * self._engine._core.scheduler.pools[0].page_size
        for (slot, text), allocated in zip(self._rows(step), room.tolist(), strict=True):
            end = int(self._runner.length[slot])
            if end + 1 > len(text) or end > allocated:
                continue  # it has ended, unknown to the host
            drafts = self._drafter.tokens[slot].tolist()
            want = fresh_draft_logits(self._config, text[: end + 1], drafts, roll=self._roll)
            error = (self._drafter.logits[slot].cpu() - want).abs().max()
            self.errors.append(float(error.nan_to_num(nan=float("inf"))))
