"""`inkling-rocm verify`: compile every Triton kernel for AMD and run it on the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inkling_rocm.cli import engine_options as options


def verify(
    arch: Annotated[
        list[str] | None, typer.Option(help="gfx942 or gfx950; repeat for both. Default: both.")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help="A launcher (package.launcher) or a package; repeatable. Default: all."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the full report here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table of the docs here.")] = None,
) -> None:
    """Compile and emulate every registered kernel; exits 1 on any failure. Needs no GPU."""
    options.require_triton("verify")
    from inkling_rocm.verify import verify as run
    from inkling_rocm.verify.run import EMULATED_ARCHS

    try:
        failures = run(arch or EMULATED_ARCHS, op or (), json, markdown, say=typer.echo)
    except ValueError as error:  # an unknown architecture or launcher
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if failures:
        raise typer.Exit(1)
