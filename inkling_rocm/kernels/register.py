"""The launchers of this package in the kernel register, with the cases that prove each tuning
row."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from inkling_rocm.host import SingleRank
from inkling_rocm.kernels import tuning
from inkling_rocm.kernels.metadata_register import ENTRY as METADATA_ENTRY
from inkling_rocm.kernels.norm import embed, rms_norm
from inkling_rocm.kernels.problems import (
    EPS,
    PrologueProblem,
    ResidualProblem,
    Row,
    make_prologue_problem,
    make_residual_problem,
    run_prologue,
    run_residual,
)
from inkling_rocm.kernels.prologue import attention_prologue
from inkling_rocm.kernels.residual import residual_conv_norm
from inkling_rocm.kernels.round_metadata_register import ENTRY as ROUND_METADATA_ENTRY
from inkling_rocm.kernels.token_table_register import ENTRY as TOKEN_TABLE_ENTRY
from inkling_rocm.ops.attention_prologue import attention_prologue as prologue_reference
from inkling_rocm.ops.embed import embed as embed_reference
from inkling_rocm.ops.residual_conv_norm import residual_conv_norm as residual_reference
from inkling_rocm.ops.rms_norm import rms_norm as norm_reference
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow, TuningTable

DECODE = (
    Row(slot=2, start=5, length=1),
    Row(slot=0, start=0, length=1),
    Row(slot=1, start=0, length=1),
    Row(slot=4, start=2, length=1, snapshot=3),
    Row(slot=3, start=130, length=1),
)
VERIFY = (
    Row(slot=2, start=11, length=4, snapshot=12),
    Row(slot=0, start=0, length=4),
    Row(slot=1, start=1, length=4),
)
PREFILL = (
    Row(slot=1, start=0, length=13, snapshot=8),
    Row(slot=3, start=2, length=1),
    Row(slot=0, start=0, length=2),
    Row(slot=4, start=9, length=0),
    Row(slot=2, start=21, length=2, snapshot=22),
)
# Rows and the length of their rings: one launch, one launch, two launches.
BATCHES = {"decode": (DECODE, 3), "verify": (VERIFY, 7), "prefill": (PREFILL, 3)}


def outcomes(problem, run, op, reference, device, **options) -> list[Outcome]:
    """Every output of `op` beside its torch reference in float64 and in the problem's dtype."""
    got = run(problem, op, device, **options)
    want = run(problem, reference, dtype=torch.float64)
    eager = run(problem, reference)
    return [
        Outcome(name=name, out=got[name], reference=want[name], eager=eager[name]) for name in got
    ]


def prologue_outcomes(problem: PrologueProblem, device, **options) -> list[Outcome]:
    return outcomes(
        problem, run_prologue, attention_prologue, prologue_reference, device, **options
    )


def residual_outcomes(problem: ResidualProblem, device, **options) -> list[Outcome]:
    return outcomes(
        problem, run_residual, residual_conv_norm, residual_reference, device, **options
    )


def _prologue_case(arch, row, batch, dtype, local, options, device) -> list[Outcome]:
    rows, ring_len = BATCHES[batch]
    problem = make_prologue_problem(
        rows, heads=8, kv_heads=2 if local else 1, head_dim=128, ring_len=ring_len, dtype=dtype,
        log_floor=None if local else 3, extra=16,
    )  # fmt: skip
    return prologue_outcomes(problem, device, arch=arch, row=row, **options)


def _prologue_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    batches = ("decode",) if row.when.get("decode") else ("verify", "prefill")
    for batch in batches:
        for dtype, local in ((torch.bfloat16, False), (torch.float32, True)):
            where = "local" if local else "global"
            yield Case(
                name=f"{batch}, {where}, {str(dtype).removeprefix('torch.')}",
                run=partial(_prologue_case, arch, row, batch, dtype, local, {}),
            )


def _residual_case(arch, row, batch, hidden, dtype, device) -> list[Outcome]:
    rows, ring_len = BATCHES[batch]
    problem = make_residual_problem(
        rows, hidden=hidden, ring_len=ring_len, dtype=dtype, second=batch == "verify"
    )
    return residual_outcomes(problem, device, arch=arch, row=row)


