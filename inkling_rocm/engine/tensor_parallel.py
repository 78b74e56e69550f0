"""Tensor parallelism of the engine: this process is rank 0, every other rank a process it starts
(ranks.py).

Rank 0 schedules and samples. Each step goes to the followers (follower.py) through a pipe as the
StepInput it is; they run the same forward, meet rank 0 in the model's collectives and receive the
sampled tokens by broadcast (shared_sampler.py).

A step that fails on one rank leaves the others inside a collective; nothing can be computed after
that, so it ends the engine (RankLost), unlike a failed step of one rank.
"""

from __future__ import annotations

from dataclasses import replace

from inkling_rocm.engine.executor import StepInput, StepOutput, StepResult
from inkling_rocm.engine.local_executor import LocalExecutor
from inkling_rocm.engine.ranks import RankLost, Ranks


class TensorParallelExecutor:
    """An Executor over all ranks; `local` is rank 0's."""

    def __init__(self, local: LocalExecutor, ranks: Ranks):
        self.runs_ahead = local.runs_ahead
        self.counts_tokens = local.counts_tokens
        self.draft_steps = local.draft_steps
        self._local = local
        self._ranks = ranks

    def takes_round(self, rows: int, drafts: int) -> bool:
        """See Executor."""
        return self._local.takes_round(rows, drafts)

    def run(self, step: StepInput) -> StepOutput:
        """See Executor. Raises: RankLost."""
        if self._ranks.lost is not None:
            raise RankLost(self._ranks.lost)
        self._ranks.send(replace(step, samples=()))
        try:
            return _Output(self._local.run(step), self._ranks)
        except Exception as error:
            raise self._ranks.failure(error) from error


class _Output:
    """A started step of all ranks."""

    def __init__(self, local: StepOutput, ranks: Ranks):
        self._local = local
        self._ranks = ranks

    def wait(self) -> StepResult:
        """See StepOutput. Raises: RankLost."""
        try:
            result = self._local.wait()
        except Exception as error:
            raise self._ranks.failure(error) from error
        if self._ranks.lost is not None:  # an aborted collective leaves anything behind
            raise RankLost(self._ranks.lost)
        return result
