"""Verification of drafts on a GPU: from logits to accepted tokens without a host synchronisation.

The specification is inkling_rocm.engine.speculative.verification on the CPU; the mathematics and
the launches: verification_kernels.py. Differences: those of kernels/sampling.py, and the ratio and
the residual are fp32, so a draft whose ratio lies within about 1e-6 of its uniform number may fall
on the other side. Emulated, and tested on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from inkling_rocm.kernels.sampling import SamplingRows, launch_sampling
from inkling_rocm.kernels.sampling_tuning import ACCEPT, MASS, RESIDUAL, SETTLE
from inkling_rocm.kernels.verification_kernels import (
    _PARTS,
    _accept_kernel,
    _mass_kernel,
    _residual_kernel,
    _settle_kernel,
)
from kernel_base.tuning import TuningRow


@dataclass(frozen=True, kw_only=True)
class VerifyRows:
    """Parameters of B rows with N drafts each.

    Attributes:
        sampling: of B (N + 1) rows, those of row b's position j at b (N + 1) + j: they differ in
            position, and in the stop ids held back. edits.count_row is the same for all of a row.
        limit: int32 [B], most drafts the row may accept; 0 for one with a grammar.
    """

    sampling: SamplingRows
    limit: Tensor


def verify_rows(
    logits_BMV: Tensor,
    drafts_BN: Tensor,
    draft_logits_BNV: Tensor | None,
    rows: VerifyRows,
    *,
    arch: str,
    tuning: tuple[TuningRow | None, ...] = (None, None, None, None),
) -> tuple[Tensor, Tensor]:
    """Decide a round: five launches, eight with rejection sampling; no host synchronisation.

    Args:
        logits_BMV: fp32 [B, N + 1, V], contiguous but for the distance of positions; left as they
            are.
        drafts_BN: int64 [B, N], contiguous; -1 = none from here on.
        draft_logits_BNV: fp32 [B, N, V], V contiguous: rejection sampling of the rows that are not
            greedy, against what the drafts were drawn from. None: accept where equal.
        tuning: launch configurations of the mass, accept, residual and settle kernels to force.
    Returns: tokens int64 [B, N + 1] and accepted int64 [B]; see
        inkling_rocm.engine.speculative.verification.verify_draft.
    In place: rows.sampling.edits.counts, by the tokens returned.
    Raises: ValueError: an argument does not fit, or there is no tuning row for arch.
    """
    B, M, V = logits_BMV.shape
    N = M - 1
    _check(logits_BMV, drafts_BN, draft_logits_BNV, rows)
    device = logits_BMV.device
    tokens = torch.empty(B, M, dtype=torch.int64, device=device)
    accepted = torch.empty(B, dtype=torch.int64, device=device)
    if B == 0:
        return tokens, accepted
    mass, accept, residual, settle = (
        forced or table.select(arch)
        for forced, table in zip(tuning, (MASS, ACCEPT, RESIDUAL, SETTLE), strict=True)
    )
    p, e = rows.sampling, rows.sampling.edits
    logits_nV = logits_BMV.view(B * M, V)
    sampled = launch_sampling(logits_nV, p, arch=arch, drafts_BN=drafts_BN)
    ratio = draft_logits_BNV is not None and N > 0
    width = int(mass.constexprs["TOKENS"])
    chunks = triton.cdiv(V, width)
    state = torch.empty(B, 4, dtype=torch.int32, device=device)
    parts = torch.empty(B * N if ratio else 0, _PARTS.value, chunks, device=device)
    cut = (p.temperature, p.top_k, p.top_p, p.log_min_p)
    logits = (sampled.facts, sampled.edited, logits_nV)
    stride = logits_nV.stride(0)
    q_strides = draft_logits_BNV.stride()[:2] if draft_logits_BNV is not None else (0, 0)
    counted = (None, None) if e is None else (e.counts, e.count_row)
    stride_counts = 0 if e is None else e.counts.stride(0)
    edits = {"EDITS": e is not None}
    sizes = {"CHUNKS": triton.next_power_of_2(chunks)}
    positions = {"POSITIONS": triton.next_power_of_2(max(M, 2))}
    if ratio:
        _mass_kernel[(B * N, chunks)](
            parts, sampled.tokens, *logits, drafts_BN, draft_logits_BNV, rows.limit, *cut, N, V,
            chunks, stride, *q_strides, **edits, **mass.launch_kwargs(),
        )  # fmt: skip
    _accept_kernel[(B,)](
        tokens, accepted, state, parts, sampled.tokens, *logits, drafts_BN, draft_logits_BNV,
        rows.limit, *cut, p.seed, p.position, *counted, N, V, chunks, stride, *q_strides,
        stride_counts, RATIO=ratio, **edits, **sizes, **positions, **accept.launch_kwargs(),
    )  # fmt: skip
    if ratio:
        best = torch.empty(B, 2, chunks, device=device)
        best_id = torch.empty(B, 2, chunks, dtype=torch.int32, device=device)
        _residual_kernel[(B, chunks)](
            best, best_id, accepted, state, parts, *logits, draft_logits_BNV, *cut, p.seed,
            p.position, N, V, chunks, stride, *q_strides, TOKENS=width, **edits, **sizes,
            **residual.launch_kwargs(),
        )  # fmt: skip
        _settle_kernel[(B,)](
            tokens, best, best_id, accepted, state, drafts_BN, *counted, N, chunks, stride_counts,
            **edits, **sizes, **positions, **settle.launch_kwargs(),
        )  # fmt: skip
    return tokens, accepted


def _check(
    logits_BMV: Tensor, drafts_BN: Tensor, draft_logits_BNV: Tensor | None, rows: VerifyRows
) -> None:
    B, M, V = logits_BMV.shape
    if logits_BMV.stride(0) != M * logits_BMV.stride(1):
        raise ValueError(
            f"verify_rows: logits have strides {logits_BMV.stride()}, wanted rows at "
            f"{M} times the distance of positions"
        )
    wanted = (("drafts", drafts_BN, (B, M - 1), torch.int64),
              ("limit", rows.limit, (B,), torch.int32))  # fmt: skip
    for name, value, shape, dtype in wanted:
        if (tuple(value.shape), value.dtype, value.is_contiguous()) != (shape, dtype, True):
            raise ValueError(
                f"verify_rows: {name} are {value.dtype} {tuple(value.shape)}, wanted contiguous "
                f"{dtype} {shape}"
            )
    q = draft_logits_BNV
    if q is None:
        return
    if (tuple(q.shape), q.dtype, q.stride(-1)) != ((B, M - 1, V), torch.float32, 1):
        raise ValueError(
            f"verify_rows: draft logits are {q.dtype} {tuple(q.shape)} with strides {q.stride()}, "
            f"wanted float32 {(B, M - 1, V)} with a contiguous last dimension"
        )
