"""Sampling on a GPU: from fp32 logits to tokens without a host synchronisation.

The mathematics and the order of the tokens: sampling_kernels.py. The specification is
inkling_rocm.engine.sampler on the CPU. Differences: the Gumbel numbers and the sums are fp32, so
two perturbed logits closer than about 1e-6 may swap, and a token whose preceding mass is within
about 1e-6 of top_p may fall on the other side of the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from inkling_rocm.kernels.sampling_choice import _cut_kernel, _draw_kernel
from inkling_rocm.kernels.sampling_gather import (
    CHUNK_BLOCKS,
    LEVELS,
    LIST,
    _count_kernel,
    _gather_kernel,
)
from inkling_rocm.kernels.sampling_kernels import BLOCK, _bound_kernel, _scan_kernel
from inkling_rocm.kernels.sampling_tuning import BOUND, COUNT, CUT, DRAW, GATHER, SCAN
from kernel_base.tuning import TuningRow

MAX_VOCABULARY = 1 << 20  # ids of blocks of one row fit one program


@dataclass(frozen=True, kw_only=True)
class SamplingEdits:
    """What changes the logits of some rows before temperature; see engine/logit_edits.py.

    Attributes:
        penalties: fp32 [n, 3], frequency, presence, repetition.
        counts: int16 [slots, V], twice the number of times a token was generated, plus one if it
            is in the prompt of a row with a repetition penalty; saturates at 32767. The kernel adds
            the sampled token.
        count_row: int32 [n], row of counts, -1 = no penalties.
        cu_extra: int32 [n + 1]; extra_ids: int32, extra: fp32: values added to logits of row i at
            cu_extra[i] .. cu_extra[i + 1] - 1, in this order; -inf excludes the token.
        allowed: int32 [masks, ceil(V / 32)], bit v % 32 of word v // 32 permits token v.
        allowed_row: int32 [n], row of allowed, -1 = all.
    """

    penalties: Tensor
    counts: Tensor
    count_row: Tensor
    cu_extra: Tensor
    extra_ids: Tensor
    extra: Tensor
    allowed: Tensor
    allowed_row: Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Parameters of n rows on the device.

    Attributes:
        temperature: fp32 [n], below 1e-6 = greedy. top_k: int32 [n], <= 0 = all, 1 = greedy.
        top_p: fp64 [n], 1 = off. log_min_p: fp32 [n], log of min_p, -inf = off.
        seed: int64 [n]. position: int64 [n], absolute position the token will have.
        edits: None = no row is edited.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    seed: Tensor
    position: Tensor
    edits: SamplingEdits | None = None


_DTYPES = {
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float64,
    "log_min_p": torch.float32, "seed": torch.int64, "position": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What the six launches leave on the device.

    Attributes:
        tokens, logprobs: see sample_rows.
        facts: int32 [n, 8], sampling_choice.py's and sampling_kernels.py's notes about each row.
        edited: fp32 [n, V], the logits of edited rows; None without edits.
    """

    tokens: Tensor
    logprobs: Tensor | None
    facts: Tensor
    edited: Tensor | None


def sample_rows(
    logits_nV: Tensor,
    rows: SamplingRows,
    *,
    arch: str,
    logprobs: bool = False,
    tuning: tuple[TuningRow | None, ...] = (None,) * 6,
) -> tuple[Tensor, Tensor | None]:
    """Draw one token a row: six launches, no host synchronisation, capturable.

    Args:
        logits_nV: fp32 [n, V], V contiguous; left as they are.
        logprobs: also the log probability of each token under the softmax of the raw logits.
        tuning: launch configurations to force: scan, bound, count, gather, cut, draw.
    Returns: tokens int64 [n], -1 where the row has no finite logit; log probabilities fp32 [n].
    In place: rows.edits.counts.
    Raises: ValueError: an argument does not fit, or there is no tuning row for arch.
    """
    sampled = launch_sampling(logits_nV, rows, arch=arch, logprobs=logprobs, tuning=tuning)
    return sampled.tokens, sampled.logprobs


