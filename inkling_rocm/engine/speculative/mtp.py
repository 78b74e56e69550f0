"""Drafts by the checkpoint's chained blocks (model/mtp.py).

A sequence has tokens t_0 .. t_K; the model has computed the positions below `end` = K. Depth m
reads, at position p, the token at p + m + 1 and the result of depth m - 1 at p, so with the drafts
d_1, d_2, ... taken for the tokens after t_K every depth can be run up to position K - 1, and its
logits there are those of d_(m+1). State made from drafts is provisional: it is final at position p
and depth m once t_(p+m+1) is known. Each step therefore computes all depths from `settled`, the
first position that was not final at the deepest, up to `end`: what a rejection left behind, or a
chunk that ended before the next token was known, is written again.

The model's hidden states of the last positions are kept by sequence slot for that.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.speculative.drafter import Confirmed
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.engine.upload import upload
from inkling_rocm.model.mtp import DraftBlocks


class MTPDrafter:
    """A Drafter over draft blocks, whose pages and rings are the host's.

    Args:
        keep_logits: keep what drafts are drawn from, for rejection sampling.

    Attributes:
        hidden: [slots, 2 depths, H], the model's hidden states by slot and position % (2 depths).
    """

    def __init__(
        self,
        blocks: DraftBlocks,
        host: EmbeddedHost,
        sampler: TokenSampler,
        *,
        keep_logits: bool = False,
    ):
        self.depths = blocks.depths
        self._blocks = blocks
        self._host = host
        self._sampler = sampler
        self._keep_logits = keep_logits
        text = blocks.model.config.text
        embed = blocks.model.weights["embed"]
        rings, device = host.rings, embed.device
        self.hidden = rings.add_storage(
            2 * self.depths, text.hidden_size, dtype=embed.dtype, device=device
        )
        slots = len(host.last_tokens)
        self.tokens = torch.full((slots, self.depths), -1, dtype=torch.int64, device=device)
        self.logits = None
        if keep_logits:
            shape = (slots, self.depths, text.unpadded_vocab_size)
            self.logits = torch.zeros(shape, dtype=torch.float32, device=device)

    def taps(self, num_tokens: int) -> dict[int, Tensor]:
        """See Drafter."""
        return {}

    def propose(self, confirmed: Confirmed) -> None:
        """See Drafter."""
        step, draft = confirmed.step, confirmed.step.draft
        assert draft is not None
        length = confirmed.end - draft.settled
        host, device = self._host, confirmed.hidden_TH.device
        host.prepare(step.slots, draft.settled, length, snapshots=step.snapshots)
        row = np.repeat(np.arange(len(length)), length)
        offset = np.arange(len(row)) - (np.cumsum(length) - length)[row]
        hidden_TH = self._hidden_states(confirmed, row, draft.settled[row] + offset)
        self._keep_hidden_states(confirmed)
        known, first, count = _known_tokens(confirmed)

        drafting = confirmed.drafting
        slots = upload(step.slots[drafting], device)
        tip = upload((np.cumsum(length) - 1)[drafting], device)
        is_drafting = np.zeros(len(length), bool)
        is_drafting[drafting] = True
        place = np.cumsum(is_drafting) - 1  # of a row among those drafting
        drafts_nN = torch.full((len(drafting), self.depths), -1, dtype=torch.int64, device=device)
        for depth in range(self.depths):
            at = offset + depth
            found = at < count[row]
            ids = upload(np.where(found, known[first[row] + np.where(found, at, 0)], 0), device)
            guessed = np.flatnonzero(~found & is_drafting[row])
            if len(guessed):
                source = row[guessed]
                drafted = drafts_nN[
                    upload(place[source], device), upload(at[guessed] - count[source], device)
                ]
                # Beyond the drafts that are made anything will do: it is written again.
                ids[upload(guessed, device)] = drafted.clamp(min=0)
            hidden_TH = self._blocks.forward(depth, ids, hidden_TH, host)
            if depth < draft.steps and len(drafting):
                logits_nV = self._blocks.model.logits(hidden_TH[tip], host)
                drafts_nN[:, depth] = self._sampler.draft(
                    logits_nV, confirmed.rows, depth, rejection=self._keep_logits
                )
                if self.logits is not None:
                    self.logits[slots, depth] = logits_nV
        self.tokens[slots] = drafts_nN

    def _hidden_states(self, confirmed: Confirmed, row: NDArray, position: NDArray) -> Tensor:
        """The model's hidden states of tokens (row, position): the step's, or those kept."""
        step, hidden_TH = confirmed.step, confirmed.hidden_TH
        kept = self.hidden.shape[1]
        start = step.q_start[row]
        old = np.flatnonzero(position < start)
        new = confirmed.first[row] + np.maximum(position - start, 0)
        found_TH = hidden_TH[upload(new, hidden_TH.device)]
        if len(old):
            at = step.slots[row[old]] * kept + position[old] % kept
            source = self.hidden.view(-1, hidden_TH.shape[1])
            found_TH[upload(old, hidden_TH.device)] = source[upload(at, hidden_TH.device)]
        return found_TH

    def _keep_hidden_states(self, confirmed: Confirmed) -> None:
        """Store those of the last confirmed positions."""
        step, hidden_TH = confirmed.step, confirmed.hidden_TH
        kept = self.hidden.shape[1]
        begin = np.maximum(step.q_start, confirmed.end - kept)
        length = confirmed.end - begin
        row = np.repeat(np.arange(len(length)), length)
        position = np.arange(len(row)) + (begin - (np.cumsum(length) - length))[row]
        source = upload(confirmed.first[row] + position - step.q_start[row], hidden_TH.device)
        target = upload(step.slots[row] * kept + position % kept, hidden_TH.device)
        self.hidden.view(-1, hidden_TH.shape[1])[target] = hidden_TH[source]


def _known_tokens(confirmed: Confirmed) -> tuple[NDArray, NDArray, NDArray]:
    """The tokens from position settled + 1 of each row on, those the step has found included.

    Returns: all of them in one array, which ends in one more element; where each row's begin, and
        how many there are, int64 [B].
    """
    draft = confirmed.step.draft
    assert draft is not None
    given = np.split(draft.known_ids, np.cumsum(draft.known_len)[:-1])
    parts = [
        part for ids, tokens in zip(given, confirmed.tokens, strict=True) for part in (ids, tokens)
    ]
    count = draft.known_len + np.array([len(tokens) for tokens in confirmed.tokens], np.int64)
    known = np.concatenate([*parts, [0]]).astype(np.int64)
    return known, np.cumsum(count) - count, count
