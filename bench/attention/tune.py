"""Measure launch configurations on this GPU: `python -m bench.attention.tune OUT.jsonl [prefill]
[decode] [i/n]`.

With i/n it only compiles every n-th configuration, so that n processes fill the cache before the
timed run.

A configuration that does not compile or launch is recorded with its message; the winners go into
triton_attn/tuning.py
by hand, with the file's name as their source.
"""

# ruff: noqa: B023 (every lambda runs within the iteration that made it)
from __future__ import annotations

import contextlib
import itertools
import json
import sys

import torch
import triton

from bench.attention.gate import run_decode, run_prefill
from bench.attention.problems import make_problem
from bench.attention.timing import time_graph, time_stream
from bench.rows import provenance
from kernel_base.tuning import TuningRow
from triton_attn import DecodeWorkspace
from triton_attn.profile import allocate_rows, plan_chunks, write_profile_rows

FAILURES = (RuntimeError, ValueError, triton.runtime.errors.OutOfResources, triton.CompilationError)
PROVENANCE = provenance()
SHARD: tuple[int, int] | None = None
SEEN: list[str] = []


def _row(constexprs, options):
    return TuningRow(
        arch="sm90", constexprs=constexprs, options=options, evidence="guess", source="under test"
    )


def prefill_configs():
    """Tiles of both variants: (variant, BLOCK_M, BLOCK_N, stages, warps)."""
    for variant, m, n, stages, warps in (
        ("hopper", 128, 64, 3, 4),
        ("hopper", 128, 64, 4, 4),
    ):
        constexprs = {"VARIANT": variant, "BLOCK_M": m, "BLOCK_N": n, "STAGES": stages}
        yield _row(constexprs, {"num_warps": warps})


def writer_configs():
    """Of the kernel that writes the strided profile: (rows / 8, columns a program, columns a step,
    stages, warps)."""
    for rows, columns, step, stages, warps in (
        (32, 512, 256, 2, 4), (32, 256, 256, 1, 4), (32, 1088, 64, 4, 4), (16, 256, 128, 2, 2),
    ):  # fmt: skip
        constexprs = {"ROWS": rows, "COLUMNS": columns, "BLOCK_C": step, "STAGES": stages}
        yield _row(constexprs, {"num_warps": warps})


def decode_configs(q_len):
    if q_len > 4:
        tiles = [
            *itertools.product((32, 64), (256, 512), (8,), (5,)),
            *itertools.product((32, 64), (256, 512), (4,), (3,)),
        ]
    elif q_len > 1:
        tiles = [
            *itertools.product((64,), (256, 512), (4,), (3, 5)),
            (32, 512, 4, 5),
            (32, 256, 4, 5),
        ]
    else:
        tiles = [
            *itertools.product((64,), (128, 256, 512), (4,), (3, 5)),
            *((32, 512, 4, 5), (32, 256, 4, 5), (64, 384, 4, 3), (128, 256, 8, 5)),
        ]
    for n, split, warps, stages in tiles:
        constexprs = {"BLOCK_N": n, "SPLIT": split, "STAGES": stages, "UNITS": 4}
        merge = {"MERGE_HERE": False, "MERGE": 8, "PDL": True}
        yield _row(constexprs | merge, {"num_warps": warps})


def _measure(results, label, row, timer, fn):
    if SHARD is not None:  # compile only: fill Triton's cache from several processes
        SEEN.append(label)
        if len(SEEN) % SHARD[1] == SHARD[0]:
            with contextlib.suppress(*FAILURES):
                fn()
        return
    record = {
        "op": "attention_tuning",
        "case": label,
        "device": torch.cuda.get_device_name(),
        "arch": row.arch,
        "evidence": "measured",
        **PROVENANCE,
        **row.constexprs,
        **row.options,
    }
    try:
        record["p20_us"], record["p50_us"], record["p80_us"] = timer(fn)
    except FAILURES as problem:
        record["message"] = repr(problem)[:200]
    results.append(record)
    with open(sys.argv[1], "a") as file:  # at once: a run that is cut short keeps what it has
        file.write(json.dumps(record) + "\n")


