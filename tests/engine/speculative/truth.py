"""Drafts that are right as often as a test wants, and what draft blocks find in a fresh run."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from inkling_rocm.engine.sampler import sample
from inkling_rocm.model.mtp import text_with_drafts
from tests.engine.tiny import tiny_blocks, tiny_model
from tests.support.plain_host import PlainHost, Row


def drafter_of(engine):
    return engine._core.executor.speculation.drafter


class TruthfulSampler:
    """Replaces what an engine drafts: with probability `share` by the token that the sampler will
    draw there, computed by running the model on the sequence so far.

    Attributes: accepted: drafts that were accepted.
    """

    def __init__(self, engine, share: float):
        self.accepted = 0
        self.texts: dict[int, list[int]] = {}  # tokens of each slot, ahead of the engine's books
        self._drafted: list[list[int]] = []
        self._share = share
        self._rng = random.Random(1)
        self._engine = engine
        self._sampler = engine._core.executor.sampler
        drafter = drafter_of(engine)
        propose, verify = drafter.propose, self._sampler.verify

        def proposing(confirmed):
            running = {s.slot: s for s in engine._core.scheduler.running}
            slots = [int(confirmed.step.slots[b]) for b in confirmed.drafting]
            for slot, b in zip(slots, confirmed.drafting, strict=True):
                self.texts[slot] = [*running[slot].tokens, *confirmed.tokens[b]]
            self._drafted = [list(self.texts[slot]) for slot in slots]
            propose(confirmed)

        def verifying(logits, drafts, draft_logits, step, **kwargs):
            tokens = verify(logits, drafts, draft_logits, step, **kwargs)
            self.accepted += int((tokens >= 0).sum()) - len(tokens)
            if step.round is not None:
                slots = step.slots.tolist()
                for slot, found in zip(slots, tokens.tolist(), strict=True):
                    self.texts[slot] += [token for token in found if token >= 0]
                self._drafted = [list(self.texts[slot]) for slot in slots]
            return tokens

        drafter.propose = proposing
        self._sampler.verify = verifying
        self._sampler.draft = self._draft

    def _draft(self, logits_BV, rows, depth, *, rejection):
        config = self._engine.config
        for b, row in enumerate(rows):
            text = self._drafted[b]
            token = self._rng.randrange(logits_BV.shape[1])
            if self._rng.random() < self._share:
                host = PlainHost(config, num_requests=1, max_len=len(text))
                host.prepare([Row(1, 0, len(text))])
                model = tiny_model(config)
                hidden = model.forward(torch.tensor(text), host)
                token = self._draw(model.logits(hidden[-1:], host), row, depth)
            text.append(token)
        return torch.tensor([text[-1] for text in self._drafted])

    @staticmethod
    def _draw(logits, row, depth):
        return sample(logits, [replace(row, position=row.position + depth)], keep_logits=False)[0]


@torch.inference_mode()
def fresh_draft_logits(config, tokens, drafts, *, roll=0) -> torch.Tensor:
    """Logits of every depth at the last position the model can have computed, from one forward over
    all tokens.

    Args:    tokens: all that are known, the last one not computed yet. drafts: d_1, d_2, ...
             roll: positions by which the hidden states are moved, as a mistake.
    Returns: fp32 [depths, V].
    """
    model, blocks = tiny_model(config), tiny_blocks(config, len(drafts))
    length = len(tokens) - 1
    extended = replace(config, text=text_with_drafts(config, len(drafts)))
    host = PlainHost(extended, num_requests=1, max_len=length)
    host.prepare([Row(1, 0, length)])
    hidden = model.forward(torch.tensor(tokens[:length]), host).roll(roll, 0)
    following = [*tokens[1:], *drafts]
    found = []
    for depth in range(len(drafts)):
        ids = torch.tensor(following[depth : depth + length])
        hidden = blocks.forward(depth, ids, hidden, host)
        found.append(model.logits(hidden[-1:], host)[0])
    return torch.stack(found)
