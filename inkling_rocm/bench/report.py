"""A layer measurement as text and as a row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from inkling_rocm.bench.layer import Measurement
from inkling_rocm.bench.rows import ceilings, machine
from inkling_rocm.engine.args import EngineArgs
from inkling_rocm.engine.load import EngineParts
from kernel_base.arch import arch_of_device


def layer_text(found: Measurement) -> str:
    """The layer's line and a table by op, all per layer."""
    how = "graph" if found.graph else "eager"
    line = f"{found.case.name}: {found.us:.1f} us a layer ({how}, mean of {found.layers})"
    if found.graph_us is not None:
        line += f", {found.graph_us:.1f} us as a graph"
    if found.over_floor is not None:
        line += f", floor {found.floor_us:.1f} us, {found.over_floor:.2f}x"
    lines = [
        line,
        f"  {'op':<20} {'calls':>6} {'launches':>9} {'us':>10} {'floor us':>9} {'MB':>9} "
        f"{'GFLOP':>9}",
    ]
    for name, op in sorted(found.ops.items(), key=lambda item: -(item[1].us or 0)):
        n = found.layers
        us = "-" if op.us is None else f"{op.us / n:.1f}"
        launches = "-" if op.launches is None else f"{op.launches / n:.1f}"
        lines.append(
            f"  {name:<20} {op.calls / n:>6.1f} {launches:>9} {us:>10} {op.floor_us / n:>9.1f} "
            f"{op.bytes / n / 1e6:>9.2f} {op.flops / n / 1e9:>9.2f}"
        )
    return "\n".join(lines)


def layer_row(found: Measurement, parts: EngineParts, args: EngineArgs) -> dict[str, Any]:
    """The row; ops are sums over all layers."""
    rate, flop_rate, source = ceilings(arch_of_device(parts.device))
    return {
        "op": "layer",
        "case": found.case.name,
        **machine(parts.device),
        "model": args.model_path,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "rank_slice": args.rank_slice,
        "layers": found.layers,
        "timed": "graph" if found.graph else "eager",
        "us_per_layer": round(found.us, 2),
        "graph_us_per_layer": None if found.graph_us is None else round(found.graph_us, 2),
        "floor_us_per_layer": None if found.floor_us is None else round(found.floor_us, 2),
        "over_floor": None if found.over_floor is None else round(found.over_floor, 3),
        "ceilings": {"bytes_per_s": rate, "flops": flop_rate, "source": source},
        "variants": {choice.op: choice.variant for choice in parts.model.ops.choices},
        "ops": {name: asdict(op) for name, op in found.ops.items()},
    }
