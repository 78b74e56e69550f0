"""The metadata of a decode step in one launch: the contract of host/decode.py."""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_rocm.host.decode import DecodeTensors, check_decode_tensors
from inkling_rocm.kernels.checks import request_arch
from kernel_base.arch import Arch
from kernel_base.tuning import TuningRow, TuningTable


def metadata_table(kernel: str) -> TuningTable:
    """Rows of a kernel whose programs walk one sequence's pages, BLOCK at a time."""
    return TuningTable(
        kernel,
        tuple(
            TuningRow(
                arch=arch,
                constexprs={"BLOCK": 512},
                options={"num_warps": 4},
                evidence="guess",
                source="one load covers 32k tokens of 64-token pages; a microsecond launch",
            )
            for arch in ("gfx942", "gfx950", "sm80", "sm90", "sm100")
        ),
    )


METADATA = metadata_table("inkling_rocm.decode_metadata")


@triton.jit
def _pool_row(
    staged_ptr, table_ptr, rows_ptr, write_ptr, field, row, num_rows, slot, q_start, columns,
    width, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.load(staged_ptr + field * num_rows + row)
    page = tl.load(staged_ptr + (field + 1) * num_rows + row)
    column = q_start // PAGE_SIZE
    last = column - first
    entries = table_ptr + slot.to(tl.int64) * columns
    out = rows_ptr + row.to(tl.int64) * width
    for start in range(0, last + 1, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        pages = tl.load(entries + first + offs, mask=offs < last, other=0)
        # The page being written is not in the table yet when it is new.
        pages = tl.where(offs == last, page, pages)
        tl.store(out + offs, pages, mask=(offs <= last) & (offs < width))
    tl.store(entries + column, page, mask=slot != 0)
    tl.store(write_ptr + row, page.to(tl.int64) * PAGE_SIZE + q_start % PAGE_SIZE)


@triton.jit(do_not_specialize=("num_rows",))
def _decode_metadata_kernel(
    ids_ptr, kv_len_ptr, history_ptr, next_ptr, rows0_ptr, write0_ptr, rows1_ptr, write1_ptr,
    staged_ptr, last_ptr, table0_ptr, table1_ptr, num_rows, columns0, width0, columns1, width1,
    TAPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(staged_ptr + row)
    q_start = tl.load(staged_ptr + num_rows + row)
    token = tl.load(staged_ptr + 2 * num_rows + row).to(tl.int64)
    last = tl.load(last_ptr + slot)
    # No token could be drawn (-1): the row has ended, what it computes is dropped.
    token = tl.maximum(tl.where(token < 0, last, token), 0)
    tl.store(ids_ptr + row, token)
    tl.store(kv_len_ptr + row, q_start + 1)
    tl.store(history_ptr + row, tl.minimum(q_start, TAPS - 1))
    tl.store(next_ptr + row, (q_start + 1).to(tl.int64))
    _pool_row(
        staged_ptr, table0_ptr, rows0_ptr, write0_ptr, 3, row, num_rows, slot, q_start, columns0,
        width0, PAGE_SIZE, BLOCK,
    )  # fmt: skip
    if table1_ptr is not None:
        _pool_row(
            staged_ptr, table1_ptr, rows1_ptr, write1_ptr, 5, row, num_rows, slot, q_start,
            columns1, width1, PAGE_SIZE, BLOCK,
        )  # fmt: skip


def decode_metadata(
    tensors: DecodeTensors,
    *,
    page_size: int,
    taps: int,
    arch: Arch | str | None = None,
    row: TuningRow | None = None,
) -> None:
    """Fill the outputs of `tensors` and the tables' new entries: one launch, capturable.

    Args:    taps: of the convolutions.
    Raises: ValueError: an argument does not fit, or there is no tuning row.
    """
    check_decode_tensors(tensors)
    name = request_arch(arch, tensors.staged).name
    first, second = (*tensors.pools, None)[:2]
    assert first is not None
    rows = tensors.staged.shape[1]
    row = row or METADATA.select(name)
    _decode_metadata_kernel[(rows,)](
        tensors.input_ids, tensors.kv_len, tensors.history, tensors.next_position,
        first.rows, first.write, second and second.rows, second and second.write,
        tensors.staged, tensors.last_tokens, first.table, second and second.table, rows,
        first.table.shape[1], first.rows.stride(0),
        second.table.shape[1] if second else 0, second.rows.stride(0) if second else 0,
        TAPS=taps, PAGE_SIZE=page_size, **row.launch_kwargs(),
    )  # fmt: skip
