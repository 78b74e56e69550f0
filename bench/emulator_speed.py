"""How many wave instructions a second gcn_emulator executes, on one thread.

    python -m bench.emulator_speed --out bench/results/emulator_cpu_2026-11-30.jsonl --label after

One JSON line per kernel. CPU time of the process, which other work on the machine disturbs least.
Compilation is excluded: every kernel runs once before it is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from bench.rows import provenance
from gcn_emulator.triton_driver import emulate
from tests.gcn_emulator.strided_bias import strided_bias


@triton.jit
def _gemm(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (i + k)[None, :])
        b = tl.load(b_ptr + (i + k)[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def _softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offs, mask=offs < columns, other=float("-inf")).to(
        tl.float32
    )
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * columns + offs, e / tl.sum(e, 0), mask=offs < columns)


def _attention(tokens, num_warps, block_m):
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, n, 128).to(torch.bfloat16) for n in (2, 1, 1))
    rel = torch.randn(tokens, 2, 512).to(torch.bfloat16)
    return lambda: strided_bias(q, k, v, rel, window=512, block_m=block_m, num_warps=num_warps)


def _run_gemm():
    torch.manual_seed(0)
    a, b = torch.randn(128, 512).to(torch.float16), torch.randn(512, 128).to(torch.float16)
    c = torch.empty(128, 128)
    return lambda: _gemm[(1,)](a, b, c, 512, M=128, N=128, BLOCK_K=64, num_warps=8)


def _run_softmax(num_warps):
    x = torch.randn(64, 1000).to(torch.bfloat16)
    y = torch.empty_like(x)
    return lambda: _softmax[(64,)](x, y, 1000, BLOCK=1024, num_warps=num_warps)


CASES = {
    "attention 320 tokens, 2 heads, d128, 4 waves": lambda: _attention(320, 4, 64),
    "attention 320 tokens, 2 heads, d128, 8 waves": lambda: _attention(320, 8, 128),
    "gemm 128x128x512 fp16, 8 waves": _run_gemm,
    "softmax 64x1000, 4 waves": lambda: _run_softmax(4),
    "softmax 64x1000, 1 wave": lambda: _run_softmax(1),
}


def measure(name: str, arch: str, repeats: int) -> dict:
    """Executed wave instructions and the median CPU time of one launch set."""
    run = CASES[name]()
    with emulate(arch, counters=True) as driver:
        run()
        instructions = sum(sum(r.counters.instructions.values()) for r in driver.records)
    times = []
    with emulate(arch):
        run()
        for _ in range(repeats):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    median = statistics.median(times)
    return {
        "case": name,
        "arch": arch,
        "wave_instructions": instructions,
        "cpu_seconds_p50": round(median, 4),
        "wave_instructions_per_cpu_s": round(instructions / median),
    }


def main() -> None:
    """Measure every case and append rows to the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--label", required=True, help="what the rows stand for: before, after, ..."
    )
    parser.add_argument("--commit", help="commit measured, when it is not the checkout's")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found = provenance()
    if args.commit:
        found |= {"commit": args.commit, "dirty": False}
    with args.out.open("a") as out:
        for name in CASES:
            for arch in ("gfx942", "gfx950"):
                row = {
                    "op": "gcn_emulator",
                    "label": args.label,
                    "device": f"{platform.machine()} CPU, 1 thread",
                    "evidence": "measured",
                    **found,
                    **measure(name, arch, args.repeats),
                }
                print(row["label"], row["arch"], row["case"], row["wave_instructions_per_cpu_s"])
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
