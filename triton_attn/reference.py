"""Paged attention in plain torch: the specification of every kernel here, and the yardstick of its
rounding."""

from __future__ import annotations

import torch

from triton_attn.score_mod import RelativeBias, ScoreMod


def attention_reference(
    q_ThD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    page_table: torch.Tensor,
    first_page: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_len: torch.Tensor,
    softmax_scale: float,
    window: int = 0,
    score_mod: ScoreMod | RelativeBias | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every request, one at a time, keys gathered from their pages.

    Query row i of request b sits at position kv_len[b] - q_len[b] + i and sees the keys at
    positions
    (position - window, position] (all of them for window 0).

    Args:
        dtype: what products, scores and probabilities are rounded to: float64 is the reference,
        the kernel's own
            dtype the eager error that sets a budget. The softmax itself is at least fp32.
    Returns: out [T, h, D] and lse [T, h] (natural log, at least fp32); rows of no request are 0
    and -inf.
    """
    page_size, group = k_pages.shape[1], q_ThD.shape[1] // k_pages.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(q_ThD.shape, dtype=dtype)
    lse = torch.full(q_ThD.shape[:2], float("-inf"), dtype=wide)
    for b in range(len(kv_len)):
        start, stop, length = (int(x) for x in (cu_seqlens_q[b], cu_seqlens_q[b + 1], kv_len[b]))
        if stop == start:
            continue
        token = torch.arange(start, stop)
        q_pos = length - (stop - start) + token - start
        first_key = max(int(q_pos[0]) - window + 1, 0) if window else 0
        k_pos = torch.arange(first_key, length)
        page = page_table[b, k_pos // page_size - int(first_page[b])].long()
        k_hnD, v_hnD = (
            x[page, k_pos % page_size].to(dtype).repeat_interleave(group, 1).transpose(0, 1)
            for x in (k_pages, v_pages)
        )
        score = q_ThD[start:stop].to(dtype).transpose(0, 1) @ k_hnD.transpose(1, 2) * softmax_scale
        score = _modify(score, q_pos, k_pos, token, score_mod).to(wide)
        distance = q_pos[:, None] - k_pos[None, :]
        visible = (distance >= 0) & (distance < window if window else True)
        score = score.masked_fill(~visible, float("-inf"))
        row_lse = score.logsumexp(-1)
        probability = (score - row_lse[..., None]).exp().nan_to_num(0.0).to(dtype)
        out[start:stop] = (probability @ v_hnD).transpose(0, 1)
        lse[start:stop] = row_lse.T
    return out, lse


def _modify(score_hqn, q_pos, k_pos, token, mod):
    if mod is None:
        return score_hqn
    if isinstance(mod, ScoreMod):
        return mod.reference(score_hqn, q_pos, k_pos, token, mod.aux)
    dtype = score_hqn.dtype
    rel_qhE = mod.r[token].to(dtype) @ mod.profile.projection.to(dtype)
    if mod.tau is not None:
        tau = mod.tau[token].to(torch.promote_types(dtype, torch.float32))
        rel_qhE = (rel_qhE * tau[:, None, None]).to(dtype)
    distance = q_pos[:, None] - k_pos[None, :]
    inside = (distance >= 0) & (distance < mod.extent)
    index = distance.clamp(0, mod.extent - 1).expand(score_hqn.shape)
    return score_hqn + rel_qhE.transpose(0, 1).gather(2, index) * inside