def launch_sampling(
    logits_nV: Tensor,
    rows: SamplingRows,
    *,
    arch: str,
    logprobs: bool = False,
    drafts_BN: Tensor | None = None,
    tuning: tuple[TuningRow | None, ...] = (None,) * 6,
) -> Sampled:
    """`sample_rows` with what it leaves behind.

    Args:
        drafts_BN: int64 [B, N], contiguous: the rows are N + 1 positions of each of B sequences;
            penalties at position j are those once drafts 0..j-1 were generated too, and no token is
            counted. None: every row is a sequence's next token.
    """
    n, V = logits_nV.shape
    device = logits_nV.device
    _check(logits_nV, rows)
    e = rows.edits
    sampled = Sampled(
        tokens=torch.empty(n, dtype=torch.int64, device=device),
        logprobs=torch.empty(n, dtype=torch.float32, device=device) if logprobs else None,
        facts=torch.empty(n, 8, dtype=torch.int32, device=device),
        edited=None if e is None else torch.empty(n, V, dtype=torch.float32, device=device),
    )
    if n == 0:
        return sampled
    tokens, scores, facts, edited = (
        sampled.tokens, sampled.logprobs, sampled.facts, sampled.edited
    )  # fmt: skip
    scan, bound, count, gather, cut, draw = (
        forced or table.select(arch)
        for forced, table in zip(tuning, (SCAN, BOUND, COUNT, GATHER, CUT, DRAW), strict=True)
    )
    blocks = triton.cdiv(V, BLOCK.value)
    candidates = int(bound.constexprs["CANDIDATES"])
    stats = torch.empty(n, 4, blocks, dtype=torch.float32, device=device)
    chunks = triton.cdiv(blocks, CHUNK_BLOCKS.value)
    candidate_blocks = torch.empty(n, candidates, dtype=torch.int32, device=device)
    numbers = torch.empty(n, LEVELS.value, chunks, dtype=torch.int32, device=device)
    head = torch.empty(n, LIST.value, dtype=torch.float32, device=device)
    head_ids = torch.empty(n, LIST.value, dtype=torch.int32, device=device)
    totals = torch.empty(n, dtype=torch.float64, device=device)
    stride = logits_nV.stride(0)
    counted = (None, None, 0) if e is None else (e.counts, e.count_row, e.counts.stride(0))
    which = {"EDITS": e is not None, "LOGPROBS": logprobs}
    counts = {"COUNT": e is not None and drafts_BN is None}
    _scan_kernel[(n, triton.cdiv(blocks, scan.constexprs["SCAN_BLOCKS"]))](
        stats, edited, logits_nV, rows.temperature, rows.top_k,
        e and e.penalties, *counted[:2], e and e.cu_extra, e and e.extra_ids, e and e.extra,
        e and e.allowed, e and e.allowed_row, drafts_BN,
        V, blocks, stride, counted[2], e.allowed.stride(0) if e else 0,
        0 if drafts_BN is None else drafts_BN.shape[1],
        **which, **scan.launch_kwargs(),
    )  # fmt: skip
    params = (
        logits_nV, rows.temperature, rows.top_k, rows.top_p, rows.log_min_p, rows.seed,
        rows.position, *counted[:2],
    )  # fmt: skip
    _bound_kernel[(n,)](
        tokens, scores, candidate_blocks, facts, totals, stats, edited, *params,
        e and e.cu_extra, e and e.allowed_row, V, blocks, stride, counted[2],
        ALL_BLOCKS=triton.next_power_of_2(max(blocks, 2)), **which, **counts,
        **bound.launch_kwargs(),
    )  # fmt: skip
    values = (edited, *params[:3])
    _count_kernel[(n, chunks)](
        numbers, facts, *values, V, chunks, stride, EDITS=e is not None, **count.launch_kwargs()
    )
    _gather_kernel[(n, chunks)](
        head, head_ids, facts, numbers, *values, V, chunks, stride, EDITS=e is not None,
        CHUNKS=triton.next_power_of_2(chunks), **gather.launch_kwargs(),
    )  # fmt: skip
    _cut_kernel[(n,)](
        head, facts, totals, edited, *params[:4], V, blocks, stride, EDITS=e is not None,
        **cut.launch_kwargs(),
    )  # fmt: skip
    _draw_kernel[(n,)](
        tokens, scores, candidate_blocks, head, head_ids, facts, edited, *params, V, blocks, stride,
        counted[2], CANDIDATES=candidates, **which, **counts, **draw.launch_kwargs(),
    )  # fmt: skip
    return sampled


def _check(logits_nV: Tensor, rows: SamplingRows) -> None:
    n, V = logits_nV.shape
    if logits_nV.dtype != torch.float32 or logits_nV.stride(1) != 1:
        raise ValueError(
            f"sample_rows: logits are {logits_nV.dtype} with strides {logits_nV.stride()}, wanted "
            "float32 with a contiguous last dimension"
        )
    if not 0 < V <= MAX_VOCABULARY:
        raise ValueError(f"sample_rows: {V} tokens, wanted 1 to {MAX_VOCABULARY}")
    for name, dtype in _DTYPES.items():
        value = getattr(rows, name)
        if (tuple(value.shape), value.dtype, value.is_contiguous()) != ((n,), dtype, True):
            raise ValueError(
                f"sample_rows: {name} is {value.dtype} {tuple(value.shape)}, wanted contiguous "
                f"{dtype} ({n},)"
            )
    if rows.edits is not None and rows.edits.counts.shape[1] < V:
        raise ValueError(
            f"sample_rows: counts have {rows.edits.counts.shape[1]} columns, wanted at least {V}"
        )
