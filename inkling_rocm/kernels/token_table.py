"""A decode step's metadata from tables of token slots in one launch: the contract of
host/token_table.py."""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_rocm.host.token_table import TokenTable, TokenTableOutputs
from inkling_rocm.kernels.checks import request_arch
from inkling_rocm.kernels.metadata import metadata_table
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow

TOKEN_TABLE = metadata_table("inkling_rocm.token_table")


@triton.jit(do_not_specialize=("window_columns",))
def _token_table_kernel(
    lengths_ptr, requests_ptr, slots_ptr, token_slots_ptr, window_slots_ptr, ring_ptr, track_ptr,
    track_slots_ptr, q_start_ptr, kv_len_ptr, history_ptr, ring_out_ptr, snapshot_ptr, write_ptr,
    window_write_ptr, pages_ptr, window_first_ptr, window_pages_ptr, stride_tokens, stride_pages,
    stride_window, window_columns, WINDOW: tl.constexpr, TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    real = slot > 0
    slot = tl.where(real, slot, 0)
    start = tl.where(real, tl.load(lengths_ptr + row).to(tl.int32) - 1, 0)
    request = tl.where(real, tl.load(requests_ptr + row).to(tl.int64), 0)
    tl.store(q_start_ptr + row, start)
    tl.store(kv_len_ptr + row, start + 1)
    tl.store(history_ptr + row, tl.minimum(start, TAPS - 1))
    ring = tl.load(ring_ptr + request).to(tl.int32)
    tl.store(ring_out_ptr + row, tl.where(real, ring, 0))
    tl.store(write_ptr + row, slot)
    in_window = tl.load(window_slots_ptr + slot).to(tl.int64)
    tl.store(window_write_ptr + row, tl.where(real, in_window, 0))
    snapshot = 0
    if track_ptr is not None:
        wanted = (tl.load(track_ptr + row) != 0) & real
        snapshot = tl.where(wanted, tl.load(track_slots_ptr + row).to(tl.int32), 0)
    tl.store(snapshot_ptr + row, snapshot)
    first = tl.maximum(start - (WINDOW - 1), 0) // PAGE_SIZE
    tl.store(window_first_ptr + row, first)

    tokens = token_slots_ptr + request * stride_tokens
    last = start // PAGE_SIZE
    for begin in range(0, last + 1, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        live = (column <= last) & real
        at = tokens + column.to(tl.int64) * PAGE_SIZE
        found = tl.load(at, mask=live, other=0).to(tl.int64)
        pages = (found // PAGE_SIZE).to(tl.int32)
        tl.store(pages_ptr + row.to(tl.int64) * stride_pages + column, pages, mask=column <= last)
        inside = (column >= first) & (column <= last)
        moved = tl.load(window_slots_ptr + found, mask=inside & live, other=0).to(tl.int64)
        kept = window_pages_ptr + row.to(tl.int64) * stride_window + (column - first)
        pages = (moved // PAGE_SIZE).to(tl.int32)
        tl.store(kept, pages, mask=inside & (column - first < window_columns))


def token_table(
    inputs: TokenTable,
    out: TokenTableOutputs,
    *,
    page_size: int,
    window: int,
    taps: int,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> None:
    """Fill `out`: one launch, capturable.

    Raises: ValueError: there is no tuning row.
    """
    name = request_arch(arch, inputs.lengths).name
    row = row or TOKEN_TABLE.select(name)
    _token_table_kernel[(len(inputs.lengths),)](
        inputs.lengths, inputs.requests, inputs.slots, inputs.token_slots, inputs.window_slots,
        inputs.ring_of_request, inputs.track, inputs.track_slots, out.q_start, out.kv_len,
        out.history, out.ring, out.snapshot, out.write, out.window_write, out.pages,
        out.window_first, out.window_pages, inputs.token_slots.stride(0), out.pages.stride(0),
        out.window_pages.stride(0), out.window_pages.shape[1], WINDOW=window, TAPS=taps,
        PAGE_SIZE=page_size, **row.launch_kwargs(),
    )  # fmt: skip
