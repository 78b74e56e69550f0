"""The correctness gate: a benchmark row counts only if its kernel passed here, in the same
process, on this device."""

from __future__ import annotations

import torch

from bench.attention.problems import Problem, make_problem
from triton_attn import attention_decode, attention_prefill, attention_verify
from triton_attn.reference import attention_reference


def relative_errors(problem: Problem, out: torch.Tensor) -> tuple[float, float]:
    """Relative error of `out`, and that of eager torch in the same dtype, against float64."""
    mod = problem.bias
    tensors, cu = (problem.q, problem.k_pages, problem.v_pages), problem.cu_seqlens_q
    with problem.q.device:  # float64 products are minutes of a CPU
        want, _ = attention_reference(*tensors, cu_seqlens_q=cu, score_mod=mod, **problem.paged)
        eager, _ = attention_reference(
            *tensors, cu_seqlens_q=cu, score_mod=mod, dtype=problem.q.dtype, **problem.paged
        )
    norm = want.norm()
    return tuple(float((x.double() - want).norm() / norm) for x in (out, eager))


def passes(problem: Problem, out: torch.Tensor) -> tuple[bool, float, float]:
    """Error at most twice eager's plus a floor; NaN never passes. Also returns both errors."""
    error, eager = relative_errors(problem, out)
    floor = 4 * torch.finfo(problem.q.dtype).eps * 0.25
    return bool(error <= 2 * eager + floor), error, eager


def run_prefill(p: Problem, *, biased=True, **kwargs):
    out = kwargs.pop("out", None)
    out = torch.full_like(p.q, float("nan")) if out is None else out
    return attention_prefill(
        p.q, p.k_pages, p.v_pages, cu_seqlens_q=p.cu_seqlens_q, q_start=p.q_start, out=out,
        score_mod=p.bias if biased else None, **p.paged, **kwargs,
    )  # fmt: skip


def run_decode(p: Problem, **kwargs):
    out = kwargs.pop("out", None)
    out = torch.full_like(p.q, float("nan")) if out is None else out
    most = max(p.q_lens)
    shared = {"out": out, "max_kv_len": max(p.kv_lens), "score_mod": p.bias, **p.paged, **kwargs}
    if most == 1:
        return attention_decode(p.q, p.k_pages, p.v_pages, **shared)
    return attention_verify(
        p.q, p.k_pages, p.v_pages, cu_seqlens_q=p.cu_seqlens_q, max_q_len=most, **shared
    )


def gate_cases():
    """(name, runner, problem) over dtypes, page sizes, head ratios, windows and ragged lengths."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    rows = (
        # q_lens, kv_lens, heads, kv_heads, window, extent, head_dim, page_size, dtype
        ((300, 1, 0, 129), (300, 700, 5, 1400), 8, 1, 0, 1024, 128, 128, bf16),
        ((300, 65, 640), (900, 65, 1400), 8, 2, 512, 512, 128, 64, bf16),
        ((130, 7), (131, 300), 8, 2, 100, 64, 128, 16, bf16),
        ((64, 63), (200, 63), 4, 4, 0, 128, 64, 1, fp16),
        ((97,), (300,), 4, 2, 0, 200, 96, 64, fp16),
        ((70, 30), (100, 90), 4, 1, 96, 96, 128, 64, fp32),
        ((100,), (150,), 2, 1, 0, 64, 256, 128, bf16),
        ((100,), (150,), 2, 1, 0, 64, 192, 16, bf16),
    )
    for q, kv, h, g, w, e, d, ps, dt in rows:
        p = make_problem(
            q_lens=q, kv_lens=kv, heads=h, kv_heads=g, window=w, extent=e, head_dim=d,
            page_size=ps, dtype=dt,
            tau=True, seed=len(kv),
        )  # fmt: skip
        yield f"prefill {q} {kv} {h}/{g} w{w} e{e} d{d} p{ps} {dt}", run_prefill, p
    rows = (
        ((1, 1, 1), (1, 3000, 700), 8, 1, 0, 1024, 128, 128, bf16),
        ((1, 1, 1), (1, 3000, 511), 8, 2, 512, 512, 128, 64, bf16),
        ((1, 1), (40000, 300), 8, 1, 0, 1024, 128, 128, bf16),
        ((1, 1), (513, 64), 4, 4, 0, 100, 64, 1, fp16),
        ((1, 1), (513, 640), 4, 1, 128, 64, 128, 16, fp32),
        ((1, 1), (513, 640), 6, 2, 0, 64, 192, 16, bf16),
        ((4, 2, 0, 1), (3000, 9, 4, 700), 8, 1, 0, 1024, 128, 128, bf16),
        ((9, 9), (2000, 9), 8, 1, 0, 1024, 128, 128, bf16),
        ((9, 5), (2000, 90), 8, 2, 512, 512, 128, 64, bf16),
        ((3, 2), (400, 90), 4, 2, 0, 96, 128, 16, fp32),
    )
    for q, kv, h, g, w, e, d, ps, dt in rows:
        p = make_problem(
            q_lens=q, kv_lens=kv, heads=h, kv_heads=g, window=w, extent=e, head_dim=d,
            page_size=ps, dtype=dt,
            tau=True, seed=len(kv),
        )  # fmt: skip
        yield f"decode {q} {kv} {h}/{g} w{w} e{e} d{d} p{ps} {dt}", run_decode, p


def run_gate() -> list[dict]:
    """Every case with its errors; `ok` also requires that a zeroed bias would have been noticed."""
    results = []
    for name, runner, problem in gate_cases():
        try:
            out = runner(problem)
            torch.cuda.synchronize()
            ok, error, eager = passes(problem, out)
            blind, _, _ = passes(problem, runner(problem, biased=False))
            results.append(
                {
                    "case": name,
                    "ok": ok and not blind,
                    "error": error,
                    "eager": eager,
                    "blind": blind,
                }
            )
        except (RuntimeError, ValueError) as problem_found:
            results.append({"case": name, "ok": False, "message": repr(problem_found)[:300]})
    return results
