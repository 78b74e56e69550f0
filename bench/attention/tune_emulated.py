"""Choose the AMD launch configurations of prefill by emulated counters.

`python -m bench.attention.tune_emulated OUT.jsonl gfx950 [window global wide fp32 writer]`.

Each configuration runs a small prefill on gcn_emulator, is checked against float64, and gets a
rough cost from what it executed: SIMD cycles of its matrix instructions, of its vector instructions
and LDS cycles of its accesses, the largest of them where several waves share a SIMD and the sum
where one is alone. A cost orders configurations of one architecture; it is not a time. It knows
nothing of latency and of the caches.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass, field

import torch
import triton

from bench.rows import provenance
from gcn_emulator.counters import Counters, StaticInfo
from gcn_emulator.triton_driver import emulate
from kernel_base.tuning import TuningRow
from triton_attn import attention_prefill
from triton_attn.cases import PagedCase, make_case
from triton_attn.reference import attention_reference

# Dense operations a SIMD can do in a cycle (vendor's peak over CUs, SIMDs and clock).
MATRIX_RATE = {
    ("gfx942", torch.bfloat16): 512, ("gfx950", torch.bfloat16): 1024,
    ("gfx942", torch.float32): 64, ("gfx950", torch.float32): 64,
}  # fmt: skip
VECTOR_CYCLES, SLOW_CYCLES, SIMDS = 4, 16, 4
SLOW = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_")


def _row(arch: str, constexprs: dict, options: dict) -> TuningRow:
    return TuningRow(
        arch=arch, constexprs=constexprs, options=options, evidence="guess", source="under test"
    )


# Tiles around those of public Triton attention configurations for CDNA3:
# (BLOCK_M, BLOCK_N, stages, warps, matrix shape).
TILES = [
    *itertools.product((128,), (32, 64), (1, 2), (4,), (16, 32)),
    *itertools.product((64,), (64,), (1, 2), (4,), (16,)),
    *itertools.product((128,), (64,), (1,), (8,), (16, 32)),
    (128, 128, 1, 8, 16),
]
SMALL_TILES = [
    *itertools.product((64,), (32,), (1, 2), (4, 8), (16,)),
    *((64, 16, 1, 4, 16), (128, 32, 1, 8, 16), (64, 32, 1, 4, 32), (64, 64, 1, 8, 16)),
]


@dataclass(frozen=True)
class Trial:
    """Query rows, keys, window, extent, head_dim and dtype of a problem, and what to try on it."""

    tokens: int
    keys: int
    window: int
    extent: int
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    tiles: list = field(default_factory=lambda: TILES)


TRIALS = {
    "window": Trial(256, 1024, 512, 512),
    "global": Trial(128, 1152, 0, 512),
    "wide": Trial(128, 512, 0, 256, head_dim=256, tiles=SMALL_TILES),
    "fp32": Trial(128, 512, 0, 256, dtype=torch.float32, tiles=SMALL_TILES),
    "writer": Trial(256, 1024, 512, 512),
}


def prefill_rows(arch: str, tiles: list) -> list[TuningRow]:
    return [
        _row(
            arch,
            {"VARIANT": "triton", "BLOCK_M": m, "BLOCK_N": n, "STAGES": stages},
            {"num_warps": warps, "matrix_instr_nonkdim": shape},
        )
        for m, n, stages, warps, shape in tiles
    ]


def writer_rows(arch: str) -> list[TuningRow]:
    return [
        _row(
            arch,
            {"ROWS": rows, "COLUMNS": columns, "BLOCK_C": step, "STAGES": stages},
            {"num_warps": warps, "matrix_instr_nonkdim": 16},
        )
        for rows, columns, step, stages, warps in (
            (32, 512, 256, 2, 4), (32, 512, 256, 1, 4), (32, 512, 128, 1, 4), (32, 576, 64, 2, 4),
            (16, 512, 256, 1, 4), (16, 512, 128, 1, 2), (32, 576, 64, 1, 4), (16, 576, 64, 1, 4),
            (16, 576, 64, 1, 2), (16, 192, 64, 1, 2),
        )
    ]  # fmt: skip


def cost(rate: int, counters: Counters, static: StaticInfo) -> dict[str, int]:
    """Cycles of a CU by unit, waves spread evenly over its SIMDs, and one number to order by."""
    slow = counters.total(*SLOW)
    matrix = counters.mfma_flops // (rate * SIMDS)
    vector = ((counters.valu - slow) * VECTOR_CYCLES + slow * SLOW_CYCLES) // SIMDS
    lds = counters.traffic.lds_cycles
    units = (matrix, vector, lds)
    total = max(units) if static.occupancy > 1 else sum(units)
    return {"matrix_cycles": matrix, "vector_cycles": vector, "lds_cycles": lds, "cost": total}


def measure(arch: str, case: PagedCase, want: torch.Tensor, kernel: str, **rows) -> dict:
    """Counters of the named kernel in one call, and the relative error of the call."""
    out = torch.full_like(case.q, float("nan"))
    with emulate(arch, counters=True) as driver:
        attention_prefill(
            case.q, case.k_pages, case.v_pages, cu_seqlens_q=case.cu_seqlens_q,
            q_start=case.q_start, score_mod=case.bias, out=out, arch=arch, **rows, **case.paged,
        )  # fmt: skip
    record = next(r for r in driver.records if kernel in r.name)
    static, counters = record.static, record.counters
    wide = sum(n for m, n in counters.instructions.items() if "load_dwordx4" in m)
    return {
        "error": float((out.double() - want).norm() / want.norm()),
        "vgprs": static.vgprs, "spills": static.vgpr_spills + static.scratch,
        "lds_bytes": static.lds, "occupancy": static.occupancy, "valu": counters.valu,
        "mfma": counters.mfma, "lds_conflicts": counters.lds_conflict_cycles, "wide_loads": wide,
        **cost(MATRIX_RATE[arch, case.q.dtype], counters, static),
    }  # fmt: skip


def rows_of(arch: str, name: str) -> tuple[str, list[tuple[TuningRow, dict]]]:
    """The kernel whose counters matter, and (row under test, arguments of the call) for each."""
    if name == "writer":
        tile = {"VARIANT": "triton", "BLOCK_M": 64, "BLOCK_N": 32, "STAGES": 1}
        small = _row(arch, tile, {"num_warps": 4, "matrix_instr_nonkdim": 16})
        rows = [(row, {"row": small, "writer_row": row}) for row in writer_rows(arch)]
        return "_profile_rows", rows
    return "_prefill_kernel", [(r, {"row": r}) for r in prefill_rows(arch, TRIALS[name].tiles)]


def try_problem(path: str, arch: str, name: str) -> None:
    """Run every trial of one name and append its record."""
    t = TRIALS[name]
    case = make_case(
        (t.tokens,), (t.keys,), heads=1, kv_heads=1, head_dim=t.head_dim, window=t.window,
        extent=t.extent, dtype=t.dtype, device=torch.device("cpu"), page_size=128,
    )  # fmt: skip
    want, eager = (
        attention_reference(
            case.q, case.k_pages, case.v_pages, cu_seqlens_q=case.cu_seqlens_q,
            score_mod=case.bias, dtype=dtype, **case.paged,
        )[0]
        for dtype in (torch.float64, t.dtype)
    )  # fmt: skip
    budget = 2 * float((eager.double() - want).norm() / want.norm())
    kernel, rows = rows_of(arch, name)
    label = f"{name}: {t.tokens} rows, {t.keys} keys, head_dim {t.head_dim}"
    for row, arguments in rows:
        record = {
            "op": "attention_tuning", "case": label, "arch": arch, "device": "gcn_emulator",
            "evidence": "emulated", **provenance(),
            **row.constexprs, **row.options,
        }  # fmt: skip
        try:
            record |= measure(arch, case, want, kernel, **arguments)
            record["gate"] = "passed" if record["error"] <= budget else "failed"
        except (RuntimeError, ValueError, triton.CompilationError) as problem:
            record["message"] = repr(problem)[:200]
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        shown = ("gate", "vgprs", "spills", "lds_bytes", "occupancy", "cost", "message")
        print(name, row.launch_kwargs(), {k: record[k] for k in shown if k in record}, flush=True)


def main() -> None:
    path, arch, *names = sys.argv[1:]
    for name in names or TRIALS:
        try_problem(path, arch, name)


if __name__ == "__main__":
    main()
