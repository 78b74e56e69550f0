"""Everything a decode forward reads about its batch, from a few numbers a row.

The host sends, in one copy, each row's sequence slot, position, token and for every page pool the
first live page index and the page it writes to. What is big stays on the device: page tables by
slot, and the token sampled last for each slot. Padded rows are all zero: slot 0, page 0.

A GPU derives it with kernels/metadata.py; the function here is its specification, and what a CPU
runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of DecodeTensors.staged; those of pool p are at POOL_FIELDS * p further on.
SLOT, START, TOKEN, FIRST, PAGE = range(5)
POOL_FIELDS = 2
MAX_POOLS = 2


def fields(pools: int) -> int:
    """Rows of DecodeTensors.staged."""
    return FIRST + POOL_FIELDS * pools


@dataclass(frozen=True, kw_only=True)
class PoolTensors:
    """One page pool.

    Attributes:
        table: int32 [slots, columns], page of each page index; the page being written is added.
        rows: int32 [B, width], the batch's live pages, each row from its first; more is undefined.
        write: int64 [B], flat write slot of each row's token.
    """

    table: Tensor
    rows: Tensor
    write: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeTensors:
    """Inputs: staged int32 [fields, B], last_tokens int64 [slots]. Outputs, all [B]: input_ids
    int64, kv_len and history int32, next_position int64 (= kv_len), and the pools'."""

    staged: Tensor
    last_tokens: Tensor
    input_ids: Tensor
    kv_len: Tensor
    history: Tensor
    next_position: Tensor
    pools: tuple[PoolTensors, ...]


def decode_metadata_reference(tensors: DecodeTensors, *, page_size: int, taps: int) -> None:
    """The same in torch: the specification, and what a CPU runs."""
    check_decode_tensors(tensors)
    staged = tensors.staged.long()
    slot, start, token = staged[SLOT], staged[START], staged[TOKEN]
    last = tensors.last_tokens[slot]
    tensors.input_ids.copy_(torch.where(token < 0, last, token).clamp(min=0))
    tensors.kv_len.copy_(start + 1)
    tensors.history.copy_(start.clamp(max=taps - 1))
    tensors.next_position.copy_(start + 1)
    for index, pool in enumerate(tensors.pools):
        first, page = staged[FIRST + POOL_FIELDS * index], staged[PAGE + POOL_FIELDS * index]
        column = start // page_size
        live = slot > 0
        pool.table[slot[live], column[live]] = page[live].int()
        columns = min(int((column - first).max()) + 1, pool.rows.shape[1])
        at = first[:, None] + torch.arange(columns, device=first.device)
        pages = pool.table[slot[:, None], at.clamp(max=pool.table.shape[1] - 1)]
        pool.rows[:, :columns] = torch.where(at <= column[:, None], pages, 0)
        pool.write.copy_(page * page_size + start % page_size)


def check_decode_tensors(tensors: DecodeTensors) -> None:
    """Raises: ValueError: a tensor has another shape or type than promised."""

    def require(ok: bool, what: str, got, wanted) -> None:
        if not ok:
            raise ValueError(f"decode_metadata: {what} is {got}; wanted {wanted}")

    pools = tensors.pools
    require(1 <= len(pools) <= MAX_POOLS, "the number of pools", len(pools), "1 or 2")
    shape = tuple(tensors.staged.shape)
    require(shape[0] == fields(len(pools)), "staged's shape", shape, f"{fields(len(pools))}, B")
    wanted = {
        "input_ids": torch.int64, "kv_len": torch.int32, "history": torch.int32,
        "next_position": torch.int64,
    }  # fmt: skip
    for name, dtype in wanted.items():
        x = getattr(tensors, name)
        ok = (tuple(x.shape), x.dtype, x.is_contiguous()) == (shape[1:], dtype, True)
        require(ok, name, (tuple(x.shape), x.dtype), (shape[1:], dtype))
    for pool in pools:
        ok = pool.rows.shape[0] == shape[1] and pool.rows.stride(1) == 1
        require(ok, "a pool's rows", tuple(pool.rows.shape), f"{shape[1]} rows")
        require(pool.table.is_contiguous(), "a table's strides", pool.table.stride(), "rows")