def _residual_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    hidden = 72 if row.when.get("hidden") else 6144
    batches = ("prefill",) if int(row.constexprs["TOKENS"]) > 1 else tuple(BATCHES)
    for batch in batches:
        dtype = torch.float32 if batch == "verify" else torch.bfloat16
        yield Case(
            name=f"{batch}, H={hidden}",
            run=partial(_residual_case, arch, row, batch, hidden, dtype),
        )


def _tail_case(arch, row, dtype, device) -> list[Outcome]:
    channels = int(row.constexprs["BLOCK_C"]) + 8
    problem = make_residual_problem(
        PREFILL, hidden=channels, ring_len=4, dtype=dtype, second=True, extra=16
    )
    return residual_outcomes(problem, device, arch=arch, tail_row=row)


def _tail_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="one stream, two partials", run=partial(_tail_case, arch, row, torch.float32))
    yield Case(
        name="two streams",
        run=partial(_prologue_case, arch, None, "prefill", torch.bfloat16, True, {"tail_row": row}),
    )


def _norm_case(arch, row, dtype, hidden, device) -> list[Outcome]:
    x = torch.randn(5, 2, hidden + 3, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    weight = (1 + x[0, 0, :hidden] / 5).contiguous()
    x = x[..., :hidden]
    out = torch.full(x.shape, float("nan"), dtype=dtype, device=device)
    rms_norm(x, weight, EPS, out=out, arch=arch, row=row)
    want, eager = (
        norm_reference(x.cpu().to(wide), weight.cpu().to(wide), EPS)
        for wide in (torch.float64, dtype)
    )
    return [Outcome(name="out", out=out.cpu(), reference=want, eager=eager)]


def _norm_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    hidden = 65 if row.when.get("hidden") else 6144
    for dtype in (torch.bfloat16, torch.float32):
        name = f"{str(dtype).removeprefix('torch.')}, N={hidden}"
        yield Case(name=name, run=partial(_norm_case, arch, row, dtype, hidden))


def _embed_case(arch, row, dtype, hidden, device) -> list[Outcome]:
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(11, hidden, generator=generator).to(device, dtype)
    norm = (1 + torch.randn(hidden, generator=generator) / 5).to(device, dtype)
    ids = torch.tensor([3, 0, 10, 3], device=device)
    out = embed(ids, table, norm, eps=EPS, comm=SingleRank(), arch=arch, row=row)
    want, eager = (
        embed_reference(
            ids.cpu(), table.cpu().to(wide), norm.cpu().to(wide), eps=EPS, comm=SingleRank()
        )
        for wide in (torch.float64, dtype)
    )
    return [Outcome(name="out", out=out.cpu(), reference=want, eager=eager)]


def _embed_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    hidden = 65 if row.when.get("hidden") else 6144
    yield Case(name=f"H={hidden}", run=partial(_embed_case, arch, row, torch.bfloat16, hidden))


def _entry(table: TuningTable, kernel: str, cases) -> KernelEntry:
    path = f"inkling_rocm.kernels.{kernel}"
    return register(KernelEntry(name=table.kernel, kernels=(path,), table=table, cases=cases))


ENTRIES = (
    METADATA_ENTRY,
    ROUND_METADATA_ENTRY,
    TOKEN_TABLE_ENTRY,
    _entry(
        tuning.ATTENTION_PROLOGUE, "prologue:_attention_prologue_kernel", _prologue_cases
    ),
    _entry(
        tuning.RESIDUAL_CONV_NORM, "residual:_residual_conv_norm_kernel", _residual_cases
    ),
    _entry(tuning.RING_TAIL, "conv:_ring_tail_kernel", _tail_cases),
    _entry(tuning.RMS_NORM, "norm:_rms_norm_kernel", _norm_cases),
    _entry(tuning.EMBED, "norm:_embed_kernel", _embed_cases),
)  # fmt: skip
