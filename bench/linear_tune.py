"""Time launch configurations of linear on this GPU, beside torch's product.

    python -m bench.linear_tune --out tuning.jsonl

Shapes are a layer's products on one rank of eight of the large model. Weights rotate, so that none
comes from the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import chain, product

import torch
import triton
from torch import Tensor

from bench.moe.timing import count_launches, time_calls
from bench.rows import result_row
from inkling_rocm.kernels.linear import linear, make_tickets
from inkling_rocm.kernels.linear_tuning import TILES, VECTOR
from kernel_base.arch import arch_of_device
from kernel_base.tuning import TuningRow

# A rank of eight of the large model: local and global layers' first product, the output product;
# the small model's.
SHAPES = ((1664, 6144), (1408, 6144), (6144, 1024), (4096, 4096), (6656, 4096))
COPY_RATE = 4.3e12  # bytes/s
WEIGHT_SETS = 12
# Programs a launch may have: enough to fill 132 multiprocessors, in not much more than one round.
PROGRAMS = range(64, 215)
SHARED_BYTES = (100_000, 200_000)  # two programs a multiprocessor, and one


def vector_configs(depth: int) -> Iterator[tuple[dict, dict]]:
    for n, k, warps in product((2, 4, 8, 16, 32), (512, 1024, 2048), (4, 8)):
        if k <= depth and 16 <= n * k // (32 * warps) <= 128:
            yield {"BLOCK_N": n, "BLOCK_K": k}, {"num_warps": warps}


def parts_configs(tokens: int, columns: int, depth: int) -> Iterator[tuple[dict, dict]]:
    m = max(triton.next_power_of_2(tokens), 8)
    for n, parts, k in product((16, 32), (4, 8), (64, 128, 256)):
        shared = 2 * parts * k * (m + n)
        for stages in (3, 4, 6):
            if m <= 16 and depth % (parts * k) == 0 and 70_000 <= stages * shared <= 225_000:
                sizes = {"PARTS": parts, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
                yield sizes, {"num_warps": parts, "num_stages": stages}


def tile_configs(tokens: int, columns: int, depth: int) -> Iterator[tuple[dict, dict]]:
    """Tiles over the whole depth or a slice of it."""
    m = max(triton.next_power_of_2(tokens), 8)
    for n, k, slices in product((32, 64, 128, 256), (64, 128), range(1, 13)):
        depth_of_one = triton.cdiv(depth, slices * k) * k
        if triton.cdiv(depth, depth_of_one) != slices:
            continue
        if triton.cdiv(columns, n) * slices not in PROGRAMS or (n == 256 and m < 128):
            continue
        sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SLICE": depth_of_one}
        sizes["W_FIRST"] = True
        for warps, shared in product((4, 8), SHARED_BYTES):
            stages = min(shared // (2 * k * (m + n)), 8, depth_of_one // k + 1)
            tile_a_warp = m * n // warps
            if stages < 3 or tile_a_warp > 4096 or tile_a_warp < 128:
                continue
            for tail in tails(m, slices):
                yield sizes | {"TAIL": tail}, {"num_warps": warps, "num_stages": stages}


def tails(m: int, slices: int) -> tuple[int, ...]:
    if slices == 1:
        return (0,)
    return (0, 16, 32, 64, 128) if m == 128 else (0, min(m, 32), m)


def candidates(
    arch: str, columns: int, depth: int, tokens: int, only_table: bool
) -> Iterator[TuningRow | None]:
    """None stands for torch."""
    yield None
    if only_table:
        table = VECTOR if tokens == 1 else TILES
        yield table.select(arch, tokens=tokens, bits=16, depth=depth, columns=columns)
        return
    configs = [vector_configs(depth)]
    if tokens > 1:
        configs = [make(tokens, columns, depth) for make in (parts_configs, tile_configs)]
    for constexprs, options in chain(*configs):
        yield TuningRow(
            arch=arch, constexprs=constexprs, options=options, evidence="guess", source="candidate"
        )


def tune(tokens: list[int], out: str | None, only_table: bool) -> None:
    """Append a row for each configuration (or the table's alone), and one for torch, to the file
    `out`; None = only compile, which several processes may do at once."""
    arch, device = arch_of_device("cuda:0").name, torch.cuda.get_device_name()
    tickets = make_tickets(torch.device("cuda"))

    def product_of(x: Tensor, w: Tensor, row: TuningRow | None) -> Tensor:
        if row is None:
            return torch.nn.functional.linear(x, w)
        return linear(x, w, arch=arch, row=row, tickets=tickets)

    for (columns, depth), count in product(SHAPES, tokens):
        shape = (WEIGHT_SETS, columns, depth)
        weights = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / depth**0.5
        x = torch.randn(count, depth, device="cuda", dtype=torch.bfloat16)
        exact = x.double() @ weights[0].double().t()
        floor = columns * depth * 2 / COPY_RATE * 1e6
        for row in candidates(arch, columns, depth, count, only_table):
            how = {} if row is None else row.launch_kwargs()
            try:
                got = product_of(x, weights[0], row)
                if out is None:
                    continue
                times = time_calls(
                    lambda i, x=x, weights=weights, row=row: product_of(x, weights[i], row),
                    WEIGHT_SETS,
                )
                launches = count_launches(
                    lambda x=x, weights=weights, row=row: product_of(x, weights[0], row)
                )
            except (triton.CompilationError, triton.OutOfResources, RuntimeError) as fault:
                print(columns, depth, count, how, type(fault).__name__, flush=True)
                continue
            error = float((got.double() - exact).norm() / exact.norm())
            line = result_row(
                "linear", f"T={count} [{columns}, {depth}]", device=device, arch=arch,
                gate="pass" if error < 4e-3 else f"relative error {error:.1e}",
                evidence="measured", variant="triton" if how else "torch",
                floor_us=round(floor, 2), launches=launches, **how, **times,
            )  # fmt: skip
            with open(out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(
                f"{line['case']:22} {line['gate']} {times['p50_us']:7.2f} us in {launches}, floor "
                f"{floor:.2f} {how or 'torch'}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="where rows go; without it everything is only compiled")
    parser.add_argument("--tokens", default="1,8,32,64")
    parser.add_argument("--only-table", action="store_true", help="the table's rows, no sweep")
    options = parser.parse_args()
    tune([int(n) for n in options.tokens.split(",")], options.out, options.only_table)
