"""`inkling-rocm parity`: the same tiny models on several targets, compared op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inkling_rocm.cli import engine_options as options


def parity(
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="cpu, gfx942, gfx950 (both emulated) or cuda (this machine's GPU); repeatable. "
            "Default: all that can run here."
        ),
    ] = None,
    problem: Annotated[
        list[str] | None, typer.Option(help="Name of a tiny model; repeatable. Default: all.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32 or bfloat16; repeatable. Default: both.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Folder to write the target's outputs and tokens to.")
    ] = None,
    commit: Annotated[str, typer.Option(help="Kept in a recording: what was run.")] = "",
    against: Annotated[
        Path | None, typer.Option(help="Folder of recordings to compare the targets with.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all errors and budgets here.")] = None,
) -> None:
    """Compare targets with float64, op by op and layer by layer; exits 1 on any failure."""
    import json as json_format
    from importlib.util import find_spec

    import torch

    from inkling_rocm.parity.report import parity as run

    versions = {"torch": str(torch.__version__)}
    if find_spec("triton") is not None:
        import triton

        versions["triton"] = triton.__version__
    if target is None:
        emulated = ["gfx942", "gfx950"] if "triton" in versions else []
        target = ["cpu", *emulated, *(["cuda"] if torch.cuda.is_available() else [])]
    elif any(name != "cpu" for name in target):
        options.require_triton(f"--target {' '.join(name for name in target if name != 'cpu')}")
    device = torch.cuda.get_device_name() if "cuda" in target and torch.cuda.is_available() else ""
    try:
        results, failures = run(
            target,
            problem or (),
            dtype or (),
            record=record,
            against=against,
            device=device or target[0],
            commit=commit,
            versions=versions,
            say=typer.echo,
        )
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(json_format.dumps(results, indent=1), encoding="utf-8")
    if failures:
        raise typer.Exit(1)
