"""What speculation does in a step, between the model's forward and the next one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inkling_rocm.engine.executor import DRAFT_TOKEN, StepInput
from inkling_rocm.engine.random import row_key
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.speculative.drafter import Confirmed, Drafter
from inkling_rocm.engine.speculative.simulation import simulate_acceptance
from inkling_rocm.engine.speculative.verification import NO_TOKEN
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.engine.upload import upload


class Speculation:
    """Drafts in, accepted tokens out, new drafts made.

    Args:
        rejection: accept by rejection sampling, else where the sampler draws what was drafted.
        simulated: accept with this probability instead (simulation.py); None = do not.
    """

    def __init__(
        self,
        drafter: Drafter,
        sampler: TokenSampler,
        *,
        rejection: bool = False,
        simulated: float | None = None,
    ):
        self.drafter = drafter
        self.simulated = None
        if simulated is not None:
            self.simulated = torch.tensor(
                simulated, dtype=torch.float64, device=drafter.tokens.device
            )
        self._sampler = sampler
        self._rejection = rejection

    def fill_in(self, step: StepInput, input_ids: Tensor) -> None:
        """Put the drafts where step.token_ids asks for them."""
        at = np.flatnonzero(step.token_ids == DRAFT_TOKEN)
        if not len(at):
            return
        assert step.draft is not None
        verify = step.draft.verify
        slots = np.repeat(step.slots, verify)
        depth = np.arange(len(at)) - np.repeat(np.cumsum(verify) - verify, verify)
        device = input_ids.device
        drafts = self.drafter.tokens[upload(slots, device), upload(depth, device)]
        input_ids[upload(at, device)] = drafts.clamp(min=0)

    def decide(self, logits_nV: Tensor, step: StepInput) -> Tensor:
        """The tokens of each of a step's samples.

        Args:    logits_nV: fp32, of step.logit_rows.
        Returns: int64 [samples, M], each row ends in -1 from where there is no token.
        """
        assert step.draft is not None
        rows, device = step.draft.sample_rows, logits_nV.device
        most = int(rows.max())
        if most == 1:
            return self._sampler.sample(logits_nV, step)[:, None]
        first = np.cumsum(rows) - rows
        depth = np.arange(most - 1)
        offered = depth < rows[:, None] - 1
        slots = upload(step.sample_slots, device)
        drafts_nN = torch.where(
            torch.from_numpy(offered).to(device),
            self.drafter.tokens[slots, : most - 1],
            NO_TOKEN,
        )
        every = first[:, None] + np.minimum(np.arange(most), rows[:, None] - 1)
        stashed = self.drafter.logits
        tokens_nM = self._sampler.verify(
            logits_nV[upload(every, device)],
            drafts_nN,
            None if stashed is None else stashed[slots, : most - 1],
            step,
            rejection=self._rejection,
        )
        if self.simulated is None:
            return tokens_nM
        # Not from step.samples, which only the rank that samples has.
        keys = _keys(step, step.logit_rows[first])
        return simulate_acceptance(
            tokens_nM, drafts_nN, upload(keys, device), probability=self.simulated
        )[0]

    def propose(
        self,
        step: StepInput,
        hidden_TH: Tensor,
        tokens_nM: Tensor | None,
    ) -> None:
        """Make the drafts for the next step. Waits for the tokens: row lengths follow from them."""
        assert step.draft is not None
        ends = np.cumsum(step.q_len)
        tokens: list[tuple[int, ...]] = [()] * len(step.slots)
        samples: dict[int, SampleRow] = {}
        end = step.q_start + step.q_len - step.draft.verify
        if tokens_nM is not None:
            lengths = step.draft.sample_rows
            sampled = step.logit_rows[np.cumsum(lengths) - lengths]
            owner = np.searchsorted(ends, sampled, side="right")
            for i, (row, found) in enumerate(zip(owner.tolist(), tokens_nM.tolist(), strict=True)):
                if step.sample_slots[i] != step.slots[row]:
                    continue  # a continuation that starts with another token
                tokens[row] = tuple(token for token in found if token != NO_TOKEN)
                end[row] += max(len(tokens[row]) - 1, 0)
                if step.samples and tokens[row]:
                    samples[row] = replace(step.samples[i], position=int(end[row]) + 1)
        confirmed = Confirmed(
            step=step,
            hidden_TH=hidden_TH,
            first=ends - step.q_len,
            end=end,
            tokens=tokens,
            rows=[samples[row] for row in sorted(samples)],
        )
        self.drafter.propose(confirmed)


def _keys(step: StepInput, tokens: NDArray) -> NDArray:
    """One number a sample that its slot and the position of its first token decide, int64 [n]."""
    ends = np.cumsum(step.q_len)
    row = np.searchsorted(ends, tokens, side="right")
    position = step.q_start[row] + tokens - (ends - step.q_len)[row]
    pairs = zip(step.sample_slots.tolist(), position.tolist(), strict=True)
    return np.array([row_key(slot, at) for slot, at in pairs], np.int64)
