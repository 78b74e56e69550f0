"""Log probabilities: fp32 softmax over the real vocabulary, before penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inkling_rocm.engine.request import TokenLogprob


@dataclass(frozen=True, kw_only=True)
class LogprobTensors:
    """What the device finds, to be read back later: chosen fp32 [n]; values fp32 and ids int64
    [n, width] of the most likely tokens."""

    chosen: Tensor
    values: Tensor
    ids: Tensor


def logprob_tensors(logits_nV: Tensor, tokens_n: Tensor, width: int) -> LogprobTensors:
    """Log probability of one token a row and the `width` most likely ones; enqueues only.

    Args:    logits_nV: fp32 [n, V]. tokens_n: int64 [n]; below 0 counts as 0.
    """
    logprobs_nV = logits_nV.log_softmax(-1)
    chosen = logprobs_nV.gather(1, tokens_n.clamp(min=0)[:, None])[:, 0]
    values, ids = logprobs_nV.topk(min(width, logits_nV.shape[1]), dim=-1)
    return LogprobTensors(chosen=chosen, values=values, ids=ids)


def as_logprobs(
    tokens: Sequence[int], num_top: Sequence[int], found: LogprobTensors
) -> list[TokenLogprob]:
    """The rows of `found`, whose tokens these are, each with its number of alternatives."""
    chosen, values, ids = (x.tolist() for x in (found.chosen, found.values, found.ids))
    return [
        TokenLogprob(
            token_id=token,
            logprob=chosen[i],
            top=tuple(zip(ids[i][:top], values[i][:top], strict=True)),
        )
        for i, (token, top) in enumerate(zip(tokens, num_top, strict=True))
    ]


def token_logprobs(
    logits_nV: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probability of one token a row, with the row's most likely tokens.

    Args:    logits_nV: fp32 [n, V]. tokens: [n] ids. num_top: [n] alternatives wanted.
    """
    tokens_n = torch.tensor(tokens, dtype=torch.int64, device=logits_nV.device)
    found = logprob_tensors(logits_nV, tokens_n, max(num_top, default=0))
    return as_logprobs(tokens, num_top, found)
