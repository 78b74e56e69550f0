"""The metadata kernel in the kernel register."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields as fields_of
from functools import partial

import torch
from torch import Tensor

from inkling_rocm.host.decode import (
    DecodeTensors,
    PoolTensors,
    decode_metadata_reference,
    fields,
)
from inkling_rocm.kernels.metadata import METADATA, decode_metadata
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow

UNSET = -77


def make_problem(
    rows: int,
    *,
    pools: int,
    page_size: int = 4,
    columns: int = 1200,
    window: int = 9,
    seed: int = 0,
) -> DecodeTensors:
    """Random rows, some of them padding, one longer than a block of pages; outputs are UNSET."""
    generator = torch.Generator().manual_seed(seed)
    slots = 2 * rows + 1
    staged = torch.zeros(fields(pools), rows, dtype=torch.int32)
    live = torch.arange(rows) % 4 != 3
    order = torch.randperm(slots - 1, generator=generator)[:rows] + 1
    longest = columns * page_size - 1
    start = torch.randint(0, 60, (rows,), generator=generator)
    start[0] = longest
    start[rows // 2] = 0
    token = torch.randint(-1, 50, (rows,), generator=generator)
    last_tokens = torch.randint(-1, 50, (slots,), generator=generator)
    made = []
    for index in range(pools):
        table = torch.randint(1, 9999, (slots, columns), generator=generator, dtype=torch.int32)
        table[0] = 0
        page = torch.randint(1, 9999, (rows,), generator=generator)
        first = ((start - (window - 1)) // page_size).clamp(min=0) if index else start * 0
        width = window // page_size + 3 if index else columns
        staged[3 + 2 * index] = torch.where(live, first, 0)
        staged[4 + 2 * index] = torch.where(live, page, 0)
        made.append(
            PoolTensors(
                table=table,
                rows=torch.full((rows, width), UNSET, dtype=torch.int32),
                write=torch.full((rows,), UNSET, dtype=torch.int64),
            )
        )
    for field, values in enumerate((order, start, token)):
        staged[field] = torch.where(live, values, 0)
    int32, int64 = (
        partial(torch.full, (rows,), UNSET, dtype=dtype) for dtype in (torch.int32, torch.int64)
    )
    return DecodeTensors(
        staged=staged, last_tokens=last_tokens, input_ids=int64(), kv_len=int32(),
        history=int32(), next_position=int64(), pools=tuple(made),
    )  # fmt: skip


def on(tensors: DecodeTensors, device: torch.device) -> DecodeTensors:
    """A copy on a device."""

    def moved(x: DecodeTensors | PoolTensors) -> dict[str, Tensor]:
        found = {f.name: getattr(x, f.name) for f in fields_of(x) if f.name != "pools"}
        return {name: value.to(device, copy=True) for name, value in found.items()}

    pools = tuple(PoolTensors(**moved(pool)) for pool in tensors.pools)
    return DecodeTensors(pools=pools, **moved(tensors))


def shown(tensors: DecodeTensors, page_size: int) -> dict[str, Tensor]:
    """Every output by name; entries of page rows past the live ones, which are undefined, UNSET."""
    names = ("input_ids", "kv_len", "history", "next_position")
    found = {name: getattr(tensors, name).cpu() for name in names}
    staged = tensors.staged.cpu()
    for index, pool in enumerate(tensors.pools):
        last = staged[1] // page_size - staged[3 + 2 * index]
        dead = torch.arange(pool.rows.shape[1]) > last[:, None]
        found[f"rows {index}"] = pool.rows.cpu().masked_fill(dead, UNSET)
        found[f"write {index}"] = pool.write.cpu()
        found[f"table {index}"] = pool.table.cpu()
    return found


def outcomes(
    problem: DecodeTensors, device: torch.device, *, page_size: int = 4, **options
) -> list[Outcome]:
    """The kernel's outputs beside the reference's; equal, because all are integers."""
    got, want = on(problem, device), on(problem, torch.device("cpu"))
    decode_metadata(got, page_size=page_size, taps=4, **options)
    decode_metadata_reference(want, page_size=page_size, taps=4)
    wanted = shown(want, page_size)
    return [
        Outcome(name=name, out=out.double(), reference=wanted[name].double(), eager=wanted[name])
        for name, out in shown(got, page_size).items()
    ]


def _case(arch: str, row: TuningRow, rows: int, pools: int, device: torch.device) -> list[Outcome]:
    return outcomes(make_problem(rows, pools=pools), device, arch=arch, row=row)


def _cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="two pools, 7 rows", run=partial(_case, arch, row, 7, 2))
    yield Case(name="one pool, 2 rows", run=partial(_case, arch, row, 2, 1))


ENTRY = register(
    KernelEntry(
        name=METADATA.kernel,
        kernels=("inkling_rocm.kernels.metadata:_decode_metadata_kernel",),
        table=METADATA,
        cases=_cases,
    )
)
