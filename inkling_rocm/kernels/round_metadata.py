"""The metadata of a speculative round, one launch in front of each of its two layouts: the contract
of host/round.py. Emulated, and tested on an H200."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inkling_rocm.host.round import LayoutTensors, RoundTensors, check_round_tensors
from inkling_rocm.kernels.checks import request_arch
from inkling_rocm.kernels.metadata import metadata_table
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow

ROUND_METADATA = metadata_table("inkling_rocm.round_metadata")


@triton.jit
def _layout_row(
    positions_ptr, q_start_ptr, kv_len_ptr, history_ptr, row, start,
    LENGTH: tl.constexpr, TOKENS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, TOKENS)
    tl.store(positions_ptr + row * LENGTH + offs, start + offs, mask=offs < LENGTH)
    tl.store(q_start_ptr + row, start)
    tl.store(kv_len_ptr + row, start + LENGTH)
    tl.store(history_ptr + row, tl.minimum(start, TAPS - 1))


@triton.jit
def _pool_row(
    staged_ptr, table_ptr, rows_ptr, write_ptr, field, row, num_rows, slot, start, limit, columns,
    width, LENGTH: tl.constexpr, TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.load(staged_ptr + field * num_rows + row)
    entries = table_ptr + slot.to(tl.int64) * columns
    offs = tl.arange(0, TOKENS)
    position = start + offs
    paged = (offs < LENGTH) & (position < limit)
    page = tl.load(entries + position // PAGE_SIZE, mask=paged, other=0).to(tl.int64)
    write = tl.where(paged, page * PAGE_SIZE + position % PAGE_SIZE, 0)
    tl.store(write_ptr + row * LENGTH + offs, write, mask=offs < LENGTH)
    last = (start + LENGTH - 1) // PAGE_SIZE - first
    out = rows_ptr + row.to(tl.int64) * width
    for begin in range(0, last + 1, BLOCK):
        offs_p = begin + tl.arange(0, BLOCK)
        column = first + offs_p
        known = (offs_p <= last) & (column * PAGE_SIZE < limit)
        pages = tl.load(entries + column, mask=known, other=0)
        tl.store(out + offs_p, pages, mask=(offs_p <= last) & (offs_p < width))


@triton.jit(do_not_specialize=("num_rows",))
def _verify_metadata_kernel(
    slot_ptr, ids_ptr, row_drafts_ptr, position_ptr, hidden_to_ptr, known_ptr, positions_ptr,
    q_start_ptr, kv_len_ptr, history_ptr, rows0_ptr, write0_ptr, rows1_ptr, write1_ptr,
    staged_ptr, length_ptr, recent_ptr, drafts_ptr, table0_ptr, table1_ptr, num_rows, columns0,
    width0, columns1, width1,
    DEPTHS: tl.constexpr, LENGTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    RECENT: tl.constexpr, TAPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RECENT: the row of `staged` where the recent tokens begin."""
    row = tl.program_id(0)
    slot = tl.load(staged_ptr + row)
    given = tl.load(staged_ptr + num_rows + row)
    limit = tl.load(staged_ptr + 2 * num_rows + row)
    wide_slot = slot.to(tl.int64)
    start = tl.where(given < 0, tl.load(length_ptr + slot), given)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < DEPTHS
    staged = tl.load(staged_ptr + (RECENT + offs_n) * num_rows + row, mask=mask_n, other=0)
    kept = tl.load(recent_ptr + wide_slot * DEPTHS + offs_n, mask=mask_n, other=0)
    recent = tl.where(given < 0, kept, staged.to(tl.int64))
    tl.store(known_ptr + row * (DEPTHS + LENGTH) + offs_n, recent, mask=mask_n)
    newest = tl.sum(tl.where(offs_n == DEPTHS - 1, recent, 0), 0)
    offs = tl.arange(0, TOKENS)
    is_draft = (offs > 0) & (offs < LENGTH)
    draft = tl.load(drafts_ptr + wide_slot * DEPTHS + offs - 1, mask=is_draft, other=0)
    tl.store(row_drafts_ptr + row * (LENGTH - 1) + offs - 1, draft, mask=is_draft)
    ids = tl.maximum(tl.where(offs == 0, newest, draft), 0)
    tl.store(ids_ptr + row * LENGTH + offs, ids, mask=offs < LENGTH)
    kept_at = wide_slot * (2 * DEPTHS) + (start + offs) % (2 * DEPTHS)
    tl.store(hidden_to_ptr + row * LENGTH + offs, kept_at, mask=offs < LENGTH)
    tl.store(slot_ptr + row, wide_slot)
    tl.store(position_ptr + row, (start + 1).to(tl.int64))
    _layout_row(positions_ptr, q_start_ptr, kv_len_ptr, history_ptr, row, start, LENGTH, TOKENS,
                TAPS)  # fmt: skip
    _pool_row(
        staged_ptr, table0_ptr, rows0_ptr, write0_ptr, 3, row, num_rows, slot, start, limit,
        columns0, width0, LENGTH, TOKENS, PAGE_SIZE, BLOCK,
    )  # fmt: skip
    if table1_ptr is not None:
        _pool_row(
            staged_ptr, table1_ptr, rows1_ptr, write1_ptr, 4, row, num_rows, slot, start, limit,
            columns1, width1, LENGTH, TOKENS, PAGE_SIZE, BLOCK,
        )  # fmt: skip


