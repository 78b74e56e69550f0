"""FlexAttention, compiled, as the second peer of the ragged batch: torch's own kernel for any mask
and score modification.

It has no pages: keys and values are gathered into one packed sequence before the timing, and the
block mask is made before it too, both in its favour. The projection of the bias is timed, as
everywhere.
"""

from __future__ import annotations

import torch

from bench.attention.problems import Problem


def _packed(problem: Problem):
    """K, V [S, g, D] of all requests one after the other, with each key's request and position."""
    page_size = problem.k_pages.shape[1]
    slots, owner, position = [], [], []
    for b, length in enumerate(problem.kv_lens):
        first = int(problem.first_page[b])
        at = torch.arange(first * page_size, length, device=problem.q.device)
        page = problem.page_table[b, at // page_size - first].long()
        slots.append(page * page_size + at % page_size)
        owner.append(torch.full_like(at, b))
        position.append(at)
    slot = torch.cat(slots)
    k, v = (x.reshape(-1, *x.shape[2:])[slot] for x in (problem.k_pages, problem.v_pages))
    return k, v, torch.cat(owner), torch.cat(position)


def prefill(problem: Problem):
    """A function that runs FlexAttention, projection included, and returns its output [T, h, D]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, window, extent = problem.q.device, problem.window, problem.bias.extent
    k, v, k_owner, k_position = _packed(problem)
    q_owner = torch.cat([torch.full((n,), b, device=device) for b, n in enumerate(problem.q_lens)])
    q_position = torch.cat(
        [
            torch.arange(kv - n, kv, device=device)
            for n, kv in zip(problem.q_lens, problem.kv_lens, strict=True)
        ]
    )

    def visible(b, h, i, j):
        distance = q_position[i] - k_position[j]
        seen = (q_owner[i] == k_owner[j]) & (distance >= 0)
        return seen & (distance < window) if window else seen

    mask = create_block_mask(visible, None, None, len(q_owner), len(k_owner), device=device)
    attend = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (problem.q, k, v))

    def run():
        rel = torch.einsum("thd,de->the", problem.bias.r, problem.bias.profile.projection)

        def bias(score, b, h, i, j):
            distance = q_position[i] - k_position[j]
            inside = (distance >= 0) & (distance < extent)
            return score + torch.where(inside, rel[i, h, distance.clamp(0, extent - 1)], 0.0)

        out = attend(q, k, v, score_mod=bias, block_mask=mask, scale=problem.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return run
