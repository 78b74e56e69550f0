"""SGLang 0.5.23's Triton attention as a peer (importable as `sglang.kernels...`; never part of
this repository).

Its Inkling path materialises rel = r . P as [T, h, E] and gathers from it in a score_mod; both are
timed.
"""

from __future__ import annotations

import torch

from bench.attention.problems import Problem


def _flat(problem: Problem):
    """Token-slot views of the pages and each request's slots."""
    page_size = problem.k_pages.shape[1]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (problem.k_pages, problem.v_pages))
    slots = []
    for b, length in enumerate(problem.kv_lens):
        first = int(problem.first_page[b])
        position = torch.arange(first * page_size, length, device=k.device)
        page = problem.page_table[b, position // page_size - first].long()
        slots.append((position, page * page_size + position % page_size))
    return k, v, slots


def _rel(problem: Problem):
    return torch.einsum("thd,de->the", problem.bias.r, problem.bias.profile.projection)


def _indptr(lengths, device):
    return torch.tensor(
        [0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device
    )


def prefill(problem: Problem):
    """A function that runs SGLang's extend attention, projection included, and returns its
    output."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    from sglang.kernels.ops.attention.score_mod import relative_bias_score_mod

    q, device = problem.q, problem.q.device
    k_buf, v_buf, slots = _flat(problem)
    prefix, k_new, v_new = [], [], []
    for (position, slot), q_len, kv_len in zip(slots, problem.q_lens, problem.kv_lens, strict=True):
        old = position < kv_len - q_len
        if problem.window:  # SGLang hands the kernel only the window of the prefix
            old &= position >= kv_len - q_len - problem.window
        prefix.append(slot[old])
        k_new.append(k_buf[slot[position >= kv_len - q_len]])
        v_new.append(v_buf[slot[position >= kv_len - q_len]])
    k_new, v_new = torch.cat(k_new), torch.cat(v_new)
    kv_indptr = _indptr([len(x) for x in prefix], device)
    kv_indices = torch.cat(prefix).long()
    offsets = torch.tensor(
        [n - q - len(x) for n, q, x in zip(problem.kv_lens, problem.q_lens, prefix, strict=True)],
        dtype=torch.int32,
        device=device,
    )
    out = torch.empty_like(q)

    def run():
        extend_attention_fwd(
            q, k_new, v_new, out, k_buf, v_buf, problem.cu_seqlens_q, kv_indptr, kv_indices, None,
            True, None,
            max(problem.q_lens), 1.0, 1.0, sm_scale=problem.scale,
            sliding_window_size=problem.window - 1 if problem.window else -1,
            window_kv_offsets=offsets if problem.window else None,
            score_mod=relative_bias_score_mod, aux_tensors=[_rel(problem)],
        )  # fmt: skip
        return out

    return run


def decode(problem: Problem, splits: int = 16):
    """Likewise for decode. It takes no window: SGLang passes the window's slots only, and
    positions shift with them,
    which a distance-based bias does not notice."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.score_mod import relative_bias_score_mod

    q, device = problem.q, problem.q.device
    k_buf, v_buf, slots = _flat(problem)
    seen = [
        slot[position >= length - problem.window] if problem.window else slot
        for (position, slot), length in zip(slots, problem.kv_lens, strict=True)
    ]
    indptr, indices = _indptr([len(x) for x in seen], device), torch.cat(seen).long()
    B, h, _ = q.shape
    logits = torch.empty(B, h, splits, v_buf.shape[-1], dtype=torch.float32, device=device)
    lse = torch.empty(B, h, splits, dtype=torch.float32, device=device)
    counts = torch.full((B,), splits, dtype=torch.int32, device=device)
    out, rel = torch.empty_like(q), _rel(problem)  # made before the timing, in the peer's favour

    def run():
        decode_attention_fwd(
            q, k_buf, v_buf, out, indptr, indices, logits, lse, counts, splits, problem.scale,
            1.0, 1.0,
            score_mod=relative_bias_score_mod, aux_tensors=[rel],
        )  # fmt: skip
        return out

    return run