@triton.jit
def _known(known_ptr, tokens_ptr, row, index, mask, DEPTHS: tl.constexpr, DRAWN: tl.constexpr):
    """Token `index` of a row's recent tokens and those just drawn."""
    old = tl.load(known_ptr + row * (DEPTHS + DRAWN) + index, mask=mask & (index < DEPTHS), other=0)
    is_new = mask & (index >= DEPTHS)
    new = tl.load(tokens_ptr + row * DRAWN + index - DEPTHS, mask=is_new, other=0)
    return tl.where(is_new, tl.maximum(new, 0), old)


@triton.jit(do_not_specialize=("num_rows",))
def _draft_metadata_kernel(
    window_ids_ptr, hidden_from_ptr, tip_ptr, column_ptr, draft_position_ptr, known_ptr,
    length_ptr, recent_ptr, positions_ptr, q_start_ptr, kv_len_ptr, history_ptr, rows0_ptr,
    write0_ptr, rows1_ptr, write1_ptr, tokens_ptr, staged_ptr, verify_start_ptr, table0_ptr,
    table1_ptr, num_rows, columns0, width0, columns1, width1,
    DEPTHS: tl.constexpr, DRAWN: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, TAPS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    LENGTH: tl.constexpr = 2 * DEPTHS
    row = tl.program_id(0)
    slot = tl.load(staged_ptr + row)
    limit = tl.load(staged_ptr + 2 * num_rows + row)
    wide_slot = slot.to(tl.int64)
    start = tl.load(verify_start_ptr + row)
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < DRAWN
    tokens = tl.load(tokens_ptr + row * DRAWN + offs_m, mask=mask_m, other=-1)
    # A row without a token has ended; it goes on as if 0 had been drawn.
    count = tl.maximum(tl.sum((tokens >= 0).to(tl.int32), 0), 1)
    at = known_ptr + row * (DEPTHS + DRAWN) + DEPTHS + offs_m
    tl.store(at, tl.maximum(tokens, 0), mask=mask_m)
    following = start + count
    first = tl.maximum(start - (DEPTHS - 1), 0)
    offs_w = tl.arange(0, BLOCK_W)
    after = first + 1 - start + offs_w
    found = (offs_w < 3 * DEPTHS) & (after <= count)
    ids = _known(known_ptr, tokens_ptr, row, after + DEPTHS - 1, found, DEPTHS, DRAWN)
    at_w = window_ids_ptr + row * (3 * DEPTHS) + offs_w
    tl.store(at_w, tl.where(found, ids, 0), mask=offs_w < 3 * DEPTHS)
    offs = tl.arange(0, TOKENS)
    position = first + offs
    kept_at = wide_slot * LENGTH + position % LENGTH
    kept_at = tl.where(position < following, kept_at, 0)
    tl.store(hidden_from_ptr + row * LENGTH + offs, kept_at, mask=offs < LENGTH)
    tl.store(tip_ptr + row, (row * LENGTH + following - 1 - first).to(tl.int64))
    tl.store(column_ptr + row, (following - first).to(tl.int64))
    tl.store(draft_position_ptr + row, (following + 1).to(tl.int64))
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < DEPTHS
    newest = _known(known_ptr, tokens_ptr, row, count + offs_n, mask_n, DEPTHS, DRAWN)
    tl.store(recent_ptr + wide_slot * DEPTHS + offs_n, newest, mask=mask_n & (slot != 0))
    tl.store(length_ptr + slot, following, mask=slot != 0)
    _layout_row(positions_ptr, q_start_ptr, kv_len_ptr, history_ptr, row, first, LENGTH, TOKENS,
                TAPS)  # fmt: skip
    _pool_row(
        staged_ptr, table0_ptr, rows0_ptr, write0_ptr, 3, row, num_rows, slot, first, limit,
        columns0, width0, LENGTH, TOKENS, PAGE_SIZE, BLOCK,
    )  # fmt: skip
    if table1_ptr is not None:
        _pool_row(
            staged_ptr, table1_ptr, rows1_ptr, write1_ptr, 4, row, num_rows, slot, first, limit,
            columns1, width1, LENGTH, TOKENS, PAGE_SIZE, BLOCK,
        )  # fmt: skip


def verify_metadata(
    tensors: RoundTensors,
    *,
    page_size: int,
    taps: int,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> None:
    """host/round.py's verify_metadata_reference in one launch; capturable.

    Args:    taps: of the convolutions.
    Raises: ValueError: an argument does not fit, or there is no tuning row.
    """
    check_round_tensors(tensors)
    t = tensors
    row = row or ROUND_METADATA.select(request_arch(arch, t.staged).name)
    length = t.offered + 1
    outputs, sizes = _pool_arguments(t.verify)
    _verify_metadata_kernel[(t.rows,)](
        t.slot, t.input_ids, t.row_drafts, t.position, t.hidden_to, t.known, *outputs, t.staged,
        t.length, t.recent, t.drafts, *_tables(t.verify), t.rows, *sizes,
        DEPTHS=t.depths,
        LENGTH=length,
        TOKENS=_power(length),
        BLOCK_N=_power(t.depths),
        RECENT=3 + len(t.verify.pools),
        TAPS=taps,
        PAGE_SIZE=page_size,
        **row.launch_kwargs(),
    )  # fmt: skip


def draft_metadata(
    tensors: RoundTensors,
    tokens_BM: Tensor,
    *,
    page_size: int,
    taps: int,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> None:
    """host/round.py's draft_metadata_reference in one launch; capturable.

    Args:    tokens_BM: int64 [B, k + 1], contiguous. taps: of the convolutions.
    Raises: ValueError: an argument does not fit, or there is no tuning row.
    """
    check_round_tensors(tensors)
    t, shape = tensors, (tensors.rows, tensors.offered + 1)
    if tuple(tokens_BM.shape) != shape or not tokens_BM.is_contiguous():
        raise ValueError(
            f"draft_metadata: tokens are {tuple(tokens_BM.shape)} with strides "
            f"{tokens_BM.stride()}; wanted contiguous {shape}"
        )
    row = row or ROUND_METADATA.select(request_arch(arch, t.staged).name)
    outputs, sizes = _pool_arguments(t.draft)
    _draft_metadata_kernel[(t.rows,)](
        t.window_ids, t.hidden_from, t.tip, t.column, t.draft_position, t.known, t.length,
        t.recent, *outputs, tokens_BM, t.staged, t.verify.q_start, *_tables(t.draft), t.rows,
        *sizes,
        DEPTHS=t.depths,
        DRAWN=shape[1],
        BLOCK_M=_power(shape[1]),
        TOKENS=_power(2 * t.depths),
        BLOCK_W=_power(3 * t.depths),
        BLOCK_N=_power(t.depths),
        TAPS=taps,
        PAGE_SIZE=page_size,
        **row.launch_kwargs(),
    )  # fmt: skip


def _pool_arguments(layout: LayoutTensors) -> tuple[list, list[int]]:
    """A layout's outputs, and the widths of its tables and page rows; None and 0 for a pool that is
    not there."""
    outputs: list = [layout.positions, layout.q_start, layout.kv_len, layout.history]
    sizes = []
    for pool in (*layout.pools, None)[:2]:
        outputs += [None, None] if pool is None else [pool.rows, pool.write]
        sizes += [0, 0] if pool is None else [pool.table.shape[1], pool.rows.stride(0)]
    return outputs, sizes


def _tables(layout: LayoutTensors) -> list:
    return [pool and pool.table for pool in (*layout.pools, None)[:2]]


def _power(size: int) -> int:
    """A block of at least two: smaller ones are not vectors."""
    return max(triton.next_power_of_2(size), 2)
