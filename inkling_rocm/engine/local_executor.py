"""Runs steps on the device of this process: forward, logits, sampling, read-back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from inkling_rocm.engine.executor import LAST_TOKEN, Score, StepInput
from inkling_rocm.engine.host import EmbeddedHost
from inkling_rocm.engine.local_output import LocalOutput
from inkling_rocm.engine.logprobs import LogprobTensors, logprob_tensors, token_logprobs
from inkling_rocm.engine.request import TokenLogprob
from inkling_rocm.engine.speculative.round import Speculation
from inkling_rocm.engine.token_sampler import TokenSampler
from inkling_rocm.engine.upload import upload
from inkling_rocm.host import Host

# Prompt logits held at a time: bounds the memory of prompt log probabilities.
SCORED_LOGITS = 1 << 24


class Model(Protocol):
    """What runs: InklingModel, or what stands in its place; taps are asked of the former only."""

    def forward(
        self, input_ids: Tensor, host: Host, taps: Mapping[int, Tensor] | None = None
    ) -> Tensor: ...

    def logits(self, hidden_nH: Tensor, host: Host) -> Tensor: ...


class DecodeRunner(Protocol):
    """Runs steps of one token a row from fixed buffers (decode_runner.py)."""

    def fits(self, step: StepInput) -> bool: ...

    def follow_tables(self, step: StepInput, *, decode: bool) -> None: ...

    def run(self, step: StepInput) -> tuple[Tensor, Host, Tensor | None]:
        """Returns: hidden [R, H], R >= B, the host they were computed on, and the tokens int64 [B]
        where the runner has drawn and kept them, from the logits of all R rows."""
        ...

    def release(self) -> None: ...


class PrefillRunner(Protocol):
    """Runs small prompt steps from fixed buffers (prefill_runner.py)."""

    def fits(self, step: StepInput) -> bool: ...

    def run(self, step: StepInput) -> tuple[Tensor, Host]:
        """Returns: hidden [T, H], and the host they were computed on."""
        ...

    def release(self) -> None: ...


class RoundRunner(Protocol):
    """Runs rounds from fixed buffers (speculative/round_runner.py)."""

    def takes(self, rows: int, drafts: int) -> bool: ...

    def follow_tables(self, step: StepInput) -> None: ...

    def run(self, step: StepInput) -> tuple[Tensor, Tensor, Host]:
        """Returns: tokens [B, N + 1], the hidden states [R (N + 1), H], R >= B, that they were
        drawn from, and the host those were computed on."""
        ...

    def release(self) -> None: ...


class LocalExecutor:
    """An Executor over one model, host and sampler.

    Args:
        vocabulary: the model's real rows.
        runs_ahead: see Executor.
        decode, prefill: take the steps that fit them; None = those are laid out afresh.
        speculation: verifies drafts and makes them; None = one token a row and step.
        rounds: takes the rounds that fit it; None = none is one.
    """

    def __init__(
        self,
        model: Model,
        host: EmbeddedHost,
        sampler: TokenSampler,
        *,
        vocabulary: int,
        runs_ahead: bool = False,
        decode: DecodeRunner | None = None,
        prefill: PrefillRunner | None = None,
        speculation: Speculation | None = None,
        rounds: RoundRunner | None = None,
    ):
        self.model = model
        self.host = host
        self.sampler = sampler
        self.runs_ahead = runs_ahead
        self.counts_tokens = sampler.counts_tokens
        self.decode = decode
        self.prefill = prefill
        self.speculation = speculation
        self.rounds = rounds
        self.draft_steps = 0 if speculation is None else speculation.drafter.depths
        self._vocabulary = vocabulary
        self._last_tokens = host.last_tokens

    def takes_round(self, rows: int, drafts: int) -> bool:
        """See Executor."""
        return self.rounds is not None and self.rounds.takes(rows, drafts)

    @torch.inference_mode()
    def run(self, step: StepInput) -> LocalOutput:
        """See Executor."""
        for pool, changes in zip(self.host.pools, step.tables, strict=True):
            pool.copy_pages(changes.copies)
        self.host.rings.copy(step.ring_copies)
        if step.round is not None:
            assert self.rounds is not None
            drawn, hidden_TH, host = self.rounds.run(step)
            found = None
            if max(step.logprobs, default=-1) >= 0:
                # From all rows of the bucket, so the logits are those that were drawn from.
                logits_nV = self.model.logits(hidden_TH, host)[: drawn.numel()]
                found = self._logprobs(logits_nV, drawn.flatten(), step.logprobs)
            return LocalOutput(drawn, found, step, [])
        if self.rounds is not None:
            self.rounds.follow_tables(step)
        kept: Tensor | None = None
        if self.decode is not None and self.decode.fits(step):
            bucket_RH, host, kept = self.decode.run(step)
            hidden_TH = bucket_RH[: len(step.slots)]
        else:
            if self.decode is not None:
                self.decode.follow_tables(step, decode=False)
            if self.prefill is not None and self.prefill.fits(step):
                hidden_TH, host = self.prefill.run(step)
            else:
                hidden_TH, host = self._forward(step), self.host
        step_hidden_TH = hidden_TH
        scores = [self._score(hidden_TH, score, host) for score in step.scores]
        tokens, logprobs = None, None
        if kept is not None:
            tokens = kept[:, None]
            if step.logprobs:
                # From all rows of the bucket, so the logits are those that were drawn from.
                logits_nV = self.model.logits(bucket_RH, host)[: len(kept)]
                logprobs = self._logprobs(logits_nV, kept, step.logprobs)
        elif len(step.logit_rows):
            if not np.array_equal(step.logit_rows, np.arange(len(hidden_TH))):
                hidden_TH = hidden_TH[upload(step.logit_rows, hidden_TH.device)]
            logits_nV = self.model.logits(hidden_TH, host)
            if self.speculation is None:
                tokens = self.sampler.sample(logits_nV, step)[:, None]
            else:
                tokens = self.speculation.decide(logits_nV, step)
            if self.runs_ahead:
                self._last_tokens[upload(step.sample_slots, tokens.device)] = tokens[:, 0]
            logprobs = self._logprobs(logits_nV, _of_logit_rows(tokens, step), step.logprobs)
        if self.speculation is not None:
            self.speculation.propose(step, step_hidden_TH, tokens)
        return LocalOutput(tokens, logprobs, step, scores)

    def finish(self) -> None:
        """Wait for every step that was started."""
        if self._last_tokens.device.type != "cpu":
            torch.cuda.synchronize(self._last_tokens.device)

    def release(self) -> None:
        """Destroy the graphs, after which no step can be run. NCCL's communicators do not end
        while a graph that uses them lives."""
        for runner in (self.decode, self.prefill, self.rounds):
            if runner is not None:
                runner.release()

    def follow(self, step: StepInput) -> LocalOutput:
        """Run a step that another rank has scheduled: its page tables are taken over first."""
        for pool, changes in zip(self.host.pools, step.tables, strict=True):
            pool.follow(step.slots, changes)
        return self.run(step)

    def _forward(self, step: StepInput) -> Tensor:
        """Hidden states of a step that is laid out afresh."""
        host = self.host
        host.prepare(step.slots, step.q_start, step.q_len, snapshots=step.snapshots)
        input_ids = self._input_ids(step)
        drafter = None if self.speculation is None else self.speculation.drafter
        if drafter is not None and (taps := drafter.taps(len(input_ids))):
            return self.model.forward(input_ids, host, taps)
        return self.model.forward(input_ids, host)

    def _input_ids(self, step: StepInput) -> Tensor:
        """Token ids, those of LAST_TOKEN filled in on the device."""
        input_ids = self.host.input_ids(step.token_ids)
        at = np.flatnonzero(step.token_ids == LAST_TOKEN)
        if len(at):
            rows = np.searchsorted(np.cumsum(step.q_len), at, side="right")
            device = input_ids.device
            last = self._last_tokens[upload(step.slots[rows], device)]
            input_ids[upload(at, device)] = last.clamp(min=0)
        if self.speculation is not None:
            self.speculation.fill_in(step, input_ids)
        return input_ids

    def _logprobs(
        self, logits_nV: Tensor, tokens: Tensor, wanted: Sequence[int]
    ) -> LogprobTensors | None:
        rows = [i for i, top in enumerate(wanted) if top >= 0]
        if not rows:
            return None
        if len(rows) < len(wanted):
            index = upload(np.array(rows, np.int64), tokens.device)
            logits_nV, tokens = logits_nV[index], tokens[index]
        return logprob_tensors(logits_nV, tokens, max(wanted))

    def _score(self, hidden_TH: Tensor, score: Score, host: Host) -> Tensor | list[TokenLogprob]:
        """Logits of prompt rows on the CPU, or the log probabilities of what follows them."""
        hidden_nH = hidden_TH[score.first : score.first + score.rows]
        logits: list[Tensor] = []
        logprobs: list[TokenLogprob] = []
        for rows in hidden_nH.split(SCORED_LOGITS // self._vocabulary + 1):
            logits_nV = self.model.logits(rows, host)
            if score.following is None:
                logits.append(logits_nV.cpu())
                continue
            at = len(logprobs)
            following = score.following[at : at + len(rows)]
            logprobs += token_logprobs(logits_nV, following, [score.top] * len(rows))
        return torch.cat(logits) if score.following is None else logprobs


def _of_logit_rows(tokens_nM: Tensor, step: StepInput) -> Tensor:
    """The token drawn from each logit row, -1 where none was."""
    if step.draft is None:
        return tokens_nM[:, 0]
    lengths = torch.from_numpy(step.draft.sample_rows).to(tokens_nM.device)
    depth = torch.arange(tokens_nM.shape[1], device=tokens_nM.device)
    return tokens_nM[depth < lengths[:, None]]
