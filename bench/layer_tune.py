"""Time many launch configurations of the layer's kernels on this GPU.

    python -m bench.layer_tune --out tuning.jsonl

One line a configuration: what stands behind the measured rows of inkling_rocm/kernels/tuning.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product

import torch
import triton

from bench.layer_kernels import (
    Measured,
    embed_case,
    norm_case,
    prologue_case,
    residual_case,
)
from bench.moe.timing import time_calls
from bench.rows import result_row
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningRow

DECODE, PREFILL = (1, 8, 32, 128), 8192


def _row(arch: str, constexprs: dict, num_warps: int, **options: int) -> TuningRow:
    return TuningRow(
        arch=arch, constexprs=constexprs, options={"num_warps": num_warps, **options},
        evidence="guess", source="candidate",
    )  # fmt: skip


def candidates(arch: str) -> Iterator[tuple[Measured, dict]]:
    """(case, launcher keywords) of everything to try."""
    for tokens in (*DECODE, PREFILL):
        decode = tokens != PREFILL
        cases = [prologue_case(tokens, kv_heads) for kv_heads in (2, 1)]
        shapes = product((1, 2, 4, 8), (1,)) if decode else product((8, 16, 32), (2, 4, 8))
        for rows, warps in shapes:
            for case in cases:
                yield case, {"row": _row(arch, {"ROWS": rows}, warps)}
        case = residual_case(tokens)
        for group, warps, keep in product(
            (1,) if decode else (1, 4, 16), (8, 16, 32), (True, False)
        ):
            yield case, {"row": _row(arch, {"TOKENS": group, "KEEP": keep}, warps)}
        if not decode:
            for warps, registers in product((4, 8), (80, 128)):
                shape = {"TOKENS": 1, "KEEP": False}
                yield case, {"row": _row(arch, shape, warps, maxnreg=registers)}
            for block in (128, 256, 512, 1024):
                yield case, {"tail_row": _row(arch, {"BLOCK_C": block}, 1)}
        del cases, case
        for case in (norm_case(tokens), embed_case(tokens)):
            for warps in (2, 4, 8, 16):
                yield case, {"row": _row(arch, {}, warps)}


def tune(out: str) -> None:
    """Append a row for each configuration to the file `out`."""
    arch, device = arch_of_device("cuda:0").name, torch.cuda.get_device_name()
    with open(out, "a", encoding="utf-8") as file:
        for case, rows in candidates(arch):
            kind, row = next(iter(rows.items()))
            shape = {"kind": kind, **row.launch_kwargs()}
            try:
                times = time_calls(
                    lambda i, case=case, rows=rows: case.call(
                        lambda *args, **kwargs: case.fused(*args, **kwargs, **rows), i
                    ),
                    case.sets,
                )
            except (triton.CompilationError, triton.OutOfResources, RuntimeError) as error:
                print(case.op, case.case, shape, f"{type(error).__name__}: {error}", flush=True)
                continue
            line = result_row(
                case.op, case.case, device=device, arch=arch, gate="not run", evidence="measured",
                **shape, **times,
            )  # fmt: skip
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(f"{case.op:20} {case.case:20} {times['p50_us']:9.2f} us {shape}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    tune(parser.parse_args().out)
