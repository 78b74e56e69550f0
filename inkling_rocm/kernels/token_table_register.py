"""The token table kernel in the kernel register."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.host.token_table import (
    TokenTable,
    TokenTableOutputs,
    token_table_reference,
)
from inkling_rocm.kernels.token_table import TOKEN_TABLE, token_table
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow

UNSET = -77
WINDOW, TAPS = 9, 4


def make_problem(
    rows: int, *, page_size: int = 4, context: int = 2400, track: bool = True, seed: int = 0
) -> TokenTable:
    """Random rows, one padding in four, one as long as its pages; pages in random order, and
    those of the window freed below it."""
    generator = torch.Generator().manual_seed(seed)
    requests = rows + 2
    pages = context // page_size
    total = 1 + requests * pages
    order = 1 + torch.randperm(total - 1, generator=generator)
    first = order[: requests * pages].view(requests, pages, 1) * page_size
    token_slots = (first + torch.arange(page_size)).flatten(1).int()
    token_slots[0] = 0
    in_window = 1 + torch.randperm(total - 1, generator=generator)
    window_slots = torch.cat((torch.zeros(1, dtype=torch.int64), in_window))
    window_slots = (window_slots[:, None] * page_size + torch.arange(page_size)).flatten()
    window_slots[:page_size] = 0
    lengths = torch.randint(1, 60, (rows,), generator=generator)
    lengths[0] = pages * page_size
    lengths[rows // 2] = 1
    request = 1 + torch.randperm(requests - 1, generator=generator)[:rows]
    slots = token_slots[request, lengths - 1].long()
    padding = torch.arange(rows) % 4 == 3
    for x, value in ((lengths, 1), (request, 0), (slots, 0)):
        x[padding] = value
    return TokenTable(
        lengths=lengths,
        requests=request,
        slots=slots,
        token_slots=token_slots,
        window_slots=window_slots,
        ring_of_request=torch.randint(1, 99, (requests,), generator=generator, dtype=torch.int32),
        track=torch.rand(rows, generator=generator) < 0.5 if track else None,
        track_slots=torch.randint(1, 99, (rows,), generator=generator) if track else None,
    )


def outputs_of(inputs: TokenTable, page_size: int) -> TokenTableOutputs:
    """Fresh outputs, all UNSET."""
    out = TokenTableOutputs.allocate(
        len(inputs.lengths),
        inputs.token_slots.shape[1],
        page_size=page_size,
        window=WINDOW,
        device=inputs.lengths.device,
    )
    for x in vars(out).values():
        x.fill_(UNSET)
    return out


def shown(out: TokenTableOutputs, page_size: int) -> dict[str, Tensor]:
    """Every output by name; page entries past the current token, which are undefined, UNSET."""
    found = {name: x.cpu() for name, x in vars(out).items()}
    last = found["q_start"] // page_size
    for name, first in (("pages", last * 0), ("window_pages", found["window_first"])):
        column = first[:, None] + torch.arange(found[name].shape[1])
        found[name] = found[name].masked_fill(column > last[:, None], UNSET)
    return found


def outcomes(
    inputs: TokenTable, device: torch.device, *, page_size: int = 4, **options
) -> list[Outcome]:
    """The kernel's outputs beside the reference's; equal, because all are integers."""
    given = {name: x.to(device) for name, x in vars(inputs).items() if x is not None}
    moved = TokenTable(**given)
    settings: dict[str, Any] = {"page_size": page_size, "window": WINDOW, "taps": TAPS}
    got, want = outputs_of(moved, page_size), outputs_of(inputs, page_size)
    token_table(moved, got, **settings, **options)
    token_table_reference(inputs, want, **settings)
    wanted = shown(want, page_size)
    return [
        Outcome(name=name, out=out.double(), reference=wanted[name].double(), eager=wanted[name])
        for name, out in shown(got, page_size).items()
    ]


def _case(arch: str, row: TuningRow, rows: int, track: bool, device: torch.device) -> list[Outcome]:
    return outcomes(make_problem(rows, track=track), device, arch=arch, row=row)


def _cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="7 rows, tracked", run=partial(_case, arch, row, 7, True))
    yield Case(name="2 rows", run=partial(_case, arch, row, 2, False))


ENTRY = register(
    KernelEntry(
        name=TOKEN_TABLE.kernel,
        kernels=("inkling_rocm.kernels.token_table:_token_table_kernel",),
        table=TOKEN_TABLE,
        cases=_cases,
    )
)
