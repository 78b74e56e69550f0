"""A step that was started on this process's device: what it found, once that is there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inkling_rocm.engine.executor import StepInput, StepResult
from inkling_rocm.engine.logprobs import LogprobTensors, as_logprobs
from inkling_rocm.engine.request import TokenLogprob


class LocalOutput:
    """A started step: copies to the host follow it on the device's stream, and an event them."""

    def __init__(
        self,
        tokens: Tensor | None,
        logprobs: LogprobTensors | None,
        step: StepInput,
        scores: list[Tensor | list[TokenLogprob]],
    ):
        self._scores = scores
        self._rows = [i for i, top in enumerate(step.logprobs) if top >= 0]
        self._tops = [step.logprobs[i] for i in self._rows]
        self._logit_rows = None if step.draft is None else step.draft.sample_rows.tolist()
        self._event: torch.cuda.Event | None = None
        on_gpu = tokens is not None and tokens.device.type != "cpu"
        self._tokens = None if tokens is None else _start_copy(tokens)
        self._logprobs = logprobs
        if logprobs is not None:
            names = ("chosen", "values", "ids")
            copies = {name: _start_copy(getattr(logprobs, name)) for name in names}
            self._logprobs = replace(logprobs, **copies)
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        """See StepOutput."""
        if self._event is not None:
            self._event.synchronize()
        tokens = [] if self._tokens is None else self._tokens.tolist()
        logprobs = {}
        if self._logprobs is not None:
            lengths = self._logit_rows or [1] * len(tokens)
            drawn = [token for row, n in zip(tokens, lengths, strict=True) for token in row[:n]]
            chosen = [drawn[i] for i in self._rows]
            found = as_logprobs(chosen, self._tops, self._logprobs)
            logprobs = dict(zip(self._rows, found, strict=True))
        return StepResult(
            tokens=[tuple(token for token in row if token >= 0) for row in tokens],
            logprobs=logprobs,
            scores=self._scores,
        )


def _start_copy(x: Tensor) -> Tensor:
    """Towards the host, without waiting."""
    if x.device.type == "cpu":
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return copy.copy_(x, non_blocking=True)
