"""rel_attention through triton_attn: decode and verify split along the keys, anything longer as a
prefill."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

import triton_attn
from inkling_rocm.config import AttentionConfig
from inkling_rocm.host import BatchMeta, KVCacheView
from inkling_rocm.ops.attention_prologue import tau, tau_key
from inkling_rocm.ops.registry import OpContext
from triton_attn.decode import MAX_VERIFY_TOKENS
from triton_attn.score_mod import RelativeBias, RelativeProfile

# A large batch in which some rows have a few tokens (prompts that end beside decoding rows) would
# want gigabytes of split-KV memory for a step or two: it goes as a prefill.
RAGGED_SPLIT_BYTES = 1 << 29


def prepare(weights: Mapping[str, Tensor], context: OpContext) -> RelativeProfile:
    """A layer's bias projection, laid out for aligned reads."""
    return RelativeProfile.prepare(weights["attn.rel_proj"])


@cache
def _workspace_sizes(requests: int, tokens: int, attention: AttentionConfig) -> dict[str, int]:
    """Elements of each tensor of a DecodeWorkspace."""
    workspace = triton_attn.DecodeWorkspace.allocate(
        torch.device("meta"),
        max_requests=requests,
        num_kv_heads=attention.num_kv_heads,
        max_rows=attention.num_heads // attention.num_kv_heads * tokens,
        head_dim=attention.head_dim,
    )
    return {name: getattr(workspace, name).numel() for name in ("partial", "tickets")}


class RelAttention:
    """The op, with the split-KV memory of one engine: calls of one instance must be ordered on one
    stream.

    Memory grows by need in calls outside graph capture: run the largest batch once before
    capturing. What was outgrown is kept, because captured graphs may use it.
    """

    def __init__(self, context: OpContext):
        self.arch = context.arch
        self.workspaces: list[triton_attn.DecodeWorkspace] = []

    def __call__(
        self,
        q_ThD: Tensor,
        r_ThR: Tensor,
        rel_proj_RE: Tensor,
        *,
        attention: AttentionConfig,
        meta: BatchMeta,
        kv: KVCacheView,
        prepared: RelativeProfile,
    ) -> Tensor:
        """The contract of `inkling_rocm.ops.rel_attention`.

        Args: prepared: `prepare`'s; rel_proj_RE is inside it.
        """
        bias = RelativeBias(r=r_ThR, profile=prepared, tau=self._tau(meta, attention))
        paged: dict[str, Any] = {
            "page_table": kv.page_table,
            "first_page": kv.first_page,
            "kv_len": meta.kv_len,
            "softmax_scale": attention.softmax_scale,
            "window": kv.window,
            "score_mod": bias,
            "arch": self.arch,
        }
        out_ThD = paged["out"] = torch.empty_like(q_ThD)
        rows: dict[str, Any] = {"cu_seqlens_q": meta.cu_seqlens_q}
        # Few bounds, few compiled kernels.
        tokens = 1 if meta.q_uniform == 1 else max(2, triton.next_power_of_2(meta.max_q))
        if meta.max_q > MAX_VERIFY_TOKENS or self._too_ragged(meta, tokens, attention):
            triton_attn.attention_prefill(q_ThD, kv.k, kv.v, q_start=meta.q_start, **rows, **paged)
            return out_ThD
        paged["max_kv_len"] = meta.max_kv
        paged["workspace"] = self._workspace(q_ThD.device, meta.num_rows, tokens, attention)
        if meta.q_uniform == 1:
            triton_attn.attention_decode(q_ThD, kv.k, kv.v, **paged)
        else:
            triton_attn.attention_verify(q_ThD, kv.k, kv.v, max_q_len=tokens, **rows, **paged)
        return out_ThD

    def _too_ragged(self, meta: BatchMeta, tokens: int, attention: AttentionConfig) -> bool:
        if meta.q_uniform:
            return False
        sizes = _workspace_sizes(triton.next_power_of_2(meta.num_rows), tokens, attention)
        return 4 * sizes["partial"] > RAGGED_SPLIT_BYTES

    def _tau(self, meta: BatchMeta, attention: AttentionConfig) -> Tensor | None:
        """The prologue's, if it left one."""
        if attention.log_floor is None:
            return None
        key = tau_key(attention)
        if key not in meta.memo:
            meta.memo[key] = tau(meta.positions, attention)
        return meta.memo[key]

    def _workspace(
        self, device: torch.device, requests: int, tokens: int, attention: AttentionConfig
    ) -> triton_attn.DecodeWorkspace:
        sizes = _workspace_sizes(triton.next_power_of_2(requests), tokens, attention)
        newest = self.workspaces[-1] if self.workspaces else None
        if newest is not None:
            have = {name: getattr(newest, name).numel() for name in sizes}
            if all(have[name] >= sizes[name] for name in sizes):
                return newest
            sizes = {name: max(have[name], sizes[name]) for name in sizes}
        workspace = triton_attn.DecodeWorkspace(
            partial=torch.empty(sizes["partial"], dtype=torch.float32, device=device),
            tickets=torch.zeros(sizes["tickets"], dtype=torch.int32, device=device),
        )
        self.workspaces.append(workspace)
        return workspace
