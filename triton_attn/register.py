"""The launchers of this package in the kernel register, with small problems that use a row's real
tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from kernel_base.register import Case, KernelEntry, Outcome, register
from kernel_base.tuning import TuningRow, TuningTable
from triton_attn.cases import PagedCase, fact, make_case, score_mod_of
from triton_attn.decode import attention_decode, attention_verify
from triton_attn.prefill import MOD_RELATIVE, attention_prefill
from triton_attn.profile import (
    BUFFER_PAD,
    Chunk,
    allocate_rows,
    pitch_of,
    write_profile_rows,
)
from triton_attn.reference import attention_reference
from triton_attn.score_mod import RelativeBias
from triton_attn.tuning import DECODE, PREFILL, PROFILE_WRITER


def _outcomes(case: PagedCase, out) -> list[Outcome]:
    """`out` beside the reference and eager torch, both computed on the CPU."""

    def cpu(x):
        return x.cpu() if isinstance(x, torch.Tensor) else x

    profile = replace(case.bias.profile, projection=case.bias.profile.projection.cpu())
    moved = RelativeBias(r=case.bias.r.cpu(), profile=profile, tau=cpu(case.bias.tau))
    bias = moved if case.biased else None
    tensors = (case.q.cpu(), case.k_pages.cpu(), case.v_pages.cpu())
    paged = {name: cpu(value) for name, value in case.paged.items()}
    want, eager = (
        attention_reference(
            *tensors, cu_seqlens_q=case.cu_seqlens_q.cpu(), score_mod=bias, dtype=dtype, **paged
        )[0]
        for dtype in (torch.float64, case.q.dtype)
    )
    return [Outcome(name="out", out=out, reference=want, eager=eager)]


def _dtype(row: TuningRow) -> torch.dtype:
    return torch.float32 if row.when.get("bits") == 32 else torch.bfloat16


def _prefill_cases(arch: str, row: TuningRow) -> Iterator[Case]:
    block = int(row.constexprs["BLOCK_M"])
    head_dim = fact(row, "head_dim", 128)
    for name, window, extent in (("global", 0, 40), ("window", 48, 48)):

        def run(device: torch.device, window=window, extent=extent) -> list[Outcome]:
            case = make_case(
                (block + 3, 1, 0), (block + 80, 20, 5), heads=2, kv_heads=1, head_dim=head_dim,
                window=window, extent=extent, dtype=_dtype(row), device=device,
                biased=fact(row, "mod", MOD_RELATIVE) == MOD_RELATIVE,
            )  # fmt: skip
            out = attention_prefill(
                case.q, case.k_pages, case.v_pages, cu_seqlens_q=case.cu_seqlens_q,
                q_start=case.q_start, score_mod=score_mod_of(case), out=torch.full_like(case.q,
                float("nan")),
                arch=arch, row=row, **case.paged,
            )  # fmt: skip
            return _outcomes(case, out)

        yield Case(name=name, run=run)


def _decode_cases(arch: str, row: TuningRow) -> Iterator[Case]:
    head_dim, window = fact(row, "head_dim", 128), 48 if fact(row, "window", 0) else 0
    split, page_size = int(row.constexprs.get("SPLIT", row.constexprs["BLOCK_N"])), 16
    # Heads of a K/V head and query tokens that give tiles of the rows that the row is for.
    calls = ((64, 1, row), (64, 2, row))
    if row.constexprs.get("VARIANT") == "hopper":
        # Rows of one warp group and of two, or of a window, whose rows one must hold; pages hold
        # key tiles.
        calls, page_size = ((4, 9, row), (4, 12, row) if window else (8, 16, row)), 64
    elif fact(row, "rows", 128) <= 32:
        # The window's small rows also prove the merge as a launch of its own, everywhere.
        launched = replace(row, constexprs={**row.constexprs, "MERGE_HERE": False})
        calls = ((8, 1, row), (8, 4, launched if window else row))
    for heads, q_len, merged in calls:

        def run(device: torch.device, heads=heads, q_len=q_len, row=merged) -> list[Outcome]:
            case = make_case(
                (q_len, q_len), (2 * split + 21, q_len + 3), heads=heads, kv_heads=1,
                head_dim=head_dim, window=window, extent=48, dtype=_dtype(row), device=device,
                page_size=page_size,
            )  # fmt: skip
            shared = {
                "score_mod": score_mod_of(case), "out": torch.full_like(case.q, float("nan")),
                "arch": arch, "row": row, "max_kv_len": 2 * split + 21, **case.paged,
            }  # fmt: skip
            tensors = (case.q, case.k_pages, case.v_pages)
            if q_len == 1:
                return _outcomes(case, attention_decode(*tensors, **shared))
            shared |= {"cu_seqlens_q": case.cu_seqlens_q, "max_q_len": q_len}
            return _outcomes(case, attention_verify(*tensors, **shared))

        yield Case(name=f"{q_len} tokens, {'window' if window else 'global'}", run=run)


def _writer_cases(arch: str, row: TuningRow) -> Iterator[Case]:
    extent, heads, tokens, block_m = 40, 2, 16 * int(row.constexprs["ROWS"]) + 5, 64

    def run(device: torch.device) -> list[Outcome]:
        case = make_case(
            (tokens,), (tokens + 50,), heads=heads, kv_heads=1, head_dim=64, window=0,
            extent=extent, dtype=_dtype(row), device=device,
        )  # fmt: skip
        chunk = Chunk(head0=0, heads=heads, first_block=0, blocks=tokens // block_m + 1)
        rows = allocate_rows([chunk], block_m, extent, case.q)
        rows.fill_(float("nan"))
        write_profile_rows(
            rows, case.bias, chunk=chunk, block_m=block_m, extent=extent,
            cu_seqlens_q=case.cu_seqlens_q, q_start=case.q_start, row=row,
        )  # fmt: skip
        pitch, shift = pitch_of(extent), (50 - (extent - 1)) % 16
        strided = rows.as_strided(
            (heads, tokens, extent),
            (chunk.blocks * block_m * pitch, pitch, 1),
            BUFFER_PAD + shift,
        )
        out = strided.flip(-1).transpose(0, 1)  # [T, h, distance]
        return [
            Outcome(name="rows", out=out, **{name: _profile(case, dtype) for name, dtype in (
                ("reference", torch.float64), ("eager", case.q.dtype),
            )})
        ]  # fmt: skip

    yield Case(name="one request on a prefix", run=run)


def _profile(case: PagedCase, dtype: torch.dtype) -> torch.Tensor:
    """log2(e) * tau * r . P, [T, h, E]: what the writer stores."""
    bias = case.bias
    assert bias.tau is not None
    rel = bias.r.cpu().to(dtype) @ bias.profile.projection.cpu().to(dtype)
    return (rel * (bias.tau.cpu().to(rel.dtype) * 1.4426950408889634)[:, None, None]).to(dtype)


def _entry(
    table: TuningTable, kernels: str, cases: Callable[[str, TuningRow], Iterator[Case]]
) -> KernelEntry:
    names = tuple(f"triton_attn.{name}" for name in kernels.split())
    return register(KernelEntry(name=table.kernel, kernels=names, table=table, cases=cases))


ENTRIES = (
    _entry(PREFILL, "prefill:_prefill_kernel hopper:_hopper_prefill_kernel", _prefill_cases),
    _entry(
        DECODE,
        "decode_kernels:_decode_kernel decode_merge:_merge_kernel decode_merge:_window_merge_kernel"
        " hopper_verify:_hopper_verify_kernel hopper_window:_hopper_window_kernel",
        _decode_cases,
    ),
    _entry(PROFILE_WRITER, "profile:_profile_rows_kernel", _writer_cases),
)
