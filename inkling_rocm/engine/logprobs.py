"""Log probabilities: fp32 softmax over the real vocabulary, before penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inkling_rocm.engine.request import TokenLogprob


def token_logprobs(
    logits_nV: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log probability of one token a row, with the row's most likely tokens.

    Args:    logits_nV: fp32 [n, V]. tokens: [n] ids. num_top: [n] alternatives wanted.
    """
    logprobs_nV = logits_nV.log_softmax(-1)
    ids = torch.tensor(tokens, device=logits_nV.device)[:, None]
    chosen = logprobs_nV.gather(1, ids)[:, 0].tolist()
    width = min(max(num_top, default=0), logits_nV.shape[1])
    if not width:
        return [
            TokenLogprob(token_id=token, logprob=logprob)
            for token, logprob in zip(tokens, chosen, strict=True)
        ]
    values, top_ids = (x.tolist() for x in logprobs_nV.topk(width, dim=-1))
    return [
        TokenLogprob(
            token_id=token,
            logprob=chosen[i],
            top=tuple(zip(top_ids[i][:top], values[i][:top], strict=True)),
        )
        for i, (token, top) in enumerate(zip(tokens, num_top, strict=True))
    ]
