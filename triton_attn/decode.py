"""Decode and verify: launchers and workspace of the kernels in decode_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow
from triton_attn.checks import check_paged, padded_head_dim, request_arch
from triton_attn.decode_kernels import _decode_kernel
from triton_attn.decode_merge import _merge_kernel
from triton_attn.prefill import MOD_FN, MOD_RELATIVE, mod_facts
from triton_attn.score_mod import PROFILE_PAD, RelativeBias, ScoreMod
from triton_attn.tuning import DECODE, tile_rows

MAX_VERIFY_TOKENS = 16
# Partial results that a request and K/V head has at most.
MAX_PARTS = 128
# Programs per 100 compute units that keep a GPU busy: from there on they take groups of units. A
# row's FILL overrides it.
FILL = 190


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
    ) -> DecodeWorkspace:
        """Enough for batches of `max_requests` with `max_rows` rows (h / g times the most query
        tokens) a request and K/V head."""
        pairs = max_requests * num_kv_heads
        size = pairs * MAX_PARTS * max_rows * (padded_head_dim(head_dim) + 2)
        return DecodeWorkspace(
            partial=torch.empty(size, dtype=torch.float32, device=device),
            tickets=torch.zeros(pairs * MAX_VERIFY_TOKENS, dtype=torch.int32, device=device),
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
    # Row blocks: the tokens of a tile, and how many tiles a request has.
    row_blocks = triton.cdiv(max_q_len, max(1, tile_rows(arch.name, window, D) // group))
    tokens_here, rows = triton.cdiv(max_q_len, row_blocks), group * max_q_len
    merge_rows = triton.next_power_of_2(group * tokens_here)
    row = row or DECODE.select(
        arch.name,
        head_dim=D,
        window=window,
        rows=max(16, merge_rows),
        bits=q.element_size() * 8,
        relative=mod == MOD_RELATIVE,
        tokens=max_q_len,
        packed=rows,
        kv_heads=g,
        warp_groups=mod != MOD_FN
        and _warp_groups_fit(arch, group, max_q_len, k_pages.shape[1], D, window, score_mod),
    )
    workspace = workspace or DecodeWorkspace.allocate(
        q.device, max_requests=B, num_kv_heads=g, max_rows=rows, head_dim=D
    )
    block_d, pairs = padded_head_dim(D), B * g
    lm_at = pairs * MAX_PARTS * rows * block_d
    if (
        workspace.tickets.numel() < pairs * row_blocks
        or workspace.partial.numel() < lm_at + pairs * MAX_PARTS * rows * 2
    ):
        raise ValueError(
            f"{name}: the workspace holds {workspace.tickets.numel()} tickets and "
            f"{workspace.partial.numel()} fp32; {pairs} request-head pairs of {rows} rows are "
            "needed (DecodeWorkspace.allocate with this batch's bounds)"
        )
    partial, partial_lm = workspace.partial, workspace.partial[lm_at:]
    # A bound on the parts of a request: groups where these alone fill the GPU, else units.
    span = min(max_kv_len, window + max_q_len - 1) if window else max_kv_len
    span = max(span, 1)  # rows without keys are written too
    if row.constexprs.get("VARIANT") == "hopper" and window:
        from triton_attn.hopper_window import launch_hopper_window

        launch_hopper_window(
            out, lse, q, k_pages, v_pages, page_table, first_page, cu_seqlens_q, kv_len, score_mod,
            partial, partial_lm, max_q_len=max_q_len, window=window, max_parts=MAX_PARTS,
            softmax_scale=softmax_scale, programs=arch.compute_units, row=row,
        )  # fmt: skip
        return out if lse is None else (out, lse)
    split = int(row.constexprs["SPLIT"])
    if row.constexprs.get("VARIANT") == "hopper":
        from triton_attn.hopper_verify import launch_hopper_verify  # Gluon: only where it is used

        launch_hopper_verify(
            q, k_pages, v_pages, page_table, first_page, cu_seqlens_q, kv_len, score_mod, partial,
            partial_lm, max_q_len=max_q_len, most_parts=min(triton.cdiv(span, split), MAX_PARTS),
            max_parts=MAX_PARTS, softmax_scale=softmax_scale, programs=arch.compute_units, row=row,
        )  # fmt: skip
        _merge(
            out, lse, partial, partial_lm, cu_seqlens_q, kv_len, row, g, rows, window,
            UNITS=1, MANY=0, ROW_BLOCKS=1, SINGLE=True,
        )  # fmt: skip
        return out if lse is None else (out, lse)
    units = int(row.constexprs["UNITS"])
    # A window starts anywhere in its first unit.
    most_units = triton.cdiv(span - 1, split) + 1 if window else triton.cdiv(span, split)
    tiles = pairs * row_blocks
    constants = dict(row.constexprs)
    constants.pop("MERGE_WARPS", None)
    many = int(constants.pop("FILL", FILL)) * arch.compute_units // 100
    groups = triton.cdiv(most_units, units)
    most_parts = groups if tiles * groups >= many else most_units
    # Enough programs to fill the GPU a few times over; each walks the parts with that stride.
    enough = max(32, triton.cdiv(8 * arch.compute_units, tiles))
    # Programs of a single unit may take fewer stages, whose shared memory leaves room for more of
    # them. A compiler may contract the pipelined sums otherwise: rows where the two differ are
    # proven bit by bit on their GPU (tests/triton_attn/test_gpu.py).
    alone = constants.pop("ALONE", constants["STAGES"])
    if most_parts > groups:
        constants["STAGES"] = alone
    relative = score_mod if isinstance(score_mod, RelativeBias) else None
    programs = min(most_parts, enough, MAX_PARTS)
    profile = relative.profile.by_key if relative else None
    block_r = 16 if profile is None else profile.shape[1]
    tokens = triton.next_power_of_2(tokens_here)
    _decode_kernel[(programs * row_blocks, g, B)](
        out, lse, q, k_pages, v_pages, page_table, first_page, cu_seqlens_q, kv_len,
        relative.r if relative else None,
        profile,
        relative.tau if relative else None,
        score_mod.aux if isinstance(score_mod, ScoreMod) else (),
        partial, partial_lm, workspace.tickets,
        out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        v_pages.stride(0), v_pages.stride(1), v_pages.stride(2),
        page_table.stride(0),
        relative.r.stride(0) if relative else 0,
        relative.r.stride(1) if relative else 0,
        softmax_scale,
        MOD=mod,
        SCORE_MOD=score_mod.fn if isinstance(score_mod, ScoreMod) else None,
        EXTENT=extent,
        PAD=PROFILE_PAD,
        WINDOW=window,
        H=h,
        GROUP=group,
        D_REL=relative.r.shape[2] if relative else 1,
        BLOCK_R=block_r,
        TOKENS=tokens,
        PACK=_pack(arch, row, tokens * block_r, q.element_size()),
        TOKENS_HERE=tokens_here,
        ROW_BLOCKS=row_blocks,
        ROWS=rows,
        BLOCK_ROWS=max(16, merge_rows),
        PAGE_SIZE=k_pages.shape[1],
        HEAD_DIM=D,
        BLOCK_D=block_d,
        MAX_PARTS=MAX_PARTS,
        MERGE_ROWS=merge_rows,
        MANY=many,
        AMD=arch.vendor == "amd",
        **constants,
        **row.launch_options(),
    )  # fmt: skip
    if not row.constexprs["MERGE_HERE"] and most_parts > 1:
        _merge(
            out, lse, partial, partial_lm, cu_seqlens_q, kv_len, row, g, rows, window,
            UNITS=units, MANY=many, ROW_BLOCKS=row_blocks, SINGLE=False,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def _warp_groups_fit(arch: Arch, *call) -> bool:
    """Whether warp groups can take the call; see hopper_operands.fits."""
    if arch.name != "sm90":
        return False
    from triton_attn.hopper_operands import fits  # Gluon: only where it is used

    return fits(*call)


def _merge(
    out, lse, partial, partial_lm, cu_seqlens_q, kv_len, row, kv_heads, rows, window, **constants
):  # fmt: skip
    """The merge as a launch of its own (decode_merge.py)."""
    pdl, (_, h, D) = row.constexprs["PDL"], out.shape
    _merge_kernel[(rows, kv_heads, kv_len.shape[0])](
        out, lse, partial, partial_lm, cu_seqlens_q, kv_len, out.stride(0), out.stride(1),
        WINDOW=window,
        SPLIT=row.constexprs["SPLIT"],
        H=h,
        GROUP=h // kv_heads,
        ROWS=rows,
        HEAD_DIM=D,
        BLOCK_D=padded_head_dim(D),
        MAX_PARTS=MAX_PARTS,
        MERGE=row.constexprs["MERGE"],
        PDL=pdl,
        num_warps=row.constexprs.get("MERGE_WARPS", 4),
        **constants,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _pack(arch: Arch, row: TuningRow, width: int, element_bytes: int) -> int:
    """Elements of the profile that are read as one 64-bit word; 1 leaves it to the compiler, which
    gives a lane no more than its share of the tile (and loads to LDS are 4 or 16 bytes)."""
    lanes = arch.wave_size * int(row.options["num_warps"])
    share = width * int(row.constexprs["BLOCK_N"]) * element_bytes / lanes
    return 8 // element_bytes if arch.vendor == "amd" and share < 16 else 1
