"""The metadata kernels of a round in the kernel register."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields as fields_of
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inkling_rocm.host.decode import PoolTensors
from inkling_rocm.host.round import (
    FIRST,
    LIMIT,
    SLOT,
    START,
    LayoutTensors,
    RoundTensors,
    draft_metadata_reference,
    round_fields,
    verify_metadata_reference,
)
from inkling_rocm.kernels.round_metadata import ROUND_METADATA, draft_metadata, verify_metadata
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow

UNSET = -77
LONGEST = 4700  # positions: more pages of four than a block of 512


def make_problem(
    rows: int, *, pools: int, depths: int, drafts: int, page_size: int = 4, seed: int = 0
) -> tuple[RoundTensors, Tensor]:
    """Random rows and the tokens drawn for them: starts that the host or the device knows, at
    position 0, long ones, with pages up to before the window's end, and padding. Outputs are
    UNSET."""
    generator = torch.Generator().manual_seed(seed)
    slots, N, M = 2 * rows + 1, depths, drafts + 1
    columns = LONGEST // page_size

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    staged = torch.zeros(round_fields(pools, N), rows, dtype=torch.int32)
    live = torch.arange(rows) % 4 != 3
    slot = torch.randperm(slots - 1, generator=generator)[:rows] + 1
    known = ints(0, 60, rows)
    known[0], known[rows // 2] = LONGEST - 3 * N, 0
    length = ints(0, 60, slots)
    given = torch.where(torch.arange(rows) % 3 == 1, -1, known)
    start = torch.where(given < 0, length[slot], known)
    staged[SLOT], staged[START] = slot, given
    staged[LIMIT] = (start + 1 + ints(0, 2 * N + 1, rows)).clamp(max=columns * page_size)
    staged[FIRST + pools :] = ints(0, 50, N, rows)
    tables = []
    for index in range(pools):
        if index:
            staged[FIRST + index] = ((start - 9 - N) // page_size).clamp(min=0)
        tables.append(ints(1, 9999, slots, columns).int())
        tables[-1][0] = 0
    staged = torch.where(live, staged, 0)

    def unset(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, UNSET, dtype=dtype)

    def layout(tokens: int) -> LayoutTensors:
        int32 = partial(unset, dtype=torch.int32)
        widths = [columns + 2 * N + 2, (9 + 4 * N) // page_size + 3]
        return LayoutTensors(
            positions=int32(rows * tokens), q_start=int32(rows), kv_len=int32(rows),
            history=int32(rows),
            pools=tuple(
                PoolTensors(table=table, rows=int32(rows, width), write=unset(rows * tokens))
                for table, width in zip(tables, widths, strict=False)
            ),
        )  # fmt: skip

    tensors = RoundTensors(
        staged=staged, length=length.int(), recent=ints(0, 50, slots, N),
        drafts=ints(-1, 50, slots, N), verify=layout(M), slot=unset(rows),
        input_ids=unset(rows * M), row_drafts=unset(rows, drafts), position=unset(rows),
        hidden_to=unset(rows * M), known=unset(rows, N + M), draft=layout(2 * N),
        window_ids=unset(rows, 3 * N), hidden_from=unset(rows * 2 * N), tip=unset(rows),
        column=unset(rows), draft_position=unset(rows),
    )  # fmt: skip
    count = ints(0, M + 1, rows)
    return tensors, torch.where(torch.arange(M) < count[:, None], ints(0, 50, rows, M), -1)


def on(x: Any, device: torch.device) -> Any:
    """A copy on a device, of a tensor or of what holds some."""
    if isinstance(x, Tensor):
        return x.to(device, copy=True)
    if isinstance(x, tuple):
        return tuple(on(item, device) for item in x)
    assert is_dataclass(x)
    assert not isinstance(x, type)
    return replace(x, **{f.name: on(getattr(x, f.name), device) for f in fields_of(x)})


def shown(tensors: RoundTensors, page_size: int) -> dict[str, Tensor]:
    """Every output by name; entries of page rows past the live ones, which are undefined, UNSET."""
    skipped = ("staged", "drafts", "verify", "draft")
    found = {f.name: getattr(tensors, f.name) for f in fields_of(tensors)}
    found = {name: x.cpu() for name, x in found.items() if name not in skipped}
    for name, layout in (("verify", tensors.verify), ("draft", tensors.draft)):
        for field in ("positions", "q_start", "kv_len", "history"):
            found[f"{name} {field}"] = getattr(layout, field).cpu()
        last = (layout.kv_len.cpu() - 1) // page_size
        for index, pool in enumerate(layout.pools):
            at = tensors.staged[FIRST + index].cpu()[:, None] + torch.arange(pool.rows.shape[1])
            pages = pool.rows.cpu().masked_fill(at > last[:, None], UNSET)
            found[f"{name} rows {index}"] = pages
            found[f"{name} write {index}"] = pool.write.cpu()
    return found


def outcomes(
    problem: RoundTensors,
    tokens_BM: Tensor,
    device: torch.device,
    *,
    page_size: int = 4,
    **options: Any,
) -> list[Outcome]:
    """The kernels' outputs beside the reference's; equal, because all are integers."""
    got, want = on(problem, device), on(problem, torch.device("cpu"))
    shape: dict[str, Any] = {"page_size": page_size, "taps": 4}
    verify_metadata(got, **shape, **options)
    draft_metadata(got, tokens_BM.to(device), **shape, **options)
    verify_metadata_reference(want, **shape)
    draft_metadata_reference(want, tokens_BM, **shape)
    wanted = shown(want, page_size)
    return [
        Outcome(name=name, out=out.double(), reference=wanted[name].double(), eager=wanted[name])
        for name, out in shown(got, page_size).items()
    ]


def _case(arch: str, row: TuningRow, sizes: dict[str, int], device: torch.device) -> list[Outcome]:
    problem, tokens_BM = make_problem(**sizes)
    return outcomes(problem, tokens_BM, device, arch=arch, row=row)


def _cases(arch: str, row: TuningRow) -> Iterable[Case]:
    for name, sizes in {
        "two pools, 7 rows, 3 drafts": {"rows": 7, "pools": 2, "depths": 3, "drafts": 3},
        "one pool, 2 rows, 8 depths": {"rows": 2, "pools": 1, "depths": 8, "drafts": 5},
    }.items():
        yield Case(name=name, run=partial(_case, arch, row, sizes))


ENTRY = register(
    KernelEntry(
        name=ROUND_METADATA.kernel,
        kernels=(
            "inkling_rocm.kernels.round_metadata:_verify_metadata_kernel",
            "inkling_rocm.kernels.round_metadata:_draft_metadata_kernel",
        ),
        table=ROUND_METADATA,
        cases=_cases,
    )
)
