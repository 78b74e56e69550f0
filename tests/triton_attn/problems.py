"""Small paged problems, calls with small tiles, and the error budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernel_base.tuning import TuningRow
from triton_attn import (
    RelativeBias,
    RelativeProfile,
    attention_decode,
    attention_prefill,
    attention_verify,
)
from triton_attn.reference import attention_reference


@dataclass(frozen=True, kw_only=True)
class Problem:
    """q, pages (NaN wherever no key was written), the shared arguments, and a relative bias."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    cu_seqlens_q: torch.Tensor
    q_start: torch.Tensor
    paged: dict
    bias: RelativeBias
    max_q_len: int

    def to(self, device) -> Problem:
        """The same problem on another device."""

        def move(x):
            return x.to(device) if isinstance(x, torch.Tensor) else x

        profile = self.bias.profile
        profile = RelativeProfile(**{name: move(value) for name, value in vars(profile).items()})
        bias = RelativeBias(r=move(self.bias.r), profile=profile, tau=move(self.bias.tau))
        moved = {
            n: move(getattr(self, n))
            for n in ("q", "k_pages", "v_pages", "cu_seqlens_q", "q_start")
        }
        return replace(self, **moved, paged={k: move(v) for k, v in self.paged.items()}, bias=bias)


def make_problem(
    q_lens, kv_lens, *, heads=2, kv_heads=1, head_dim=64, page_size=16, window=0, extent=40,
    d_rel=16,
    dtype=torch.float16, tau=True, seed=0,
) -> Problem:  # fmt: skip
    """Random tensors; every page slot without a key, and every page no request owns, is NaN."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    def i32(values):
        return torch.tensor(values, dtype=torch.int32)

    T, B = sum(q_lens), len(q_lens)
    q_start = [n - q for n, q in zip(kv_lens, q_lens, strict=True)]
    first = [max(p - window + 1, 0) // page_size if window else 0 for p in q_start]
    last = [-(-n // page_size) for n in kv_lens]
    counts = [n - f for n, f in zip(last, first, strict=True)]
    order = (torch.randperm(sum(counts) + 1, generator=g) + 1).tolist()
    k = torch.full((sum(counts) + 2, page_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    v = k.clone()
    table = torch.zeros(B, max(*counts, 1), dtype=torch.int32)
    for b in range(B):
        for p in range(first[b], last[b]):
            page = table[b, p - first[b]] = order.pop()
            rows = slice(0, min(page_size, kv_lens[b] - p * page_size))
            k[page, rows] = normal(*k[page, rows].shape)
            v[page, rows] = normal(*v[page, rows].shape)
    return Problem(
        q=normal(T, heads, head_dim),
        k_pages=k,
        v_pages=v,
        cu_seqlens_q=i32([0, *torch.tensor(q_lens).cumsum(0).tolist()]),
        q_start=i32(q_start),
        paged={
            "page_table": table,
            "first_page": i32(first),
            "kv_len": i32(kv_lens),
            "softmax_scale": 1 / head_dim,
            "window": window,
        },
        bias=RelativeBias(
            r=normal(T, heads, d_rel),
            profile=RelativeProfile.prepare(normal(d_rel, extent, scale=0.5)),
            tau=0.5 + torch.rand(T, generator=g) if tau else None,
        ),
        max_q_len=max(q_lens),
    )


# Tiles small enough that little problems have partial tiles, edges and several splits.
PREFILL_OPTIONS = {"BLOCK_M": 32, "BLOCK_N": 16, "STAGES": 1}
DECODE_OPTIONS = {
    "BLOCK_N": 16, "SPLIT": 32, "UNITS": 2, "STAGES": 1, "MERGE_HERE": True, "MERGE": 2,
    "PDL": False,
}  # fmt: skip


def small_row(arch, constexprs, **more):
    """A row with tiny tiles for `arch`."""
    options = {"num_warps": 2, **({"matrix_instr_nonkdim": 16} if arch.startswith("gfx") else {})}
    return TuningRow(
        arch=arch,
        constexprs={**constexprs, **more},
        options=options,
        evidence="guess",
        source="test",
    )


def run(
    target,
    problem: Problem,
    entry: str,
    *,
    mod="bias",
    out=None,
    lse=False,
    table_row=False,
    **kwargs,
):
    """Call `attention_<entry>` on the target; outputs start as NaN and come back to the CPU."""
    p = problem.to(target.device)
    mod = p.bias if mod == "bias" else mod
    out = torch.full_like(p.q, float("nan")) if out is None else out
    shared = {"score_mod": mod, "out": out, "return_lse": lse, "arch": target.arch, **p.paged}
    if not table_row:
        prefill = entry == "prefill"
        row = PREFILL_OPTIONS | {"VARIANT": "triton"} if prefill else DECODE_OPTIONS
        shared["row"] = small_row(target.arch, row)
    tensors = (p.q, p.k_pages, p.v_pages)
    with target.active():
        if entry == "prefill":
            kwargs = {"cu_seqlens_q": p.cu_seqlens_q, "q_start": p.q_start, **kwargs}
            result = attention_prefill(*tensors, **{**shared, **kwargs})
        else:
            kwargs = {"max_kv_len": 4096, **kwargs}
            if entry == "decode":
                result = attention_decode(*tensors, **{**shared, **kwargs})
            else:
                kwargs = {"cu_seqlens_q": p.cu_seqlens_q, "max_q_len": p.max_q_len, **kwargs}
                result = attention_verify(*tensors, **{**shared, **kwargs})
    return tuple(x.cpu() for x in result) if lse else result.cpu()


def reference(problem: Problem, mod="bias", dtype=torch.float64):
    """(out, lse) of the specification, on the CPU."""
    mod = problem.bias if mod == "bias" else mod
    return attention_reference(
        problem.q, problem.k_pages, problem.v_pages, cu_seqlens_q=problem.cu_seqlens_q,
        score_mod=mod, dtype=dtype,
        **problem.paged,
    )  # fmt: skip


def error(out, want) -> float:
    """Relative error; NaN stays NaN and so fails every comparison."""
    return float((out.double() - want).norm() / want.norm())


def within_budget(problem: Problem, out, mod="bias") -> bool:
    """At most twice the same-dtype eager error, plus an ulp floor."""
    want, _ = reference(problem, mod)
    eager, _ = reference(problem, mod, problem.q.dtype)
    return error(out, want) <= 2 * error(eager, want) + torch.finfo(problem.q.dtype).eps
