"""Which drafted tokens stay, and the token after them. In torch: the specification, and what runs
on a CPU.

Row b of a round has drafts d_1..d_N and logits at N + 1 positions; those at index j follow j
accepted drafts. Two rules:

- The ordinary sampler draws at index 0, 1, ... as if there were no drafts, and goes on while the
  token it draws is the draft. The output is that of decoding without speculation, at any
  temperature, because a sampled token is a function of seed, position and logits.
- Rejection sampling (Leviathan et al. 2023, arXiv:2211.17192): with p the distribution the ordinary
  sampler draws from and q the one the draft was drawn from, accept d with probability
  min(1, p(d) / q(d)); after a rejection draw from max(p - q, 0), normalised; after N acceptances
  draw from p. The distribution is p's, the tokens are not those of decoding without speculation.
  Greedy rows go by the first rule.

Every number drawn is a hash of (seed, position, purpose): see engine/random.py. In the second rule
drafts have a seed of their own, so that they are independent of what accepts or replaces them. In
the first rule they are drawn with the numbers that the sampler will use at that position: equal
distributions then draw equal tokens, and close ones mostly do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inkling_rocm.engine.logit_edits import LogitEdits, apply_edits
from inkling_rocm.engine.random import draft_seed, gumbel, row_key, uniform
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sampler import (
    TOKEN_STREAM,
    SampleRow,
    kept_logits,
    pick_largest,
    sample,
)

NO_TOKEN = -1
ACCEPT_STREAM = 3
_NO_EDITS = LogitEdits(SamplingParams(), (), ())


def draw_drafts(
    draft_logits_BV: Tensor, rows: Sequence[SampleRow], depth: int, *, rejection: bool
) -> Tensor:
    """Draw one draft token a row; greedy rows take the most likely one.

    Args:
        draft_logits_BV: fp32 [B, V], the draft model's; left as they are. Penalties, bias and
            grammars do not apply to drafts.
        rows: position is that of the first draft. depth: how many drafts come before this one.
        rejection: draw for rejection sampling: from the whole softmax at the row's temperature,
            with noise of its own. Else: the ordinary sampler with its cuts and its noise.
    Returns: int64 [B], -1 where no logit is finite.
    """
    tokens = sample(
        draft_logits_BV,
        [draft_row(row, depth, rejection=rejection) for row in rows],
        keep_logits=True,
    )
    found = [NO_TOKEN if token is None else token for token in tokens]
    return torch.tensor(found, dtype=torch.int64, device=draft_logits_BV.device)


def verify_draft(
    logits_BMV: Tensor,
    drafts_BN: Tensor,
    draft_logits_BNV: Tensor | None,
    rows: Sequence[SampleRow],
    *,
    rejection: bool,
) -> tuple[Tensor, Tensor]:
    """Decide a round.

    Penalties and stop ids held back by min_new_tokens at index j are those after drafts 1..j. Rows
    with a grammar accept no draft: its mask is known for the first token only.

    Args:
        logits_BMV: fp32 [B, N + 1, V], the target's; left as they are.
        drafts_BN: int64 [B, N]; -1 = there is no draft from here on.
        draft_logits_BNV: fp32 [B, N, V], what draw_drafts drew the drafts from; only rejection
            sampling reads it.
        rows: position is that of the row's first token.
        rejection: the second rule instead of the first.
    Returns:
        tokens_BM: int64 [B, N + 1] on the device of the logits: the accepted drafts, one more
            token, then -1. Where no logit is finite the token is -1 and the row ends before it.
        accepted_B: int64 [B], number of accepted drafts.
    Raises: ValueError: shapes or dtypes disagree.
    """
    _check(logits_BMV, drafts_BN, draft_logits_BNV, rows, rejection)
    positions = logits_BMV.shape[1]
    drafts = drafts_BN.tolist()
    tokens: list[list[int | None]] = [[] for _ in rows]
    accepted = [0] * len(rows)
    alive = list(range(len(rows)))
    for j in range(positions):
        here = {b: _row_after(rows[b], drafts[b][:j]) for b in alive}
        offered = {b: _offered(rows[b], drafts[b], j) for b in alive}
        by_ratio = {b: rejection and offered[b] >= 0 and not rows[b].greedy for b in alive}
        judged = [b for b in alive if by_ratio[b]]
        drawn = [b for b in alive if not by_ratio[b]]
        found: dict[int, tuple[int | None, bool]] = {}  # token, whether it is the accepted draft
        if drawn:
            some = sample(logits_BMV[drawn, j], [here[b] for b in drawn], keep_logits=False)
            for b, token in zip(drawn, some, strict=True):
                found[b] = token, offered[b] >= 0 and token == offered[b]
        if judged:
            assert draft_logits_BNV is not None
            decided = _by_rejection(
                logits_BMV[judged, j],
                [offered[b] for b in judged],
                draft_logits_BNV[judged, j],
                [here[b] for b in judged],
            )
            found.update(zip(judged, decided, strict=True))
        for b, (token, stays) in found.items():
            tokens[b].append(token)
            accepted[b] += stays
        alive = [b for b in alive if found[b][1]]
        if not alive:
            break
    padded = [
        [NO_TOKEN if t is None else t for t in row] + [NO_TOKEN] * (positions - len(row))
        for row in tokens
    ]
    device = logits_BMV.device
    return (
        torch.tensor(padded, dtype=torch.int64, device=device).view(len(rows), positions),
        torch.tensor(accepted, dtype=torch.int64, device=device),
    )


def draft_row(row: SampleRow, depth: int, *, rejection: bool) -> SampleRow:
    """How draw_drafts draws a row."""
    at = replace(row, position=row.position + depth, edits=_NO_EDITS)
    if not rejection or row.greedy:
        return at
    whole = replace(row.params, top_k=-1, top_p=1.0, min_p=0.0)
    return replace(at, params=whole, seed=draft_seed(row.seed))


def _row_after(row: SampleRow, drafts: Sequence[int]) -> SampleRow:
    """The row of the position after some accepted drafts."""
    return replace(row, position=row.position + len(drafts), edits=row.edits.after(drafts))


def _offered(row: SampleRow, drafts: Sequence[int], j: int) -> int:
    """The draft at index j, -1 where there is none to accept."""
    return drafts[j] if j < len(drafts) and row.edits.mask is None else NO_TOKEN


def _by_rejection(
    logits_nV: Tensor, drafts: Sequence[int], draft_logits_nV: Tensor, rows: Sequence[SampleRow]
) -> list[tuple[int | None, bool]]:
    """The token of random rows at one position by rejection sampling: the draft and True, or what
    replaces it and False. Edits logits_nV in place."""
    device = logits_nV.device
    apply_edits(logits_nV, [(i, row.edits) for i, row in enumerate(rows) if row.edits.active])
    log_p = kept_logits(logits_nV, [row.params for row in rows]).double().log_softmax(-1)
    temperature = torch.tensor([row.params.temperature for row in rows], device=device)
    log_q = (draft_logits_nV / temperature[:, None]).double().log_softmax(-1)
    keys_n = torch.tensor([row_key(row.seed, row.position) for row in rows], device=device)
    draft_n = torch.tensor(drafts, device=device)
    kept_n = _accept(log_p, log_q, draft_n, keys_n)
    tokens: list[int | None] = list(drafts)
    lost = (~kept_n).nonzero()[:, 0]
    ids = torch.arange(log_p.shape[1], device=device)
    noisy = _residual(log_p[lost], log_q[lost]).log() + gumbel(
        keys_n[lost], ids, stream=TOKEN_STREAM
    )
    for i, token in zip(lost.tolist(), pick_largest(noisy, ids), strict=True):
        tokens[i] = token
    return list(zip(tokens, kept_n.tolist(), strict=True))


def _accept(log_p_nV: Tensor, log_q_nV: Tensor, draft_n: Tensor, keys_n: Tensor) -> Tensor:
    """Which drafts stay, bool [n]; none where p or q is NaN."""
    p, q = (log.gather(1, draft_n[:, None])[:, 0].exp() for log in (log_p_nV, log_q_nV))
    return uniform(keys_n, torch.zeros_like(draft_n[:, None]), stream=ACCEPT_STREAM)[:, 0] * q < p


def _residual(log_p_nV: Tensor, log_q_nV: Tensor) -> Tensor:
    """What to draw from after a rejection, not normalised, [n, V]; p itself where p and q are equal
    to rounding, or q is NaN."""
    p_nV = log_p_nV.exp()
    rest = (p_nV - log_q_nV.exp().nan_to_num(nan=0.0)).clamp(min=0)
    return torch.where(rest.amax(-1, keepdim=True) == 0, p_nV, rest)


def _check(logits_BMV, drafts_BN, draft_logits_BNV, rows, rejection: bool) -> None:
    B, M, V = logits_BMV.shape
    if logits_BMV.dtype != torch.float32 or len(rows) != B:
        raise ValueError(
            f"verify_draft: logits are {logits_BMV.dtype} of {B} rows, wanted float32 of "
            f"{len(rows)}"
        )
    if tuple(drafts_BN.shape) != (B, M - 1) or drafts_BN.dtype != torch.int64:
        raise ValueError(
            f"verify_draft: drafts are {drafts_BN.dtype} {tuple(drafts_BN.shape)}, wanted int64 "
            f"{(B, M - 1)}: one draft for all but the last position"
        )
    if not rejection:
        return
    shape = None if draft_logits_BNV is None else tuple(draft_logits_BNV.shape)
    if shape != (B, M - 1, V):
        raise ValueError(
            f"verify_draft: draft logits are {shape}, wanted {(B, M - 1, V)}: rejection sampling "
            "reads the logits that each draft was drawn from"
        )
