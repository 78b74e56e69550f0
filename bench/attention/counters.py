"""Emulated counters of a small prefill: the strided bias against a gather of materialised logits.

`python -m bench.attention.counters OUT.jsonl COMMIT`. Instructions that the gfx942/gfx950 code
executes on gcn_emulator; nothing here is a time.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from bench.rows import provenance
from gcn_emulator.triton_driver import emulate
from kernel_base.tuning import TuningRow
from triton_attn import ScoreMod, attention_prefill
from triton_attn.cases import PagedCase, make_case


@triton.jit
def _gather(score, q_pos, k_pos, q_token, head, aux):
    """What the other servers' score_mod does: one 2-byte load a score."""
    heads: tl.constexpr = 2
    extent: tl.constexpr = 128
    distance = q_pos - k_pos
    inside = (distance >= 0) & (distance < extent)
    at = (q_token * heads + head) * extent + distance
    return score + tl.load(aux[0] + at, mask=inside, other=0.0).to(tl.float32)


# Smaller tiles than the table's: the gather's code would pass the range of a branch with those.
ROW = {"VARIANT": "triton", "BLOCK_M": 64, "BLOCK_N": 32, "STAGES": 1}


def _problem() -> PagedCase:
    return make_case(
        (256,), (512,), heads=2, kv_heads=1, head_dim=128, window=0, extent=128,
        dtype=torch.bfloat16,
        device=torch.device("cpu"), page_size=64,
    )  # fmt: skip


def count(arch: str, variant: str, case: PagedCase) -> dict:
    """Counters summed over the launches of one call."""
    mod = case.bias
    if variant == "gather":
        rel = (case.bias.r @ case.bias.profile.projection) * case.bias.tau[:, None, None].bfloat16()
        mod = ScoreMod(fn=_gather, reference=_gather, aux=(rel.contiguous(),), extent=128)
    row = TuningRow(
        arch=arch, constexprs=ROW, options={"num_warps": 4, "matrix_instr_nonkdim": 16},
        evidence="emulated", source="comparison",
    )  # fmt: skip
    with emulate(arch, counters=True) as driver:
        attention_prefill(
            case.q, case.k_pages, case.v_pages, cu_seqlens_q=case.cu_seqlens_q,
            q_start=case.q_start,
            score_mod=mod, arch=arch, row=row, **case.paged,
        )  # fmt: skip
    total: dict[str, int] = {
        "valu": 0,
        "mfma": 0,
        "narrow_loads": 0,
        "wide_loads": 0,
        "lds_conflicts": 0,
    }
    for record in driver.records:
        counters = record.counters
        total["valu"] += counters.valu
        total["mfma"] += counters.mfma
        total["lds_conflicts"] += counters.lds_conflict_cycles
        total["narrow_loads"] += sum(
            n for m, n in counters.instructions.items() if "load_ushort" in m or "load_short" in m
        )
        total["wide_loads"] += sum(
            n for m, n in counters.instructions.items() if "load_dwordx4" in m
        )
    static = driver.records[-1].static
    return {**total, "vgprs": static.vgprs, "lds_bytes": static.lds, "occupancy": static.occupancy}


def main() -> None:
    path, commit = sys.argv[1:3]
    case = _problem()
    with open(path, "a") as file:
        for arch in ("gfx942", "gfx950"):
            for variant in ("gather", "strided"):
                row = {
                    "op": "prefill",
                    "case": "T256 on 256, 2/1 heads, extent 128",
                    "impl": variant,
                    "arch": arch,
                }
                row |= {"device": "gcn_emulator", **provenance(), "evidence": "emulated"}
                row |= {"commit": commit, **count(arch, variant, case)}
                file.write(json.dumps(row) + "\n")
                print(row)


if __name__ == "__main__":
    main()
