"""Decode and verify: launchers and workspace of the kernels in decode_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from triton_attn.checks import check_paged, padded_head_dim, request_arch
from triton_attn.decode_kernels import _decode_kernel, _merge_kernel
from triton_attn.prefill import MOD_RELATIVE, mod_facts
from triton_attn.score_mod import PROFILE_PAD, RelativeBias, ScoreMod
from triton_attn.tuning import DECODE

MAX_VERIFY_TOKENS = 16
# Splits a request has at most, and how many of them a merge keeps in flight (registers).
MAX_SPLITS = 128
MERGE_SPLITS = 4


@dataclass(frozen=True, kw_only=True)
class DecodeWorkspace:
    """Partial results and tickets of split-KV. One per stream: calls on the same stream may share
    it, and a captured
    graph must keep it alive.

    Attributes:
        partial: fp32 partial outputs and (l, m) pairs; contents are undefined between calls.
        tickets: int32, zero between calls (the kernel leaves them so).
    """

    partial: torch.Tensor
    tickets: torch.Tensor

    @staticmethod
    def allocate(
        device: torch.device,
        *,
        max_requests: int,
        num_kv_heads: int,
        max_rows: int,
        head_dim: int,
        arch: Arch | str | None = None,
    ) -> DecodeWorkspace:
        """Enough for batches of `max_requests` whose tiles have `max_rows` rows (h / g times the
        most query tokens)."""
        pairs = max_requests * num_kv_heads
        rows = max(16, triton.next_power_of_2(max_rows))
        size = pairs * MAX_SPLITS * rows * (padded_head_dim(head_dim) + 2)
        return DecodeWorkspace(
            partial=torch.empty(size, dtype=torch.float32, device=device),
            tickets=torch.zeros(pairs, dtype=torch.int32, device=device),
        )


def attention_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    page_table: torch.Tensor,
    first_page: torch.Tensor,
    kv_len: torch.Tensor,
    max_kv_len: int,
    softmax_scale: float,
    window: int = 0,
    score_mod: ScoreMod | RelativeBias | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: DecodeWorkspace | None = None,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token a request, at position kv_len - 1, which sees itself and what
    is before it.

    One launch, no host synchronisation, capturable. A request's result does not depend on the
    other requests,
    on max_kv_len or on the grid. Arguments as in `attention_prefill`, except:

    Args:
        q: [B, h, D], row b belongs to request b.
        kv_len: [B] int32, keys of the request, the current token included; 0 = a padded row
        (output 0).
        max_kv_len: host bound on kv_len: sizes the grid, never the result.
        workspace: split-KV memory; None allocates (and zeroes) one, which costs another small
        launch.
    Returns: out [B, h, D], or (out, lse [B, h]).
    Raises: ValueError: as `attention_prefill`; a workspace that is too small.
    """
    return _launch(
        "attention_decode", q, k_pages, v_pages, page_table, first_page, None, kv_len, max_kv_len,
        1, softmax_scale,
        window, score_mod, out, return_lse, workspace, arch, row,
    )  # fmt: skip


