"""Drafts by a DFlash model (model/dflash.py): one forward of the draft fills a whole block.

Its keys and values of position p depend on the model's features at p alone, so they lie in the same
pages, under the same page tables, as those of the model's global layers: forks, preemption, shared
prefixes and frees need nothing of their own. A step writes the positions that it has confirmed and
no others; what a block computes for itself is never stored. So there is nothing provisional: every
position below `end` is final, whatever was drafted or rejected.

Every rank of a tensor-parallel group holds all of the draft; embedding and head are the model's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.speculative.drafter import Confirmed
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.engine.upload import upload
from inkling_rocm.model import InklingModel
from inkling_rocm.model.dflash import DFlashModel, DraftCache
from inkling_rocm.ops.embed import look_up

logger = logging.getLogger(__name__)


class DFlashDrafter:
    """A Drafter over a block draft, whose pages are the host's.

    Args:
        drafts: of a row and round; the draft's block is one longer.
        keep_logits: keep what drafts are drawn from, for rejection sampling.
    Raises: ValueError: the model has no global layer, so no page keeps every position.
    """

    def __init__(
        self,
        draft: DFlashModel,
        model: InklingModel,
        host: EmbeddedHost,
        sampler: TokenSampler,
        *,
        drafts: int,
        keep_logits: bool = False,
    ):
        pools = [pool for pool in host.pools if not pool.window]
        if not pools:
            raise ValueError(
                "speculative_algorithm DFLASH keeps its keys and values in the pages of global "
                "layers, and this model has none"
            )
        self.depths = drafts
        self._draft = draft
        self._model = model
        self._host = host
        self._sampler = sampler
        self._keep_logits = keep_logits
        self._pool = pools[0]
        config, text = draft.config, model.config.text
        most = self._pool.table.shape[1] * self._pool.page_size
        if config.context_length < most:
            logger.warning(
                "the draft was made for %d positions, up to %d will be drafted for: beyond its own "
                "expect fewer accepted drafts",
                config.context_length,
                most,
            )
        embed = model.weights["embed"]
        self._cache = DraftCache(
            storage=self._pool.add_layers(config.num_layers, config.num_kv_heads, config.head_dim)
        )
        slots, device = len(host.last_tokens), embed.device
        self.tokens = torch.full((slots, drafts), -1, dtype=torch.int64, device=device)
        self.logits = None
        if keep_logits:
            shape = (slots, drafts, text.unpadded_vocab_size)
            self.logits = torch.zeros(shape, dtype=torch.float32, device=device)
        self._features_TF = embed.new_empty(0)

    def taps(self, num_tokens: int) -> dict[int, Tensor]:
        """See Drafter."""
        layers, H = self._draft.config.target_layer_ids, self._model.config.text.hidden_size
        embed = self._model.weights["embed"]
        self._features_TF = embed.new_empty(num_tokens, len(layers) * H)
        return dict(zip(layers, self._features_TF.split(H, dim=1), strict=True))

    def propose(self, confirmed: Confirmed) -> None:
        """See Drafter."""
        step, device = confirmed.step, confirmed.hidden_TH.device
        assert step.draft is not None
        length = confirmed.end - step.q_start
        row = np.repeat(np.arange(len(length)), length)
        offset = np.arange(len(row)) - (np.cumsum(length) - length)[row]
        positions = step.q_start[row] + offset
        slots = self._pool.write_slots(step.slots[row], positions)
        self._draft.write_context(
            self._features_TF[upload(confirmed.first[row] + offset, device)],
            upload(positions, device),
            upload(slots, device),
            self._cache,
        )
        drafting = confirmed.drafting
        if not len(drafting):
            return
        at = upload(step.slots[drafting], device)
        self.tokens[at] = -1
        if step.draft.steps:
            self._draft_blocks(confirmed, at, step.draft.steps)

    def _draft_blocks(self, confirmed: Confirmed, slots_n: Tensor, steps: int) -> None:
        """Fill a block of 1 + steps positions for each row that has got tokens."""
        drafting, device = confirmed.drafting, slots_n.device
        ids = np.full((len(drafting), 1 + steps), self._draft.config.mask_token_id, np.int64)
        ids[:, 0] = [confirmed.tokens[row][-1] for row in drafting]
        comm = self._host.comm
        x_nMH = look_up(upload(ids, device), self._model.weights["embed"], comm)
        table = self._pool.batch_table(confirmed.step.slots[drafting])
        hidden_nMH = self._draft.forward(
            x_nMH, upload(confirmed.end[drafting], device), upload(table, device), self._cache
        )
        logits_TV = self._model.logits(hidden_nMH[:, 1:].flatten(0, 1), self._host)
        if self.logits is not None:
            self.logits[slots_n, :steps] = logits_TV.unflatten(0, (-1, steps))
        rows = _at_every_depth(confirmed.rows, steps)
        drafts_T = self._sampler.draft(logits_TV, rows, 0, rejection=self._keep_logits)
        self.tokens[slots_n, :steps] = drafts_T.view(-1, steps)


def _at_every_depth(rows: Sequence[SampleRow], steps: int) -> list[SampleRow]:
    """How each draft of each row is drawn, row after row: the block gives them all at once."""
    return [replace(row, position=row.position + depth) for row in rows for depth in range(steps)]
