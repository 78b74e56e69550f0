"""The strided layout of the relative bias, and the kernel that writes it.

Row i of a request holds its profile reversed: column c is the distance E - 1 - c. With a row pitch
L, the bias of key n
for the row at position t0 + i sits at

    i * L + (E - 1) - (t0 + i - n)  =  i * (L - 1) + n + (E - 1 - t0)

so a tile of it is an ordinary strided tile: row stride L - 1, unit column stride, no gather. L - 1
is a multiple of 16 and a request's rows are shifted right by (t0 - E + 1) mod 16, so every key tile
starts on a 32-byte boundary whatever the prefix. L leaves 16 spare columns, so the writer may store
whole 16-column vectors: a memory sector that two stores share would cost a read.

The writer takes rows sixteen apart: they need the same shift for their stores to be aligned, and
the table of `RelativeProfile` holds the profile at all sixteen shifts. The buffer is written and
read chunk by chunk, so its size is bounded whatever the number of tokens and heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernel_base.device import await_previous, let_next_start
from kernel_base.tuning import TuningRow
from triton_attn.score_mod import PROFILE_PAD, SHIFTS, RelativeBias
from triton_attn.tiles import LOG2E, find_request

# A tile may stick out of the rows at either end of the buffer; what is read there is masked, never
# used.
BUFFER_PAD = 512
# Bound on the buffer: half the Infinity Cache of a MI300X, and enough rows a chunk to fill any GPU
# several times.
BUFFER_BYTES = 160 * 1024 * 1024


@triton.jit(do_not_specialize=["num_requests", "head0", "first_block", "first_group"])
def _profile_rows_kernel(
    rows_ptr, r_ptr, table_ptr, tau_ptr, cu_seqlens_q_ptr, q_start_ptr,
    num_requests, head0, first_block, first_group, factor, chunk_rows, stride_r_t: tl.constexpr,
    stride_r_h: tl.constexpr, stride_table_s: tl.constexpr, stride_table_r: tl.constexpr,
    EXTENT: tl.constexpr, FIRST_COLUMN: tl.constexpr, PITCH: tl.constexpr, PAD: tl.constexpr,
    D_REL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, CHAINED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows residue, residue + 16, ... of 16 * ROWS query rows of one head: factor * tau * r . P,
    reversed."""
    let_next_start(CHAINED)
    END: tl.constexpr = (EXTENT + 7) // 8 * 8 + 16  # whole 8-column vectors at any shift
    # Residues vary fastest: the sixteen programs of a row group fill the same cache lines.
    residue, column_block = tl.program_id(0) % 16, tl.program_id(0) // 16
    # Groups slowest, as the attention reads them; its first blocks, the last ones, are still in L2.
    head, group = tl.program_id(1), first_group + tl.program_id(2)
    request = find_request(group, cu_seqlens_q_ptr, num_requests, 16 * ROWS)
    first_token = tl.load(cu_seqlens_q_ptr + request)
    q_len = tl.load(cu_seqlens_q_ptr + request + 1) - first_token
    i0 = (group - first_token // (16 * ROWS) - request) * (16 * ROWS)
    # Rows of the chunk are counted in the attention kernel's blocks, which start anew with every
    # request.
    row0 = (first_token // BLOCK_M + request - first_block) * BLOCK_M
    i = i0 + residue + 16 * tl.arange(0, ROWS)
    row = row0 + i
    mask_i = (i < q_len) & (row >= 0) & (row < chunk_rows)
    token = (first_token + i).to(tl.int64)
    offs_r = tl.arange(0, BLOCK_R)
    r_ptrs = r_ptr + token[:, None] * stride_r_t + (head0 + head) * stride_r_h + offs_r[None, :]
    r = tl.load(r_ptrs, mask=mask_i[:, None] & (offs_r < D_REL)[None, :], other=0.0)
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + token, mask=mask_i, other=0.0) * factor
    else:
        tau = tl.full([ROWS], 1.0, tl.float32) * factor
    start = tl.load(q_start_ptr + request)
    # The attention of the chunk before still reads the rows; every program waits for it, also
    # those without work, so that this launch cannot end before that one.
    await_previous(CHAINED)
    if (i0 >= q_len) | (row0 + i0 >= chunk_rows) | (row0 + i0 + 16 * ROWS <= 0):
        return
    shift = (start - (EXTENT - 1)) & 15
    copy = (residue + shift) & 15
    table_ptr += tl.multiple_of(copy * stride_table_s, 16) + FIRST_COLUMN
    # row * PITCH + shift - copy, written as multiples of 16: PITCH - 1 is one, and so is row +
    # shift - copy.
    first_row = head.to(tl.int64) * chunk_rows
    row_start = (first_row + row) * (PITCH - 1) + first_row + ((row + shift - copy) >> 4) * 16
    # Columns of distances that no row of the group reaches back to are not needed.
    needed = tl.maximum(EXTENT - 1 - (start + i0 + 16 * ROWS - 1), 0) // BLOCK_C * BLOCK_C
    first = tl.maximum(needed, column_block * COLUMNS)
    for x0 in tl.range(
        first, tl.minimum(END, (column_block + 1) * COLUMNS), BLOCK_C, num_stages=STAGES
    ):
        x = x0 + tl.arange(0, BLOCK_C)
        p = tl.load(table_ptr + offs_r[:, None] * stride_table_r + x[None, :])
        rel = tl.dot(r, p, input_precision="ieee") * tau[:, None]
        ptrs = rows_ptr + PAD + row_start[:, None] + x[None, :]
        tl.store(
            ptrs,
            rel.to(rows_ptr.dtype.element_ty),
            mask=mask_i[:, None] & (x < END)[None, :],
        )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Heads head0 .. head0 + heads - 1 and query blocks first_block .. first_block + blocks - 1."""

    head0: int
    heads: int
    first_block: int
    blocks: int


def pitch_of(extent: int) -> int:
    """Row pitch, in elements: 1 more than a multiple of 16, with at least 16 spare columns."""
    return triton.cdiv(extent, 16) * 16 + 17


def plan_chunks(
    num_blocks: int,
    heads: int,
    block_m: int,
    extent: int,
    itemsize: int,
    bound_bytes: int = BUFFER_BYTES,
) -> list[Chunk]:
    """Cut [heads, num_blocks] so that the rows of a chunk fit the bound: by heads first, then by
    blocks, last
    blocks first (they are the longest)."""
    blocks_fit = max((bound_bytes // itemsize - 2 * BUFFER_PAD) // (pitch_of(extent) * block_m), 1)
    if blocks_fit >= num_blocks:
        count = triton.cdiv(heads, blocks_fit // num_blocks)
        step = triton.cdiv(heads, count)
        return [
            Chunk(head0=at, heads=min(step, heads - at), first_block=0, blocks=num_blocks)
            for at in range(0, heads, step)
        ]
    step = triton.cdiv(num_blocks, triton.cdiv(num_blocks, blocks_fit))
    firsts = reversed(range(0, num_blocks, step))
    return [
        Chunk(head0=head, heads=1, first_block=at, blocks=min(step, num_blocks - at))
        for at in firsts
        for head in range(heads)
    ]


def allocate_rows(
    chunks: list[Chunk], block_m: int, extent: int, like: torch.Tensor
) -> torch.Tensor:
    """A buffer for the largest of the chunks."""
    rows = max(c.heads * c.blocks for c in chunks) * block_m
    return torch.empty(
        rows * pitch_of(extent) + 2 * BUFFER_PAD, dtype=like.dtype, device=like.device
    )


def groups_of(
    chunk: Chunk, block_m: int, group_rows: int, tokens: int, requests: int
) -> tuple[int, int]:
    """(first, count) of the writer's row groups that may hold rows of the chunk, whatever the
    lengths of the requests.

    Block k of the attention and group g of the writer both count from each request's start:
    k = c // block_m + b + i // block_m, g = c // group_rows + b + i // group_rows for row i of
    request b that starts at token c. So g is k * ratio + b * (1 - ratio), less than 2 below and
    less than 2 * ratio above.
    """
    ratio = block_m / group_rows
    lean = (requests - 1) * (1 - ratio)
    first = math.floor(chunk.first_block * ratio + min(lean, 0.0)) - 1
    last = math.ceil((chunk.first_block + chunk.blocks + 1) * ratio + max(lean, 0.0))
    first, last = max(first, 0), min(last, tokens // group_rows + requests)
    return first, max(last - first, 1)


def write_profile_rows(
    rows: torch.Tensor,
    bias: RelativeBias,
    *,
    chunk: Chunk,
    block_m: int,
    extent: int,
    cu_seqlens_q: torch.Tensor,
    q_start: torch.Tensor,
    row: TuningRow,
    factor: float = LOG2E.value,
    chained: bool = False,
) -> None:
    """Write the strided rows of `chunk` into `rows`, [heads, blocks * block_m] rows of
    `pitch_of(extent)` elements.

    Args:
        rows: from `allocate_rows`.
        extent: distances to keep, at most bias.extent (a window shorter than the extent needs no
        more).
        row: launch configuration of the writer; with the option launch_pdl, its programs may start
            before the previous launch has ended.
        factor: what the bias is multiplied with, for the unit in which the attention adds it.
        chained: the launch after this one has the option launch_pdl (NVIDIA only).
    """
    table = bias.profile.table
    first_group, groups = groups_of(
        chunk, block_m, SHIFTS * int(row.constexprs["ROWS"]), bias.r.shape[0], q_start.shape[0]
    )
    column_blocks = triton.cdiv(extent + SHIFTS, row.constexprs["COLUMNS"])
    _profile_rows_kernel[(SHIFTS * column_blocks, chunk.heads, groups)](
        rows, bias.r, table, bias.tau, cu_seqlens_q, q_start, q_start.shape[0], chunk.head0,
        chunk.first_block, first_group, factor,
        chunk.blocks * block_m, bias.r.stride(0), bias.r.stride(1), table.stride(0),
        table.stride(1),
        EXTENT=extent,
        FIRST_COLUMN=PROFILE_PAD + bias.extent - extent,
        PITCH=pitch_of(extent),
        PAD=BUFFER_PAD,
        D_REL=bias.r.shape[2],
        BLOCK_R=table.shape[1],
        BLOCK_M=block_m,
        CHAINED=chained,
        **row.launch_kwargs(waits=True),
    )  # fmt: skip