def attention_verify(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    page_table: torch.Tensor,
    first_page: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kv_len: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    softmax_scale: float,
    window: int = 0,
    score_mod: ScoreMod | RelativeBias | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: DecodeWorkspace | None = None,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few query tokens a request (drafts under verification), split along the keys
    like decode.

    Arguments as in `attention_decode`, except:

    Args:
        q: [T, h, D]; request b owns rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1, at positions
        kv_len - q_len ...
        cu_seqlens_q: [B + 1] int32; requests may have 0 to max_q_len tokens.
        max_q_len: host bound on the tokens of a request, 1 to 16.
    Raises: ValueError: as `attention_decode`; max_q_len out of range.
    """
    if not 1 <= max_q_len <= MAX_VERIFY_TOKENS:
        raise ValueError(
            f"attention_verify: max_q_len is {max_q_len}; wanted 1 to {MAX_VERIFY_TOKENS} "
            "(longer chunks: attention_prefill)"
        )
    if cu_seqlens_q.shape != (kv_len.shape[0] + 1,) or cu_seqlens_q.dtype != torch.int32:
        raise ValueError(
            f"attention_verify: cu_seqlens_q is {tuple(cu_seqlens_q.shape)} "
            f"{cu_seqlens_q.dtype}; wanted "
            f"({kv_len.shape[0] + 1},) torch.int32"
        )
    return _launch(
        "attention_verify", q, k_pages, v_pages, page_table, first_page, cu_seqlens_q, kv_len,
        max_kv_len, max_q_len,
        softmax_scale, window, score_mod, out, return_lse, workspace, arch, row,
    )  # fmt: skip


def _launch(
    name, q, k_pages, v_pages, page_table, first_page, cu_seqlens_q, kv_len, max_kv_len,
    max_q_len, softmax_scale, window,
    score_mod, out, return_lse, workspace, arch, row,
):  # fmt: skip
    T, h, D = q.shape
    B, g, group = kv_len.shape[0], k_pages.shape[2], h // k_pages.shape[2]
    arch = request_arch(arch, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_paged(name, q, k_pages, v_pages, page_table, first_page, kv_len, window, score_mod, out)
    if cu_seqlens_q is None and T != B:
        raise ValueError(f"{name}: q has {T} rows for {B} requests; wanted one row a request")
    lse = torch.empty(T, h, dtype=torch.float32, device=q.device) if return_lse else None
    if T == 0 or B == 0:
        return out if lse is None else (out, lse)
    mod, extent = mod_facts(score_mod, window)
    if mod == MOD_RELATIVE:
        extent = score_mod.extent
    block_rows = max(16, triton.next_power_of_2(group * max_q_len))
    row = row or DECODE.select(
        arch.name,
        head_dim=D,
        window=window,
        rows=block_rows,
        bits=q.element_size() * 8,
        relative=mod == MOD_RELATIVE,
    )
    # A decode tile of many heads (MHA packed on one K/V head) merges in place whatever its rows.
    merge_here = cu_seqlens_q is None or group * max_q_len <= 16
    merge_rows = triton.next_power_of_2(group * max_q_len) if merge_here else 8
    tokens = 1 if max_q_len == 1 else 2 if max_q_len == 2 else 4
    workspace = workspace or DecodeWorkspace.allocate(
        q.device, max_requests=B, num_kv_heads=g, max_rows=block_rows, head_dim=D
    )
    block_d = padded_head_dim(D)
    pairs = B * g
    lm_at = pairs * MAX_SPLITS * block_rows * block_d
    if (
        workspace.tickets.numel() < pairs
        or workspace.partial.numel() < lm_at + pairs * MAX_SPLITS * block_rows * 2
    ):
        raise ValueError(
            f"{name}: the workspace holds {workspace.tickets.numel()} request-head pairs and "
            f"{workspace.partial.numel()} "
            f"fp32; {pairs} pairs of {block_rows} rows are needed (DecodeWorkspace.allocate with "
            "this batch's bounds)"
        )
    span = min(max_kv_len, window + max_q_len) if window else max_kv_len
    most_splits = min(triton.cdiv(span, row.constexprs["SPLIT"]) + (1 if window else 0), MAX_SPLITS)
    # Enough programs to fill the GPU a few times over; each walks its splits with that stride.
    enough = max(32, triton.cdiv(8 * arch.compute_units, pairs))
    relative = score_mod if isinstance(score_mod, RelativeBias) else None
    _decode_kernel[(min(most_splits, enough), g, B)](
        out, lse, q, k_pages, v_pages, page_table, first_page, cu_seqlens_q, kv_len,
        relative.r if relative else None,
        relative.profile.table if relative else None,
        relative.tau if relative else None,
        score_mod.aux if isinstance(score_mod, ScoreMod) else (),
        workspace.partial, workspace.partial[lm_at:], workspace.tickets,
        out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        v_pages.stride(0), v_pages.stride(1), v_pages.stride(2),
        page_table.stride(0),
        relative.r.stride(0) if relative else 0,
        relative.r.stride(1) if relative else 0,
        relative.profile.table.stride(0) if relative else 0,
        relative.profile.table.stride(1) if relative else 0,
        softmax_scale,
        MOD=mod,
        SCORE_MOD=score_mod.fn if isinstance(score_mod, ScoreMod) else None,
        EXTENT=extent,
        PAD=PROFILE_PAD,
        WINDOW=window,
        H=h,
        GROUP=group,
        D_REL=relative.r.shape[2] if relative else 1,
        BLOCK_R=relative.profile.table.shape[1] if relative else 16,
        TOKENS=tokens,
        CHUNKS=triton.cdiv(max_q_len, tokens),
        BLOCK_ROWS=block_rows,
        PAGE_SIZE=k_pages.shape[1],
        HEAD_DIM=D,
        BLOCK_D=block_d,
        MAX_SPLITS=MAX_SPLITS,
        MERGE=MERGE_SPLITS,
        MERGE_ROWS=merge_rows,
        MERGE_HERE=merge_here,
        AMD=arch.vendor == "amd",
        **row.constexprs,
        **row.options,
    )  # fmt: skip
    if not merge_here:
        _merge_kernel[(triton.cdiv(group * max_q_len, merge_rows), g, B)](
            out, lse, workspace.partial, workspace.partial[lm_at:], cu_seqlens_q, kv_len,
            out.stride(0), out.stride(1),
            WINDOW=window,
            SPLIT=row.constexprs["SPLIT"],
            H=h,
            GROUP=group,
            BLOCK_ROWS=block_rows,
            HEAD_DIM=D,
            BLOCK_D=block_d,
            MAX_SPLITS=MAX_SPLITS,
            MERGE=MERGE_SPLITS,
            MERGE_ROWS=merge_rows,
            num_warps=4,
        )  # fmt: skip
    return out if lse is None else (out, lse)