def tune_prefill(results):
    for label, h, g, window, extent in (
        ("local 8/2", 8, 2, 512, 512),
        ("global 8/1", 8, 1, 0, 1024),
    ):
        p = make_problem(
            q_lens=[8192], kv_lens=[8192], heads=h, kv_heads=g, window=window, extent=extent
        )
        out = torch.empty_like(p.q)
        for row in prefill_configs():
            for biased in (False, True):
                name = f"prefill {label} {'bias' if biased else 'none'}"
                _measure(
                    results, name, row, lambda f: time_stream(f, repeats=10, warmup=2),
                    lambda b=biased, r=row: run_prefill(p, biased=b, row=r, out=out),
                )  # fmt: skip
        chunk, block_m = plan_chunks(8192 // 128 + 1, h, 128, extent, 2)[0], 128
        rows = allocate_rows([chunk], block_m, extent, p.q)
        for row in writer_configs():
            _measure(
                results, f"writer {label}", row, lambda f: time_stream(f, repeats=10, warmup=2),
                lambda r=row: write_profile_rows(
                    rows, p.bias, chunk=chunk, block_m=block_m, extent=extent,
                    cu_seqlens_q=p.cu_seqlens_q, q_start=p.q_start,
                    row=r,
                ),
            )  # fmt: skip


def tune_decode(results):
    for batch, context, q_len, h, g, window, extent in (
        (1, 8192, 1, 8, 1, 0, 1024), (32, 8192, 1, 8, 1, 0, 1024), (128, 8192, 1, 8, 1, 0, 1024),
        (8, 131072, 1, 8, 1, 0, 1024), (32, 8192, 1, 64, 8, 0, 1024),
        (1, 8192, 1, 8, 2, 512, 512), (32, 8192, 1, 8, 2, 512, 512), (128, 8192, 1, 8, 2, 512, 512),
        (1, 8192, 4, 8, 1, 0, 1024), (32, 8192, 4, 8, 1, 0, 1024), (1, 8192, 9, 8, 1, 0, 1024),
        (32, 8192, 9, 8, 1, 0, 1024),
        (32, 8192, 4, 8, 2, 512, 512), (32, 8192, 9, 8, 2, 512, 512),
    ):  # fmt: skip
        p = make_problem(
            q_lens=[q_len] * batch,
            kv_lens=[context] * batch,
            heads=h,
            kv_heads=g,
            window=window,
            extent=extent,
        )
        out = torch.empty_like(p.q)
        work = DecodeWorkspace.allocate(
            p.q.device, max_requests=batch, num_kv_heads=g, max_rows=h // g * q_len, head_dim=128
        )
        for row in decode_configs(q_len):
            name = f"decode b{batch} c{context} q{q_len} {h}/{g} w{window}"
            _measure(
                results, name, row, lambda f: time_graph(f, calls=10, repeats=5),
                lambda r=row: run_decode(p, row=r, workspace=work, out=out),
            )  # fmt: skip


def main():
    global SHARD
    what = [x for x in sys.argv[2:] if "/" not in x] or ["prefill", "decode"]
    for x in sys.argv[2:]:
        if "/" in x:
            SHARD = tuple(int(n) for n in x.split("/"))
    results = []
    for name, tune in (("prefill", tune_prefill), ("decode", tune_decode)):
        if name in what:
            tune(results)
    for case in dict.fromkeys(r["case"] for r in results):
        rows = sorted(
            (r for r in results if r["case"] == case and "p50_us" in r), key=lambda r: r["p50_us"]
        )
        for r in rows[:6]:
            print(
                case, r["p50_us"], {k: v for k, v in r.items() if k.isupper() or k == "num_warps"}
            )
        failed = [r for r in results if r["case"] == case and "message" in r]
        if failed:
            print(case, len(failed), "failed, e.g.", failed[0]["message"][:150])


if __name__ == "__main__":
    main()
