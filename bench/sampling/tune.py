"""Time launch configurations of the sampling kernels and of lm_head on this GPU.

    python -m bench.sampling.tune --out tuning.jsonl

One line a configuration: what stands behind the measured rows of inkling_rocm/kernels/
sampling_tuning.py and lm_head_tuning.py. A candidate whose tokens (or logits) differ from those of
the table's row gets no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton

from bench.moe.timing import time_calls
from bench.rows import Rows
from bench.sampling.run import HIDDEN, MUP, PARAMS, VOCABULARY, make_logits, sample_rows_of
from inkling_rocm.engine.device_sampler import DeviceSampler
from inkling_rocm.kernels.lm_head import local_logits
from inkling_rocm.kernels.lm_head_tuning import LM_HEAD
from inkling_rocm.kernels.sampling import sample_rows
from inkling_rocm.kernels.sampling_tuning import BOUND, COUNT, CUT, DRAW, GATHER, SCAN
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningRow, TuningTable

TABLES = (SCAN, BOUND, COUNT, GATHER, CUT, DRAW)
# What to try of each table.
CHANGES: tuple[tuple[TuningTable, tuple[dict, ...]], ...] = (
    (
        SCAN,
        tuple(
            {"SCAN_BLOCKS": b, "num_warps": w}
            for b, w in ((8, 4), (16, 4), (16, 8), (32, 4), (32, 8))
        ),
    ),
    (BOUND, tuple({"num_warps": w} for w in (4, 8, 16))),
    (COUNT, tuple({"num_warps": w} for w in (1, 2, 4, 8))),
    (GATHER, tuple({"num_warps": w} for w in (1, 2, 4, 8))),
    (
        CUT,
        tuple(
            {"TILE": t, "num_warps": w}
            for t, w in ((16, 8), (16, 16), (32, 16), (32, 32), (64, 32))
        ),
    ),
    (
        DRAW,
        tuple(
            {"TILE": t, "num_warps": w} for t, w in ((16, 4), (16, 8), (32, 4), (32, 8), (32, 16))
        ),
    ),
)
CASES = (("top_p .95", "zipf"), ("top_p .95", "normal 1"), ("greedy", "zipf"))
BATCHES = (1, 32, 128)
# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages for so many tokens.
TILES = {
    1: ((16, 64, 128, 4, 4), (16, 64, 128, 4, 5), (16, 32, 256, 4, 4), (16, 64, 256, 4, 3)),
    32: ((32, 128, 128, 8, 3), (32, 64, 128, 4, 4), (32, 64, 64, 4, 5), (32, 128, 64, 4, 5)),
    64: ((64, 128, 128, 8, 3), (64, 128, 64, 4, 4), (64, 64, 64, 4, 5), (64, 256, 64, 8, 3)),
}


def changed(row: TuningRow, **values: int) -> TuningRow:
    """The row with some constexprs and options of these names replaced."""
    return replace(
        row,
        constexprs={k: values.get(k, v) for k, v in row.constexprs.items()},
        options={k: values.get(k, v) for k, v in row.options.items()},
        evidence="guess",
        source="candidate",
    )


def candidates(arch: str) -> Iterator[tuple[TuningTable, dict, tuple[TuningRow | None, ...]]]:
    """(table, what is changed, the six rows to launch with)."""
    for table, changes in CHANGES:
        for values in changes:
            row = changed(table.select(arch), **values)
            yield table, values, tuple(row if t is table else None for t in TABLES)


def tune_sampling(out: Rows) -> None:
    for case, shape in CASES:
        for n in BATCHES:
            logits = make_logits(shape, n)
            sampler = DeviceSampler(
                vocabulary=VOCABULARY, slots=n, device=logits.device, arch=out.arch
            )
            rows = sampler.rows(sample_rows_of(PARAMS[case], n), list(range(n)))
            want = sample_rows(logits, rows, arch=out.arch)[0]
            for table, values, tuning in candidates(out.arch):
                if case == "greedy" and table not in (SCAN, BOUND):
                    continue
                name = f"{case}, {shape}, n={n}"

                def call(_: int = 0, x=logits, r=rows, t=tuning) -> torch.Tensor:
                    return sample_rows(x, r, arch=out.arch, tuning=t)[0]

                _time(out, table.kernel.rpartition(".")[2], name, values, call, want)


def tune_head(out: Rows) -> None:
    for vocabulary, padded in ((VOCABULARY, 201024), (201024 // 8, 201024 // 8)):
        w = (torch.randn(padded, HIDDEN, device="cuda") / 78).bfloat16()
        for n, tiles in TILES.items():
            x = torch.randn(n, HIDDEN, device="cuda").bfloat16()
            table_row = LM_HEAD.select(out.arch, tokens=n, bits=16)
            names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")

            def call(
                _: int = 0, x=x, w=w, vocabulary=vocabulary, row: TuningRow = table_row
            ) -> torch.Tensor:
                return local_logits(
                    x, w, mup_multiplier=MUP, vocabulary=vocabulary, dtype=torch.float32,
                    arch=out.arch, row=row,
                )  # fmt: skip

            want = call()
            for tile in tiles:
                values = dict(zip(names, tile, strict=True))
                row = changed(table_row, **values)
                _time(
                    out, "lm_head", f"{vocabulary} rows, n={n}", values,
                    lambda _=0, call=call, row=row: call(row=row), want,
                )  # fmt: skip
        del w


def _time(out: Rows, op: str, case: str, values: dict, call, want: torch.Tensor) -> None:
    """A row of one configuration: its outputs first, then its time."""
    try:
        got = call()
        error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1))
        gate = "pass" if error < 2**-7 else f"fail: {error:.2g} from the table's row"
        found = time_calls(call, 4, 9) if gate == "pass" else {}
    except (triton.CompilationError, triton.OutOfResources, RuntimeError) as failure:
        gate, found = f"fail: {type(failure).__name__}", {}
    out.add(op, case, gate, config=values, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    out = Rows(
        parser.parse_args().out,
        device=torch.cuda.get_device_name(),
        arch=arch_of_device("cuda:0").name,
    )
    tune_head(out)
    tune_sampling(out)


if __name__ == "__main__":
    main()
