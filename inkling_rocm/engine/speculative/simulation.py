"""Simulated acceptance, for measuring: speed at a known acceptance, without a model that has it.

WHAT COMES OUT IS MEANINGLESS: drafts count as accepted where a coin says so, and the model goes on
from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inkling_rocm.engine.random import uniform
from inkling_rocm.engine.speculative.verification import NO_TOKEN

COIN_STREAM = 4


def simulate_acceptance(
    tokens_BM: Tensor, drafts_BN: Tensor, keys_B: Tensor, *, probability: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Replace what verification decided. Runs on the device without waiting for it.

    Args:
        tokens_BM: int64 [B, N + 1], as verification gave them; of these the first of each row is
            kept, as the token after the accepted drafts.
        drafts_BN: int64 [B, N]; from a -1 on there is nothing to accept.
        keys_B: int64 [B], of what the coins are a hash: other ones for each row and round.
        probability: with which a draft is accepted where those before it were; a tensor of one
            number may be changed between replays of a graph.
    Returns: tokens_BM and accepted_B as `verify_draft` gives them. A row without a first token
        stays as it was.
    """
    depth_M = torch.arange(tokens_BM.shape[1], device=tokens_BM.device)
    lucky_BN = uniform(keys_B, depth_M[:-1], stream=COIN_STREAM) < probability
    possible_BN = (drafts_BN != NO_TOKEN) & (tokens_BM[:, :1] != NO_TOKEN)
    accepted_B = (lucky_BN & possible_BN).long().cumprod(-1).sum(-1)
    first_B1 = tokens_BM[:, :1]
    kept_BM = torch.where(
        depth_M < accepted_B[:, None], torch.cat([drafts_BN, first_B1], -1), NO_TOKEN
    )
    return torch.where(depth_M == accepted_B[:, None], first_B1, kept_BM), accepted_B
