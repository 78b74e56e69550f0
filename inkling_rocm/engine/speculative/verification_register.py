"""Verification of drafts in the kernel register: the cases that prove each tuning row.

Beside the engine, because the torch verification is the reference of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.engine.logit_edits import LogitEdits
from inkling_rocm.engine.request import SamplingParams
from inkling_rocm.engine.sampler import SampleRow
from inkling_rocm.engine.speculative.verification import draw_drafts, verify_draft
from inkling_rocm.kernels.sampling_tuning import ACCEPT, MASS, RESIDUAL, SETTLE
from inkling_rocm.kernels.verification import verify_rows
from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.0, frequency_penalty=2.0),
    SamplingParams(top_k=9, top_p=0.8),
    SamplingParams(top_p=0.95, temperature=2.0),
    SamplingParams(min_p=0.05, temperature=0.7),
    SamplingParams(
        top_k=40, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={3: 2.0},
        min_new_tokens=3,
    ),
)  # fmt: skip
PROMPT, GENERATED, STOP = (1, 2, 2), (7, 9), (3, 5)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A round on the CPU; drafts are drawn from draft_logits."""

    logits: Tensor
    drafts: Tensor
    draft_logits: Tensor
    rows: list[SampleRow]


def make_rows(count: int, params: Sequence[SamplingParams], masks: Sequence = ()) -> list:
    """Rows with those parameters in turn, two tokens after their prompt; the last have a mask."""
    rows = []
    for i in range(count):
        mask = masks[i - count] if i >= count - len(masks) else None
        edits = LogitEdits(params[i % len(params)], PROMPT, STOP, mask)
        for token in GENERATED:
            edits.add(token)
        rows.append(SampleRow(params[i % len(params)], 3 * i - 4, 7 * i + 2, edits))
    return rows


def make_problem(
    rows: list[SampleRow],
    num_drafts: int,
    vocabulary: int,
    *,
    rejection: bool,
    spread: float = 2.0,
    noise: float = 0.5,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """Random logits, rounded to dtype (bf16 logits tie), and a draft model `noise` apart."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), num_drafts + 1, vocabulary)
    logits = torch.randn(shape, generator=generator) * spread
    other = torch.randn((len(rows), num_drafts, vocabulary), generator=generator) * noise
    logits, draft_logits = (
        x.to(dtype).float() for x in (logits, (logits[:, :num_drafts] + other))
    )  # fmt: skip
    drafts = [
        draw_drafts(draft_logits[:, d], rows, d, rejection=rejection) for d in range(num_drafts)
    ]
    return Problem(
        logits=logits,
        drafts=torch.stack(drafts, 1),
        draft_logits=draft_logits.contiguous(),
        rows=rows,
    )


def on_device(
    problem: Problem, device: torch.device, arch: str, *, rejection: bool, **options
) -> tuple[Tensor, Tensor, DeviceSampler]:
    """Tokens and numbers of accepted drafts on the CPU, and the sampler with its token counts; row
    i has slot i + 1."""
    slots = list(range(1, len(problem.rows) + 1))
    vocabulary = problem.logits.shape[2]
    sampler = DeviceSampler(
        vocabulary=vocabulary, slots=len(slots) + 1, device=device, arch=arch
    )  # fmt: skip
    for slot, row in zip(slots, problem.rows, strict=True):
        sampler.admit(slot, row.edits)
    tokens, accepted = verify_rows(
        problem.logits.to(device),
        problem.drafts.to(device),
        problem.draft_logits.to(device) if rejection else None,
        sampler.verify_rows(problem.rows, slots, positions=problem.logits.shape[1]),
        arch=arch,
        **options,
    )
    return tokens.cpu(), accepted.cpu(), sampler


def _verify(arch: str, tuning: tuple, rejection: bool, device: torch.device) -> list[Outcome]:
    vocabulary = 2 * 2048 + 300  # three chunks
    problem = make_problem(make_rows(6, PARAMS), 2, vocabulary, rejection=rejection, noise=1.0)
    got = on_device(problem, device, arch, rejection=rejection, tuning=tuning)
    want = verify_draft(
        problem.logits, problem.drafts, problem.draft_logits, problem.rows, rejection=rejection
    )
    return [
        Outcome(name=name, out=out, reference=reference, eager=reference)
        for name, out, reference in zip(("tokens", "accepted"), got[:2], want, strict=True)
    ]


def _cases(which: int, arch: str, row: TuningRow) -> Iterable[Case]:
    tuning: list[TuningRow | None] = [None] * 4
    tuning[which] = row
    yield Case(name="by ratio", run=partial(_verify, arch, tuple(tuning), True))
    if which == 1:  # the only one of the four that runs without draft logits
        yield Case(name="where equal", run=partial(_verify, arch, tuple(tuning), False))


_KERNELS = (
    (MASS, "_mass_kernel"),
    (ACCEPT, "_accept_kernel"),
    (RESIDUAL, "_residual_kernel"),
    (SETTLE, "_settle_kernel"),
)
ENTRIES = tuple(
    register(
        KernelEntry(
            name=table.kernel,
            kernels=(f"inkling_rocm.kernels.verification_kernels:{kernel}",),
            table=table,
            cases=partial(_cases, which),
        )
    )
    for which, (table, kernel) in enumerate(_KERNELS)
)
