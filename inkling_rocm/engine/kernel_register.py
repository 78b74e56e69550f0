"""Sampling, linear and lm_head in the kernel register: the cases that prove each tuning row.

Beside the engine, because the torch sampler is the reference of the sampling kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sampler import SampleRow, sample
from inkling_rocm.engine.speculative.verification_register import ENTRIES as VERIFICATION_ENTRIES
from inkling_rocm.kernels.linear import linear
from inkling_rocm.kernels.linear_tuning import TILES, VECTOR, WHOLE
from inkling_rocm.kernels.lm_head import local_logits
from inkling_rocm.kernels.lm_head_tuning import LM_HEAD
from inkling_rocm.kernels.sampling import sample_rows
from inkling_rocm.kernels.sampling_tuning import BOUND, COUNT, CUT, DRAW, GATHER, SCAN
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow

_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=9, top_p=0.8),
    SamplingParams(top_p=0.95, temperature=2.0),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=40, frequency_penalty=1.0, repetition_penalty=1.2, logit_bias={3: 2.0}),
)
_VOCABULARY = 9000  # more blocks than candidates, more tokens than the list


def _sample(arch: str, tuning: tuple, device: torch.device) -> list[Outcome]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(_PARAMS), _VOCABULARY, generator=generator) * 2
    rows = []
    for i, params in enumerate(_PARAMS):
        edits = LogitEdits(params, [1, 2], ())
        edits.add(7)
        rows.append(SampleRow(params, i, 5, edits))
    want = torch.tensor([-1 if t is None else t for t in sample(logits, rows, keep_logits=True)])
    sampler = DeviceSampler(vocabulary=_VOCABULARY, slots=len(rows), device=device, arch=arch)
    slots = list(range(len(rows)))
    for slot, row in zip(slots, rows, strict=True):
        sampler.admit(slot, row.edits)
    tokens, scores = sample_rows(
        logits.to(device), sampler.rows(rows, slots), arch=arch, logprobs=True, tuning=tuning
    )
    assert scores is not None
    exact, eager = (
        logits.to(dtype).log_softmax(-1).gather(1, want[:, None])[:, 0]
        for dtype in (torch.float64, torch.float32)
    )
    return [
        Outcome(name="tokens", out=tokens.cpu(), reference=want, eager=want),
        Outcome(name="logprobs", out=scores.cpu(), reference=exact, eager=eager),
    ]


def _sampling_cases(which: int, arch: str, row: TuningRow) -> Iterable[Case]:
    tuning: list[TuningRow | None] = [None] * 6
    tuning[which] = row
    yield Case(name="every kind of row", run=partial(_sample, arch, tuple(tuning)))


def _head(arch: str, row: TuningRow, device: torch.device) -> list[Outcome]:
    generator = torch.Generator().manual_seed(4)
    dtype = torch.float32 if row.when["bits"] == 32 else torch.bfloat16
    bound = row.when["tokens"]
    assert isinstance(bound, tuple)
    block_m, block_n, block_k = (int(row.constexprs[f"BLOCK_{x}"]) for x in "MNK")
    tokens = min(bound[1] or 1, block_m) - 3
    vocabulary, hidden = block_n + 5, 2 * block_k + 16
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    w = (torch.randn(vocabulary + 3, hidden, generator=generator) / 8).to(device, dtype)
    out = torch.full((tokens, vocabulary), float("nan"), device=device)
    local_logits(
        x, w, mup_multiplier=6.0, vocabulary=vocabulary, dtype=torch.float32, arch=arch, row=row,
        out=out,
    )  # fmt: skip
    exact = (x.double() / 6.0) @ w[:vocabulary].double().t()
    eager = torch.nn.functional.linear(x / 6.0, w[:vocabulary]).float()
    return [Outcome(name="logits", out=out.to(dtype), reference=exact, eager=eager)]


def _head_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="past a tile in every direction", run=partial(_head, arch, row))


def _linear(arch: str, row: TuningRow, device: torch.device) -> list[Outcome]:
    generator = torch.Generator().manual_seed(5)
    dtype = torch.float32 if row.when["bits"] == 32 else torch.bfloat16
    block_n, block_k = int(row.constexprs["BLOCK_N"]), int(row.constexprs["BLOCK_K"])
    tokens = max(int(row.constexprs.get("BLOCK_M", 4)) - 3, 1)
    split = row.constexprs.get("SLICE")
    # Past one slice, where a row has slices.
    depth = (2 * block_k if split in (None, WHOLE) else int(split)) + 16
    depth *= int(row.constexprs.get("PARTS", 1))
    columns = block_n + 5
    x = torch.randn(tokens, depth, generator=generator).to(device, dtype)
    w = (torch.randn(columns, depth, generator=generator) / 8).to(device, dtype)
    out = torch.full((tokens, columns), float("nan"), device=device, dtype=dtype)
    linear(x, w, arch=arch, row=row, out=out)
    eager = torch.nn.functional.linear(x, w)
    return [Outcome(name="y", out=out, reference=x.double() @ w.double().t(), eager=eager)]


def _linear_cases(arch: str, row: TuningRow) -> Iterable[Case]:
    yield Case(name="past a tile in every direction", run=partial(_linear, arch, row))
    if row.constexprs.get("SLICE", WHOLE) != WHOLE:
        # Forms that rows of sm90 alone ask for; programs that wait are left to the tests, because
        # not every Triton compiles them for AMD (kernel_base.device.await_arrivals).
        first = replace(row, constexprs={**row.constexprs, "W_FIRST": True})
        yield Case(name="columns as rows of the instruction", run=partial(_linear, arch, first))
        sizes = {"PARTS": 2, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 64}
        yield Case(name="in parts", run=partial(_linear, arch, replace(row, constexprs=sizes)))


_KERNELS = (
    (SCAN, "inkling_rocm.kernels.sampling_kernels:_scan_kernel"),
    (BOUND, "inkling_rocm.kernels.sampling_kernels:_bound_kernel"),
    (COUNT, "inkling_rocm.kernels.sampling_gather:_count_kernel"),
    (GATHER, "inkling_rocm.kernels.sampling_gather:_gather_kernel"),
    (CUT, "inkling_rocm.kernels.sampling_choice:_cut_kernel"),
    (DRAW, "inkling_rocm.kernels.sampling_choice:_draw_kernel"),
)
ENTRIES = (
    *(
        register(
            KernelEntry(
                name=table.kernel,
                kernels=(kernel,),
                table=table,
                cases=partial(_sampling_cases, which),
            )
        )
        for which, (table, kernel) in enumerate(_KERNELS)
    ),
    register(
        KernelEntry(
            name=LM_HEAD.kernel,
            kernels=("inkling_rocm.kernels.lm_head:_lm_head_kernel",),
            table=LM_HEAD,
            cases=_head_cases,
        )
    ),
    *(
        register(
            KernelEntry(
                name=table.kernel,
                kernels=tuple(f"inkling_rocm.kernels.linear_kernels:{name}" for name in kernels),
                table=table,
                cases=_linear_cases,
            )
        )
        for table, kernels in (
            (VECTOR, ("_linear_vector_kernel",)),
            (TILES, ("_linear_tiles_kernel", "_linear_parts_kernel")),
        )
    ),
    *VERIFICATION_ENTRIES,
)
